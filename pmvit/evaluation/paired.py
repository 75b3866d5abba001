"""A model and its original on the same images: what each reaches, and the difference, with intervals."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pmvit.data.batches import count_items, unpack, unreadable
from pmvit.data.opening import ImageData, evaluation_loader
from pmvit.errors import PmvitError
from pmvit.evaluation.classification import Measured, measure_each_image
from pmvit.evaluation.segmentation import class_iou, count_pixels, labels_pixels, mean_iou
from pmvit.evaluation.validation import pooled
from pmvit.numbers.bootstrap import bootstrap, mean
from pmvit.numbers.estimates import Estimate, wilson
from pmvit.numbers.measures import MEASURES
from pmvit.progress import track

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
class ClassChange:
    """What a class gains or loses: top-1 of its images, or IoU of its pixels.

    Without labels it is the class that the original sees, and `compressed` the share of its images on which both agree.
    """

    number: int
    images: int
    compressed: float
    original: float | None = None


@dataclass(frozen=True)
class Disagreement:
    """An image to which both models give different answers.

    Attributes:
        image: As the models get it.
        label: Its class, or those of its pixels, if there are labels.
        name: What its loader calls it; its number among the images, if it has no names.
        differs: Whether the class is another one, 0 or 1; else as the distance.
        distance: KL divergence of the predictions; 1 - cosine of embeddings; share of the pixels with another class.
    """

    image: Tensor
    label: Tensor | None
    name: str
    differs: float
    distance: float


@dataclass(frozen=True)
class PairedEvaluation:
    """Both models on the same images.

    Attributes:
        images: How many there were.
        broken: How many could not be read.
        measures: What was measured, with intervals.
        classes: Those that are somewhere, the one that loses most first.
        apart: The images on which the models disagree most, as many as were asked for, the worst first.
    """

    images: int
    broken: int
    measures: tuple[PairedMeasure, ...]
    classes: tuple[ClassChange, ...] = ()
    apart: tuple[Disagreement, ...] = ()


def evaluate_pair(
    model: nn.Module,
    original: nn.Module,
    data: ImageData,
    *,
    limit: int | None = None,
    most_apart: int = 0,
    progress: bool = True,
) -> PairedEvaluation:
    """Measure a compressed model and its original on the same images, with 95 % intervals.

    `data` is as `evaluate` takes it, or `evaluate_segmentation` for models that label pixels; at most `limit` images
    are taken, as they come. So many images on which they disagree most are kept.
    """
    loader = evaluation_loader(model, data)
    shown = loader if limit is None else _first(loader, limit)
    of_pixels = labels_pixels(model)
    parts: list[tuple[Measured, Measured]] = []
    apart: list[Disagreement] = []
    count = 0
    for batch in track(shown, "evaluate", count_items(loader), show=progress):
        if of_pixels:
            own = before = count_pixels(model, [batch], original, False)
        else:
            own, before = measure_each_image([model, original], [batch], original, False)
        parts.append((own, before))
        apart += _disagreements(batch, own, getattr(loader, "names", ()), count + 1, most_apart)
        apart = sorted(apart, key=_order, reverse=True)[:most_apart]
        count += len(own["images"])
    if not parts:
        raise PmvitError(f"expected at least one image to evaluate on; got none{unreadable(loader)}")
    own, before = (pooled(each) for each in zip(*parts, strict=True))
    measures = _of_pixels(own) if of_pixels else _of_images(own, before)
    classes = sorted(_by_class(own, before), key=lambda one: one.compressed - (one.original or 0.0))
    broken = len(getattr(loader, "broken", ()))
    return PairedEvaluation(count, broken, tuple(measures), tuple(classes), tuple(apart))


def evaluate_pairs(
    models: Sequence[nn.Module], original: nn.Module, data: Iterable[Any], *, progress: bool = True
) -> list[PairedEvaluation]:
    """`evaluate_pair` for several models of one original, on the same images; classifiers read them once."""
    if labels_pixels(original):
        found = [count_pixels(model, data, original, progress) for model in models]
        return [_evaluation(own, [*_of_pixels(own)]) for own in found]
    *found, before = measure_each_image([*models, original], data, original, progress)
    return [_evaluation(own, [*_of_images(own, before)]) for own in found]


def _evaluation(own: Measured, measures: Sequence[PairedMeasure]) -> PairedEvaluation:
    return PairedEvaluation(len(own["images"]), len(own["broken"]), tuple(measures))


def _of_pixels(own: Measured) -> Iterator[PairedMeasure]:
    if "classes" in own:
        yield _paired_iou(own["classes"], own["reference_classes"])
    yield _measured("pixel_agreement", own["same"] / own["pixels"])


def _of_images(own: Measured, before: Measured) -> Iterator[PairedMeasure]:
    for name in MEASURES:
        if name in own:
            yield _measured(name, own[name], None if name in COMPARING else before[name])


def _disagreements(batch: Any, own: Measured, names: Sequence[str], first: int, most: int) -> list[Disagreement]:
    """The images of a batch on which the models disagree most; `first` is the number of its first image."""
    images, labels = unpack(batch)
    alike = own["cosine"] if "cosine" in own else own["same"] / own["pixels"] if "same" in own else None
    distances = own["kl"] if alike is None else 1 - alike
    differs = 1 - own["agreement"] if "agreement" in own else distances
    found = [
        Disagreement(
            images[place],
            None if labels is None else labels[place],
            names[place] if place < len(names) else f"image {first + place}",
            differs[place].item(),
            distances[place].item(),
        )
        for place in range(len(images))
    ]
    worst = sorted(found, key=_order, reverse=True)[:most]
    return [replace(one, image=one.image.clone()) for one in worst]  # the batch need not stay


def _order(one: Disagreement) -> tuple[float, float]:
    """By which images are worst: another class counts more than any distance."""
    return one.differs, one.distance


def _by_class(own: Measured, before: Measured) -> list[ClassChange]:
    """What each class that is somewhere gains or loses; nothing, for models without classes."""
    if "classes" in own:
        ious = [class_iou(own[name].sum(0)).tolist() for name in ("classes", "reference_classes")]
        images = (own["classes"][:, 1] > 0).sum(0).tolist()
        pairs = enumerate(zip(*ious, strict=True))
        return [ClassChange(i, images[i], *pair) for i, pair in pairs if not any(map(math.isnan, pair))]
    if "prediction" not in own:
        return []
    groups = own.get("label", before["prediction"]).long()
    counts = groups.bincount()
    shown = [own["top1"], before["top1"]] if "label" in own else [own["agreement"]]
    means = [(groups.bincount(values) / counts).tolist() for values in shown]
    return [ClassChange(i, int(counts[i]), *(mean[i] for mean in means)) for i in counts.nonzero().flatten().tolist()]


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
