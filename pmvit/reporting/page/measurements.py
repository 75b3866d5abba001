"""What a report measures itself: accuracy and speed of a model and its original, kept beside the report as JSON."""

import copy
import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn

from pmvit.data.demo import DEMO, demo_images, demo_loader
from pmvit.data.loaders import Broken
from pmvit.data.segmentation import has_masks
from pmvit.data.sources import choose_samples
from pmvit.evaluation.paired import evaluate_pair
from pmvit.files import check_fields, read_document, write_text
from pmvit.hosts import host_of
from pmvit.hosts.modes import evaluation_mode
from pmvit.hosts.outputs import gives_logits, predict
from pmvit.loading import open_images, open_loader
from pmvit.measuring.flops import flops
from pmvit.reporting.class_names import class_names, name_of
from pmvit.reporting.images import InputImages, likeliest, page_picture, readable
from pmvit.reporting.page.templates import chosen_blocks
from pmvit.reporting.saved_model import SavedModel
from pmvit.runtime.bench.run import Maker, benchmark
from pmvit.runtime.bench.variants import variant

FORMAT, VERSION = "pmvit-report", 1
PICTURES = 12
BATCHES, LARGE_GFLOPS = (1, 16), 20.0  # a model that costs more is timed with single images
ROUNDS = 10


@dataclass(frozen=True)
class Measurements:
    """What was measured for a report, as JSON data."""

    of: dict[str, Any]  # of which model, original and images
    evaluation: dict[str, Any] | None  # a `PairedEvaluation`
    speed: dict[str, Any] | None  # a `Benchmark`
    pictures: list[dict[str, Any]]  # for the block viewer

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
    limit: int | None,
    names: str | Path | None,
    workers: int,
    progress: bool,
) -> Measurements:
    """Measure accuracy on images, and speed on built-in pictures, of a model and what it is compared with.

    If there is a limit, the images come in an order that depends on nothing but a seed.
    """
    model, original = saved.model, saved.reference.model
    if data == DEMO:
        batches: Any = demo_loader("test")
    else:
        labels = host_of(model).outputs().pixel_classes is None or has_masks(data)
        options: dict[str, Any] = {"split": "val", "workers": workers, "shuffle": limit is not None}
        batches = open_loader(model, data, labels=labels, whole=True, **options)
    evaluation = asdict(evaluate_pair(model, original, batches, limit=limit, progress=progress))
    pictures = _gallery(saved, data, class_names(model, names, data))
    return Measurements(of, evaluation, _speed(saved, progress), pictures)


def _gallery(saved: SavedModel, data: str | Path, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Images taken evenly from all there are, each as JSON data: `src`, `caption`, and the first predictions; with an
    adaptive plan `blocks`, too.
    """
    model, original = saved.model, saved.reference.model
    images = InputImages(model)
    classifies = gives_logits(model) and host_of(model).outputs().pixel_classes is None
    if data == DEMO:
        pictures, labels = demo_images("test", PICTURES)
        shown: list[tuple[Image.Image, str, Any]] = [
            (Image.fromarray(picture.numpy()), f"Fashion-MNIST, test image {number}", label)
            for number, (picture, label) in enumerate(zip(pictures, labels.tolist(), strict=True))
        ]
    else:
        has_labels = host_of(model).outputs().pixel_classes is None
        samples = choose_samples(open_images(model, data, labels=has_labels, split="val"), PICTURES)
        opened = readable(samples, images.mode, Broken())
        shown = [(picture, Path(sample.name).name, sample.label) for _, sample, picture in opened]
    device = next(model.parameters()).device
    made = []
    with evaluation_mode(model), evaluation_mode(original), torch.inference_mode():
        for picture, name, label in shown:
            prepared = images.prepare(picture)
            entry: dict[str, Any] = {"src": page_picture(images.picture(prepared)), "caption": name}
            entry |= chosen_blocks(saved, prepared)
            if isinstance(label, int) and classifies:
                entry["label"] = name_of(label, names)
            if classifies:
                for key, each in (("original", original), ("compressed", model)):
                    entry[key] = likeliest(predict(each, prepared[None].to(device))[0].cpu(), names, 1)[0]
            made.append(entry)
    return made


def _speed(saved: SavedModel, progress: bool) -> dict[str, Any]:
    """Original and compressed model take turns; one that a plan compressed runs after the deployment passes, too."""
    models = {"original": saved.reference.model, "compressed": saved.model}
    copies = {name: copy.deepcopy(model).to("cpu", torch.float32) for name, model in models.items()}
    makers: dict[str, nn.Module | Maker] = {**copies}
    if saved.plan is not None:
        makers["optimized"] = partial(variant, "optimized", copies["compressed"])
    batches = BATCHES if flops(saved.reference.model).gflops < LARGE_GFLOPS else BATCHES[:1]
    return asdict(benchmark(saved.model, against=makers, batches=batches, rounds=ROUNDS, progress=progress))
