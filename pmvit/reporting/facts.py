"""What is known of a compressed model: from its own files, and from what other commands left in its folder."""

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from pmvit.commands import read_commands
from pmvit.compression import compression_of, decompress, plan_of
from pmvit.errors import PmvitError
from pmvit.loading import create_model
from pmvit.measuring import Scores
from pmvit.measuring.flops import Flops, flops
from pmvit.pipeline import COMPRESSED, RESULTS_FILE
from pmvit.reporting.blocks import BlockDescription, describe_blocks
from pmvit.saving import CONFIG_FILE, load, read_metadata
from pmvit.training.metrics import read_metrics
from pmvit.training.record import FILE as FINETUNE_FILE

SAME_WEIGHTS = "the tuned weights, uncompressed"


@dataclass(frozen=True)
class Facts:
    """A compressed model and its history.

    Attributes:
        path: Where it was loaded from.
        model: The model.
        original: What it is compared with.
        original_title: What that is, where it is not simply the original.
        config: Its `config.json`.
        costs: Of the original and of the compressed model.
        blocks: What happens to the patches of each block; `None` if there is no plan.
        no_blocks: Why there is none.
        commands: Those that made it.
        stages: `results.json` of `pmvit run`.
        metrics: The lines of `metrics.jsonl`.
        tuning: `finetune.json`.
    """

    path: Path
    model: nn.Module
    original: nn.Module
    original_title: str
    config: dict[str, Any]
    costs: tuple[Flops, Flops]
    blocks: list[BlockDescription] | None
    no_blocks: str
    commands: list[dict[str, Any]]
    stages: dict[str, Any]
    metrics: list[dict[str, Any]]
    tuning: dict[str, Any] | None

    @property
    def checksum(self) -> str:
        """Tells this model from all others."""
        return "-".join(value[:16] for _, value in sorted(self.config["sha256"].items()))


def collect(path: Path, original: str | Path | nn.Module | None = None) -> Facts:
    """Load a compressed model and all that is known of it.

    Args:
        path: What `save` wrote.
        original: What it is compared with: a model, or the path of a saved one. If not given, it is found where `run`
            and `finetune` left it; else it is the same weights uncompressed.

    Raises:
        PmvitError: If there is no compressed model, or a file beside it is broken.
    """
    model = load(path)
    compression = compression_of(model)
    if compression is None:
        raise PmvitError(f"expected a compressed model to report on; {path} is not compressed: use `pmvit compress`")
    text = (path / CONFIG_FILE).read_text(encoding="utf-8") if path.is_dir() else read_metadata(path)[CONFIG_FILE]
    folder = path if path.is_dir() else path.parent
    beside = path.is_dir()
    tuning = read_json(folder / FINETUNE_FILE) if beside and (folder / FINETUNE_FILE).exists() else None
    metrics = read_metrics(folder) if beside else []
    reference, title = _find_original(folder, model, tuning, original, is_tuned=tuning is not None or bool(metrics))
    blocks, reason = None, ""
    if plan_of(model) is not None:
        scores = folder / "scores.json" if beside else path.with_suffix(".scores.json")
        blocks = describe_blocks(model, Scores.load(scores) if scores.exists() else None)
    else:
        name = compression.what.title
        reason = f"{name} chooses its tokens anew for every image while it runs, so there is no plan to show."
    return Facts(
        path=path,
        model=model,
        original=reference,
        original_title=title,
        config=json.loads(text),
        costs=(flops(reference), flops(model)),
        blocks=blocks,
        no_blocks=reason,
        commands=read_commands(path),
        stages=read_json(folder / RESULTS_FILE) if beside and (folder / RESULTS_FILE).exists() else {},
        metrics=metrics,
        tuning=tuning,
    )


def _find_original(
    folder: Path,
    model: nn.Module,
    tuning: dict[str, Any] | None,
    given: str | Path | nn.Module | None,
    *,
    is_tuned: bool,
) -> tuple[nn.Module, str]:
    """The original, and what it is if it is not simply that."""
    if isinstance(given, nn.Module):
        return given.eval(), ""
    if given is not None:
        found = create_model(str(given))
        return _uncompressed(found), f"{given}"
    began_with = ((tuning or {}).get("command") or {}).get("model")
    for place in (folder / COMPRESSED, None if began_with is None else Path(began_with)):
        if tuning is not None and place is not None and (place / CONFIG_FILE).exists():
            found = load(place)
            return _uncompressed(found), ""
    return decompress(copy.deepcopy(model)), SAME_WEIGHTS if is_tuned else ""


def _uncompressed(model: nn.Module) -> nn.Module:
    return model if compression_of(model) is None else decompress(model)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; raise `PmvitError` if it is none."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PmvitError(f"expected a JSON file at {path}; there is none") from None
    except (OSError, ValueError) as error:
        raise PmvitError(f"{path}: expected JSON, got text that breaks off or is malformed ({error})") from None
    if not isinstance(document, dict):
        raise PmvitError(f"{path}: expected a JSON object, got {type(document).__name__}: is it another file?")
    return document
