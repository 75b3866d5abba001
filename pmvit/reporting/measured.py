"""What a report measures itself: accuracy and speed of a model and its original, kept beside the report as JSON."""

import copy
import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pmvit.compression import plan_of
from pmvit.evaluation.paired import evaluate_pair
from pmvit.files import check_fields, read_document, write_text
from pmvit.measuring.flops import flops
from pmvit.reporting.gallery import gallery, open_batches
from pmvit.reporting.seen import class_names
from pmvit.runtime.bench.run import Makers, ready
from pmvit.runtime.bench.run import measure as measure_speed
from pmvit.runtime.bench.variants import variant

FORMAT, VERSION = "pmvit-report", 1
PICTURES = 12
BATCHES, LARGE_GFLOPS = (1, 16), 20.0  # a model that costs more is timed with single images
ROUNDS = 10


@dataclass(frozen=True)
class Measured:
    """What was measured for a report, as JSON data.

    Attributes:
        of: Of which model, original and images.
        evaluation: A `PairedEvaluation`; `None` if there were no images.
        speed: A `Benchmark` in eager PyTorch.
        pictures: Images to look at.
    """

    of: dict[str, Any]
    evaluation: dict[str, Any] | None
    speed: dict[str, Any] | None
    pictures: list[dict[str, Any]]

    def write(self, path: Path) -> None:
        """Keep it for the next report."""
        write_text(path, json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1) + "\n")

    @staticmethod
    def read(path: Path) -> "Measured":
        document = read_document(path, FORMAT, VERSION)
        names = ("of", "evaluation", "speed", "pictures")
        check_fields(document, ("format", "version", *names), str(path))
        return Measured(*(document[name] for name in names))


def measure(
    model: nn.Module,
    original: nn.Module,
    data: str | Path | None,
    of: dict[str, Any],
    *,
    limit: int | None = None,
    names: str | Path | None = None,
    workers: int = 2,
    progress: bool = True,
) -> Measured:
    """Measure accuracy on images, and speed on built-in pictures, of a compressed model and its original."""
    evaluation: dict[str, Any] | None = None
    pictures: list[dict[str, Any]] = []
    if data is not None:
        batches = open_batches(model, data, limit=limit, workers=workers)
        evaluation = asdict(evaluate_pair(model, original, batches, limit=limit, progress=progress))
        pictures = gallery(model, original, data, PICTURES, class_names(model, names))
    return Measured(of, evaluation, _speed(model, original, progress), pictures)


def _speed(model: nn.Module, original: nn.Module, progress: bool) -> dict[str, Any]:
    """Original and compressed model take turns; one that a plan compressed runs after the deployment passes, too."""
    makers: Makers = {}
    for name, each in (("original", original), ("compressed", model)):
        makers[name] = partial(ready, copy.deepcopy(each).to("cpu", torch.float32))
    if plan_of(model) is not None:
        makers["optimized"] = partial(variant, "optimized", copy.deepcopy(model).to("cpu", torch.float32))
    batches = BATCHES if flops(original).gflops < LARGE_GFLOPS else BATCHES[:1]
    found = measure_speed(model, makers, ["eager"], batches, ROUNDS, None, None, False, progress)
    return {"environment": found.environment, "rows": [asdict(row) for row in found.rows]}
