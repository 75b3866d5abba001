"""What is known of a compressed model: from its own files, and from what other commands left in its folder."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pmvit.compression import compression_of, plan_of
from pmvit.errors import PmvitError
from pmvit.evaluation.reference import Reference, reference_for
from pmvit.measuring import Scores
from pmvit.pipeline import RESULTS_FILE
from pmvit.reporting.blocks import describe_blocks
from pmvit.saving.commands import read_commands
from pmvit.saving.models import CONFIG_FILE, load
from pmvit.tensors import read_texts
from pmvit.training.metrics import read_metrics
from pmvit.training.record import FILE as FINETUNE_FILE

SCORES_FILE = "scores.json"


@dataclass(frozen=True)
class SavedModel:
    """A compressed model, and what its own files and those that other commands left in its folder say of it.

    Attributes:
        path: Where it was loaded from.
        model: The model.
        reference: What it is compared with: its original, if that is at hand.
        config: Its `config.json`.
        blocks: What happens to the patches of each block; `None` if there is no plan.
        no_blocks: Why there is none.
        commands: Those that made it.
        stages: `results.json` of `pmvit run`.
        metrics: The lines of `metrics.jsonl`.
        tuning: `finetune.json`.
    """

    path: Path
    model: nn.Module
    reference: Reference
    config: dict[str, Any]
    blocks: list[dict[str, Any]] | None
    no_blocks: str
    commands: list[dict[str, Any]]
    stages: dict[str, Any]
    metrics: list[dict[str, Any]]
    tuning: dict[str, Any] | None

    @property
    def checksum(self) -> str:
        """Tells this model from all others."""
        return "-".join(value[:16] for _, value in sorted(self.config["sha256"].items()))


def open_saved(
    path: Path, original: str | Path | nn.Module | None = None, device: str | torch.device = "cpu"
) -> SavedModel:
    """Load a compressed model and all that is known of it.

    Args:
        path: What `save` wrote.
        original: What it is compared with: a model, or the path of a saved one. If not given, what it was made of; if
            that is not at hand, the same weights uncompressed.
        device: Where both compute.

    Raises:
        PmvitError: If there is no compressed model, or a file beside it is broken.
    """
    model = load(path, device=device)
    compression = compression_of(model)
    if compression is None:
        raise PmvitError(f"expected a compressed model to report on; {path} is not compressed: use `pmvit compress`")
    is_folder = path.is_dir()
    text = (path / CONFIG_FILE).read_text(encoding="utf-8") if is_folder else read_texts(path)[CONFIG_FILE]
    scores = path / SCORES_FILE if is_folder else path.with_suffix(f".{SCORES_FILE}")
    tuning, stages = (
        read_json(path / name) if (path / name).exists() else None for name in (FINETUNE_FILE, RESULTS_FILE)
    )
    blocks, reason = (
        None,
        f"{compression.what.title} chooses its tokens anew for every image, so there is no plan to show.",
    )
    if plan_of(model) is not None:
        blocks, reason = describe_blocks(model, Scores.load(scores) if scores.exists() else None), ""
    return SavedModel(
        path=path,
        model=model,
        reference=reference_for(model, original),
        config=json.loads(text),
        blocks=blocks,
        no_blocks=reason,
        commands=read_commands(path),
        stages=stages or {},
        metrics=read_metrics(path) if is_folder else [],
        tuning=tuning,
    )


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
