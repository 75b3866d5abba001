"""A model and its original on the same images: what each reaches, and the difference, with intervals."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pmvit.data.batches import unpack
from pmvit.evaluation.classification import measure_each_image
from pmvit.evaluation.segmentation import count_pixels, labels_pixels, mean_iou
from pmvit.numbers.bootstrap import bootstrap, mean
from pmvit.numbers.estimates import Estimate, wilson
from pmvit.numbers.measures import MEASURES

COMPARING = ("agreement", "kl", "cosine")  # these are of both models


@dataclass(frozen=True)
class PairedMeasure:
    """One thing that was measured: `name` is that of the field of `Evaluation` or `SegmentationEvaluation`.

    What compares the two models, as agreement, is the compressed model's alone; `difference` is compressed - original.
    """

    name: str
    compressed: Estimate
    original: Estimate | None = None
    difference: Estimate | None = None


@dataclass(frozen=True)
class PairedEvaluation:
    """Both models on the same images."""

    images: int
    broken: int
    measures: tuple[PairedMeasure, ...]


def evaluate_pair(
    model: nn.Module, original: nn.Module, data: Iterable[Any], *, limit: int | None = None, progress: bool = True
) -> PairedEvaluation:
    """Measure a compressed model and its original on the same images, with 95 % intervals.

    `data` is a loader of `(images, labels)` or of images, whole ones for models that label pixels; at most `limit` of
    them are taken, as they come.
    """
    shown = data if limit is None else list(_first(data, limit))
    if labels_pixels(model):
        own = count_pixels(model, shown, original, progress)
        measures = [_measured("pixel_agreement", own["same"] / own["pixels"])]
        if "classes" in own:
            measures.insert(0, _paired_iou(own["classes"], own["reference_classes"]))
    else:
        own, before = measure_each_image([model, original], shown, original, progress)
        names = [name for name in MEASURES if name in own]
        measures = [_measured(name, own[name], None if name in COMPARING else before[name]) for name in names]
    return PairedEvaluation(len(own["images"]), len(getattr(data, "broken", ())), tuple(measures))


def _first(data: Iterable[Any], limit: int) -> Iterator[tuple[Tensor, Tensor] | Tensor]:
    """The first images of a loader."""
    for batch in data:
        images, labels = unpack(batch)
        yield images[:limit] if labels is None else (images[:limit], labels[:limit])
        limit -= len(images)
        if limit <= 0:
            return


def _measured(name: str, own: Tensor, before: Tensor | None = None) -> PairedMeasure:
    """What each image says of the model, and of the original where that is another thing."""
    if before is None:
        return PairedMeasure(name, _estimate(name, own))
    return PairedMeasure(name, _estimate(name, own), _estimate(name, before), bootstrap(own - before))


def _estimate(name: str, values: Tensor) -> Estimate:
    """The mean over images: Wilson's interval where each is right or wrong, the bootstrap's where not."""
    if MEASURES[name].counts_images and bool(((values == 0) | (values == 1)).all()):
        return wilson(float(values.mean()), len(values))
    return bootstrap(values)


def _paired_iou(own: Tensor, before: Tensor) -> PairedMeasure:
    """Mean IoU from counts of each image, (images, 3, classes)."""

    def drawn_iou(times: Tensor, counts: Tensor) -> Tensor:
        return mean_iou(mean(times, counts))

    both = torch.stack([own, before], 1)
    difference = bootstrap(both, lambda *drawn: -drawn_iou(*drawn).diff()[:, 0])
    return PairedMeasure("miou", bootstrap(own, drawn_iou), bootstrap(before, drawn_iou), difference)
