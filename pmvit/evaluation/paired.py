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

    Args:
        model: The compressed model.
        original: What it was made of.
        data: A loader of `(images, labels)` or of images; for models that label pixels, of whole images and masks.
        limit: How many images at most, taken as they come.
        progress: Show a progress bar.

    Raises:
        PmvitError: If there is no image, or a label that the models do not know.
    """
    shown = data if limit is None else list(_first(data, limit))
    if labels_pixels(model):
        counts = count_pixels(model, shown, reference=original, progress=progress)
        images, measures = counts.evaluation().images, [_single("pixel_agreement", _shares(counts.same, counts.pixels))]
        if counts.models[0].classes:
            measures.insert(0, _paired_iou(*(torch.cat(one.classes) for one in counts.models)))
    else:
        (own, before), images = measure_each_image([model, original], shown, original, progress)
        names = [name for name in MEASURES if name in own]
        compares = ("agreement", "kl", "cosine")
        measures = [
            _single(name, own[name]) if name in compares else _pair(name, own[name], before[name]) for name in names
        ]
    return PairedEvaluation(images, len(getattr(data, "broken", ())), tuple(measures))


def _first(data: Iterable[Any], limit: int) -> Iterator[tuple[Tensor, Tensor] | Tensor]:
    """The first images of a loader."""
    for batch in data:
        images, labels = unpack(batch)
        yield images[:limit] if labels is None else (images[:limit], labels[:limit])
        limit -= len(images)
        if limit <= 0:
            return


def _shares(some: list[int], of: list[int]) -> Tensor:
    return torch.tensor(some, dtype=torch.float64) / torch.tensor(of)


def _single(name: str, values: Tensor) -> PairedMeasure:
    """What is one number for both models."""
    return PairedMeasure(name, _estimate(name, values))


def _pair(name: str, own: Tensor, before: Tensor) -> PairedMeasure:
    return PairedMeasure(name, _estimate(name, own), _estimate(name, before), bootstrap(own - before))


def _estimate(name: str, values: Tensor) -> Estimate:
    """The mean over images: Wilson's interval where each is right or wrong, the bootstrap's where not."""
    if MEASURES[name].counts_images and bool(((values == 0) | (values == 1)).all()):
        return wilson(float(values.mean()), len(values))
    return bootstrap(values)


def _paired_iou(own: Tensor, before: Tensor) -> PairedMeasure:
    """Mean IoU from counts of each image, (images, 3, classes)."""
    after, original = (bootstrap(counts, _drawn_iou) for counts in (own, before))
    both = torch.stack([own, before], 1)
    return PairedMeasure("miou", after, original, bootstrap(both, lambda *drawn: -_drawn_iou(*drawn).diff()[:, 0]))


def _drawn_iou(times: Tensor, counts: Tensor) -> Tensor:
    return mean_iou(mean(times, counts))
