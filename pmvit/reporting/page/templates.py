"""What the report and the local page share: templates, scripts, and the data of the block viewer."""

import base64
import hashlib
import json
import math
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from torch import Tensor

from pmvit.planning.adaptive import AdaptivePlan
from pmvit.reporting.blocks import describe_blocks
from pmvit.reporting.saved_model import SavedModel
from pmvit.saving.commands import versions

WEB = Path(__file__).parents[1] / "web"
LARGEST_PLAN = 2_000_000  # bytes
VIEWED = ("name", "compressed", "grid", "groups", "centres", "kept_in_mlp", "prefix")


def render(template: str, saved: SavedModel, pictures: list[dict[str, Any]], **values: Any) -> str:
    """A page about a model, in which every text is escaped; the block viewer shows these pictures."""
    environment = Environment(
        loader=PackageLoader("pmvit.reporting", "web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["json_data"] = json_data
    return environment.get_template(template).render(
        title=saved.config["model"]["architecture"],
        no_blocks=saved.no_blocks,
        viewer=viewer_data(saved, pictures),
        versions=versions(),
        **values,
    )


def json_data(value: Any) -> str:
    """JSON that can stand inside a script element: nothing in it can end the element."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c").replace("\u2028", "\\u2028")


def viewer_data(saved: SavedModel, pictures: list[dict[str, Any]]) -> dict[str, Any] | None:
    """What the block viewer gets; `None` without a plan.

    Of a very large plan, scores and weights are left out; if each picture has blocks of its own, the last pictures are.
    """
    if saved.plan is None:
        return None
    if saved.blocks is None:
        while len(json_data(pictures)) > LARGEST_PLAN:
            pictures = pictures[:-1]
        return {"blocks": [], "reconstruct": saved.plan.reconstruct, "images": pictures}
    for names in (("weights", "scores"), ("weights",), ()):
        short = [_viewed(block) | _rounded(block, names) for block in saved.blocks]
        if len(json_data(short)) < LARGEST_PLAN:
            break
    return {"blocks": short, "reconstruct": saved.plan.reconstruct, "images": pictures}


def chosen_blocks(saved: SavedModel, image: Tensor) -> dict[str, Any]:
    """What a picture in the block viewer brings along: the `blocks` of a prepared image, if it chooses its groups."""
    if not isinstance(saved.plan, AdaptivePlan):
        return {}
    described = describe_blocks(saved.model, image=image)
    return {"blocks": [_viewed(block) for block in described]}


def _viewed(block: dict[str, Any]) -> dict[str, Any]:
    """What the block viewer has to know of a block; of videos, one frame stands below the other."""
    *frames, rows, columns = block["grid"]
    return {**{name: block[name] for name in VIEWED}, "grid": [math.prod(frames) * rows, columns]}


def _rounded(block: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: block[name] and [float(f"{value:.3g}") for value in block[name]] for name in names}


def read_web(name: str) -> str:
    """A file of the pages."""
    return (WEB / name).read_text(encoding="utf-8")


def content_hash(text: str) -> str:
    """What a content security policy calls a script or a style sheet by."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
