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

WEB = Path(__file__).parents[1] / "web"
LARGEST_PLAN = 2_000_000  # bytes
VIEWED = ("name", "compressed", "grid", "groups", "centres", "kept_in_mlp", "prefix")


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


def viewer_data(blocks: Sequence[dict[str, Any]], model: nn.Module, pictures: list[dict[str, Any]]) -> dict[str, Any]:
    """What the block viewer gets; the scores and weights of a very large plan are left out."""
    plan = plan_of(model)
    reconstruct = plan.reconstruct if plan is not None else "residual"
    for numbers in (("weights", "scores"), ("weights",), ()):
        short = [{name: block[name] for name in VIEWED} | _rounded(block, numbers) for block in blocks]
        if len(json_data(short)) < LARGEST_PLAN:
            break
    return {"blocks": short, "reconstruct": reconstruct, "images": pictures}


def _rounded(block: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    known = {name: block[name] for name in names}
    return {name: values and [float(f"{value:.3g}") for value in values] for name, values in known.items()}


def read_web(name: str) -> str:
    """A file of the pages."""
    return (WEB / name).read_text(encoding="utf-8")


def content_hash(text: str) -> str:
    """What a content security policy calls a script or a style sheet by."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
