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
from pmvit.data.demo import DEMO, demo_loader
from pmvit.data.segmentation import has_masks
from pmvit.evaluation.paired import evaluate_pair
from pmvit.files import check_fields, read_document, write_text
from pmvit.hosts import host_of
from pmvit.loading import open_loader
from pmvit.measuring.flops import flops
from pmvit.reporting.class_names import class_names
from pmvit.reporting.page.gallery import gallery
from pmvit.reporting.saved_model import SavedModel
from pmvit.runtime.bench.run import Makers, ready
from pmvit.runtime.bench.run import measure as measure_speed
from pmvit.runtime.bench.variants import variant

FORMAT, VERSION = "pmvit-report", 1
PICTURES = 12
BATCHES, LARGE_GFLOPS = (1, 16), 20.0  # a model that costs more is timed with single images
ROUNDS = 10


@dataclass(frozen=True)
class Measurements:
    """What was measured for a report, as JSON data.

    Attributes:
        of: Of which model, original and images.
        evaluation: A `PairedEvaluation`; `None` if none was made.
        speed: A `Benchmark`; `None` if none was made.
        pictures: Images for the block viewer.
    """

    of: dict[str, Any]
    evaluation: dict[str, Any] | None
    speed: dict[str, Any] | None
    pictures: list[dict[str, Any]]

    def write(self, path: Path) -> None:
        """Keep it for the next report."""
        write_text(path, json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1) + "\n")

    @staticmethod
    def read(path: Path) -> "Measurements":
        document = read_document(path, FORMAT, VERSION)
        names = ("of", "evaluation", "speed", "pictures")
        check_fields(document, ("format", "version", *names), str(path))
        return Measurements(*(document[name] for name in names))


def measure(
    saved: SavedModel,
    data: str | Path,
    of: dict[str, Any],
    *,
    limit: int | None = None,
    names: str | Path | None = None,
    workers: int = 2,
    progress: bool = True,
) -> Measurements:
    """Measure accuracy on images, and speed on built-in pictures, of a model and what it is compared with."""
    model, original = saved.model, saved.reference.model
    batches = _open_batches(model, data, limit=limit, workers=workers)
    evaluation = asdict(evaluate_pair(model, original, batches, limit=limit, progress=progress))
    pictures = gallery(model, original, data, PICTURES, class_names(model, names, data))
    return Measurements(of, evaluation, _speed(model, original, progress), pictures)


def _open_batches(model: nn.Module, data: str | Path, *, limit: int | None, workers: int) -> Any:
    """Batches to evaluate on; if there is a limit, the images come in an order that depends on nothing but a seed."""
    if data == DEMO:
        return demo_loader("test")
    pixels = host_of(model).outputs().pixel_classes is not None
    masks = pixels and has_masks(data)
    return open_loader(
        model,
        data,
        labels=masks or not pixels,
        whole=masks,
        split="val",
        workers=workers,
        shuffle=limit is not None,
    )


def _speed(model: nn.Module, original: nn.Module, progress: bool) -> dict[str, Any]:
    """Original and compressed model take turns; one that a plan compressed runs after the deployment passes, too."""
    makers: Makers = {}
    for name, each in (("original", original), ("compressed", model)):
        makers[name] = partial(ready, copy.deepcopy(each).to("cpu", torch.float32))
    if plan_of(model) is not None:
        makers["optimized"] = partial(variant, "optimized", copy.deepcopy(model).to("cpu", torch.float32))
    batches = BATCHES if flops(original).gflops < LARGE_GFLOPS else BATCHES[:1]
    return asdict(measure_speed(model, makers, batches=batches, rounds=ROUNDS, progress=progress))
