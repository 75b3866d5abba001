"""What is known of a compressed model: from its own files, and from what other commands left in its folder."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from pmvit.compression import compression_of
from pmvit.errors import PmvitError
from pmvit.evaluation.reference import reference_for
from pmvit.files import parse_json, read_json, read_text
from pmvit.measuring import Scores
from pmvit.pipeline import RESULTS_FILE, measured_file
from pmvit.planning import Plan
from pmvit.planning.planner import AnyPlan
from pmvit.reporting.blocks import describe_blocks
from pmvit.saving.commands import read_commands
from pmvit.saving.hub import local_path
from pmvit.saving.models import load
from pmvit.saving.parts import CONFIG_FILE
from pmvit.tensors import read_texts
from pmvit.training.metrics import read_metrics
from pmvit.training.record import FILE as FINETUNE_FILE


class SavedModel:
    """A compressed model, and what its own files and those that other commands left in its folder say of it.

    Args:
        path: What `save` wrote.
        original: What it is compared with: a model, or the path of a saved one. If not given, what it was made of; if
            that is not at hand, the same weights uncompressed.
        device: Where both compute.

    Attributes:
        config: Its `config.json`.
        recipe: What compressed it; the same as `plan`, fixed or adaptive, which is `None` if it was another method.
        reference: What it is compared with.
        blocks: What happens to the patches of each block; `None` without a fixed plan, and `no_blocks` says why.
        commands: Those that made it.
        metrics: The lines of `metrics.jsonl`.
        tuned: How its weights were tuned since, in order: `calibrated`, `fine-tuned`.
        tuning: `finetune.json`, and `stages`: `results.json` of `pmvit run`; empty if they are not there.

    Raises:
        PmvitError: If there is no compressed model, or a file beside it is broken.
    """

    def __init__(
        self, path: Path, original: str | Path | nn.Module | None = None, device: str | torch.device = "cpu"
    ) -> None:
        path = local_path(path)
        self.path, self.model = path, load(path, device=device)
        compression = compression_of(self.model)
        if compression is None:
            raise PmvitError(
                f"expected a compressed model to report on; {path} is not compressed: use `pmvit compress`"
            )
        is_folder = path.is_dir()
        config = path / CONFIG_FILE
        text = read_text(config, "a configuration") if is_folder else read_texts(path)[CONFIG_FILE]
        self.config: dict[str, Any] = parse_json(text, str(path))
        self.reference = reference_for(self.model, original)
        self.recipe = compression.what
        self.plan = self.recipe if isinstance(self.recipe, AnyPlan) else None
        self.no_blocks = f"{self.recipe.title} chooses its tokens anew for every image, so there is no plan to show."
        if self.plan is not None:
            self.no_blocks = (
                f"Every image chooses which tokens merge: pmvit report {path} --data IMAGES shows it of some."
            )
        self.blocks: list[dict[str, Any]] | None = None
        if isinstance(self.plan, Plan):
            scores = measured_file(path, "scored")
            self.blocks = describe_blocks(self.model, Scores.load(scores) if scores.exists() else None)
        self.commands = read_commands(path)
        self.metrics = read_metrics(path) if is_folder else []
        self.tuning, self.stages = (
            read_json(path / name) if (path / name).exists() else {} for name in (FINETUNE_FILE, RESULTS_FILE)
        )
        is_tuned = bool(self.tuning or self.metrics)  # older models do not say it themselves
        self.tuned: tuple[str, ...] = compression.tuned or (("fine-tuned",) if is_tuned else ())
