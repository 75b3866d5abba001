"""What the report and the local page share: templates, scripts, and the data of the block viewer."""

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from torch import nn

from pmvit.compression import plan_of
from pmvit.reporting.blocks import BlockDescription

WEB = Path(__file__).with_name("web")
LARGEST_PLAN = 2_000_000  # bytes


def environment() -> Environment:
    """Templates in which every text is escaped."""
    made = Environment(
        loader=PackageLoader("pmvit.reporting", "web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["json_data"] = json_data
    return made


def json_data(value: Any) -> str:
    """JSON that can stand inside a script element: nothing in it can end the element."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c").replace("\u2028", "\\u2028")


def viewer_data(blocks: Sequence[BlockDescription], model: nn.Module, pictures: list[dict[str, Any]]) -> dict[str, Any]:
    """What the block viewer gets; the scores and weights of a very large plan are left out."""
    plan = plan_of(model)
    reconstruct = plan.reconstruct if plan is not None else "residual"
    for keys in (("weights", "scores"), ("weights",), ()):
        short = [_short(block, keys) for block in blocks]
        if len(json_data(short)) < LARGEST_PLAN:
            break
    return {"blocks": short, "reconstruct": reconstruct, "images": pictures}


def _short(block: BlockDescription, keys: Sequence[str]) -> dict[str, Any]:
    everything: dict[str, Any] = {**block}
    made = {
        name: everything[name] for name in ("name", "compressed", "grid", "groups", "centres", "kept_in_mlp", "prefix")
    }
    for key in keys:
        values: list[float] | None = everything[key]
        made[key] = None if values is None else [float(f"{value:.3g}") for value in values]
    return made


def read_web(name: str) -> str:
    """A file of the pages."""
    return (WEB / name).read_text(encoding="utf-8")


def content_hash(text: str) -> str:
    """What a content security policy calls a script or a style sheet by."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
