"""What a report measures itself: accuracy and speed of a model and its original, kept beside the report as JSON."""

import copy
import json
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from pmvit.data.batches import resize_labels
from pmvit.data.demo import DEMO, demo_images, demo_loader
from pmvit.data.loaders import Broken
from pmvit.data.opening import evaluation_loader, open_images
from pmvit.data.sources import choose_samples
from pmvit.evaluation.paired import Disagreement, evaluate_pair
from pmvit.files import fields_from, read_document, write_document
from pmvit.hosts import host_of
from pmvit.hosts.modes import evaluation_mode
from pmvit.hosts.outputs import gives_logits, predict
from pmvit.measuring.flops import flops
from pmvit.numbers.tables import format_number
from pmvit.reporting.class_names import class_names, name_of
from pmvit.reporting.images import InputImages, likeliest, page_picture, readable
from pmvit.reporting.page.templates import chosen_blocks
from pmvit.reporting.pictures.segment import label_pixels
from pmvit.reporting.pictures.segmentation import SegmentedImage
from pmvit.reporting.saved_model import SavedModel
from pmvit.runtime.bench.run import Maker, benchmark
from pmvit.runtime.bench.variants import variant

FORMAT, VERSION = "pmvit-report", 1
PICTURES, APART = 12, 12  # images to look into, and images on which the models disagree most
APART_SIDE = 200  # pixels
BATCHES, LARGE_GFLOPS = (1, 16), 20.0  # a model that costs more is timed with single images
ROUNDS = 10


@dataclass(frozen=True)
class Measurements:
    """What was measured for a report, as JSON data."""

    of: dict[str, Any]  # of which model, original and images
    evaluation: dict[str, Any] | None  # a `PairedEvaluation`
    speed: dict[str, Any] | None  # a `Benchmark`
    pictures: list[dict[str, Any]]  # for the block viewer
    apart: list[dict[str, Any]] = field(default_factory=list)  # pictures of the images that differ most

    def write(self, path: Path) -> None:
        """Keep it for the next report."""
        write_document(path, json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1))

    @staticmethod
    def read(path: Path) -> "Measurements":
        document = read_document(path, FORMAT, VERSION)
        return Measurements(**fields_from(Measurements, document, str(path), beside=("format", "version")))


def measure(
    saved: SavedModel,
    data: str | Path,
    of: dict[str, Any],
    *,
    limit: int | None,
    names: str | Path | None,
    workers: int,
    memory: bool,
    progress: bool,
) -> Measurements:
    """Measure accuracy on images, and speed and memory on built-in pictures, of a model and what it is compared with.

    If there is a limit, the images come in an order that depends on nothing but a seed.
    """
    model, original = saved.model, saved.reference.model
    if data == DEMO:
        batches: Any = demo_loader("test")
    else:
        batches = evaluation_loader(model, data, workers=workers, shuffle=limit is not None)
    told = class_names(model, names, data)
    found = evaluate_pair(model, original, batches, limit=limit, most_apart=APART, progress=progress)
    evaluation = asdict(replace(found, apart=()))
    del evaluation["apart"]
    for one in evaluation["classes"]:
        one["name"] = name_of(one["number"], told)
    apart = [_apart(saved, one, told) for one in found.apart if one.distance > 0]
    return Measurements(of, evaluation, _speed(saved, memory, progress), _gallery(saved, data, told), apart)


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
    made = []
    with evaluation_mode(model), evaluation_mode(original), torch.inference_mode():
        for picture, name, label in shown:
            prepared = images.prepare(picture)
            entry: dict[str, Any] = {"src": page_picture(images.picture(prepared)), "caption": name}
            entry |= chosen_blocks(saved, prepared)
            if isinstance(label, int) and classifies:
                entry["label"] = name_of(label, names)
            made.append(entry | (_answers(saved, prepared, names) if classifies else {}))
    return made


def _answers(saved: SavedModel, prepared: Tensor, names: tuple[str, ...]) -> dict[str, Any]:
    """The first predictions of both models for an image."""
    image = prepared[None].to(next(saved.model.parameters()).device)
    models = {"original": saved.reference.model, "compressed": saved.model}
    return {name: likeliest(predict(model, image)[0].cpu(), names, 1)[0] for name, model in models.items()}


@torch.inference_mode()
def _apart(saved: SavedModel, one: Disagreement, names: tuple[str, ...]) -> dict[str, Any]:
    """An image on which the models disagree, as JSON data: `pictures` with their titles, `caption`, `lines`."""
    model, original = saved.model, saved.reference.model
    picture = InputImages(model).picture(one.image)
    pictures, name = [("", picture)], Path(one.name).name
    if (classes := host_of(model).outputs().pixel_classes) is not None:
        size = (picture.height, picture.width)
        labels = None if one.label is None else resize_labels(one.label[None], size)[0]
        before, after = (label_pixels(each, picture) for each in (original, model))
        panels = SegmentedImage(name, picture, classes, labels, before, after).panels()
        titles = ("image", *(("labels",) if labels is not None else ()), "original", "compressed", "difference")
        pictures = list(zip(titles, (panel for panel, _ in panels), strict=True))
        lines = [f"{format_number(one.distance, '.1%')} of the pixels have another class"]
    elif gives_logits(model):
        with evaluation_mode(model), evaluation_mode(original):
            said = _answers(saved, one.image, names)
        lines = [f"{key}: {value['name']}, {format_number(value['share'], '.0%')}" for key, value in said.items()]
        lines = ([f"label: {name_of(int(one.label), names)}"] if one.label is not None else []) + lines
    else:
        lines = [f"cosine {format_number(1 - one.distance, '.3f')}"]
    shown = [{"title": title, "src": page_picture(each, APART_SIDE)} for title, each in pictures]
    return {"pictures": shown, "caption": name, "lines": lines}


def _speed(saved: SavedModel, memory: bool, progress: bool) -> dict[str, Any]:
    """Original and compressed model take turns; one that a plan compressed runs after the deployment passes, too.

    Memory takes a process for each, and is measured at the largest batch.
    """
    models = {"original": saved.reference.model, "compressed": saved.model}
    copies = {name: copy.deepcopy(model).to("cpu", torch.float32) for name, model in models.items()}
    makers: dict[str, nn.Module | Maker] = {**copies}
    if saved.plan is not None:
        makers["optimized"] = partial(variant, "optimized", copies["compressed"])
    batches = BATCHES if flops(saved.reference.model).gflops < LARGE_GFLOPS else BATCHES[:1]
    how: dict[str, Any] = {"against": makers, "rounds": ROUNDS, "progress": progress}
    few = benchmark(saved.model, batches=batches[:-1], **how).rows if batches[:-1] else []
    found = benchmark(saved.model, batches=batches[-1:], memory=memory, **how)
    return asdict(replace(found, rows=[*few, *found.rows]))
