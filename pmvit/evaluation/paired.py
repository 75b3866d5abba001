"""A model and its original on the same images: what each reaches, and the difference, with intervals."""

from collections.abc import Iterable, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pmvit.data.batches import check_labels, unpack
from pmvit.errors import PmvitError
from pmvit.evaluation.classification import measure, measure_embeddings
from pmvit.evaluation.intervals import Estimate, resampled, wilson
from pmvit.evaluation.segmentation import PixelCounts, classes_at
from pmvit.evaluation.sliding import sliding_logits
from pmvit.hosts import host_of
from pmvit.hosts.modes import evaluation_mode
from pmvit.hosts.outputs import gives_logits, predict
from pmvit.progress import track

SHARES = ("top1", "top5", "agreement")  # of images, each right or wrong
SINGLE = ("agreement", "pixel_agreement", "kl", "cosine")  # one number for both models


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
    numbers: dict[str, list[Tensor]] = {}
    seen = 0
    run = _pixels if host_of(model).outputs().pixel_classes is not None else _images
    total = len(data) if isinstance(data, Sized) else None
    with evaluation_mode(model), evaluation_mode(original), torch.inference_mode():
        for batch in track(data, "evaluate", total, show=progress):
            images, labels = unpack(batch)
            rest = len(images) if limit is None else limit - seen
            images, labels = images[:rest], None if labels is None else labels[:rest]
            for name, values in run(model, original, images, labels).items():
                numbers.setdefault(name, []).append(values)
            seen += len(images)
            if limit is not None and seen >= limit:
                break
    if not seen:
        raise PmvitError("expected at least one image to evaluate on; got none")
    measured = {name: torch.cat(values) for name, values in numbers.items()}
    return PairedEvaluation(seen, len(getattr(data, "broken", ())), tuple(map(_measure, measured, measured.values())))


def _images(model: nn.Module, original: nn.Module, images: Tensor, labels: Tensor | None) -> dict[str, Tensor]:
    """Numbers of each image: (images, 2) for the original and the model, (images,) for what compares them."""
    device = next(model.parameters()).device
    found, expected = (predict(each, images.to(device)).cpu() for each in (model, original))
    if not gives_logits(model):
        return measure_embeddings(found, expected)
    if labels is not None:
        check_labels(labels, found.shape[-1])
    own, before = measure(found, labels, expected), measure(expected, labels, None)
    own.pop("reference_top1", None)
    return {name: values if name in SINGLE else torch.stack([before[name], values], 1) for name, values in own.items()}


def _pixels(model: nn.Module, original: nn.Module, images: Tensor, labels: Tensor | None) -> dict[str, Tensor]:
    """Of each class: pixels that are rightly predicted, labelled and predicted, (images, 2, 3, classes)."""
    host = host_of(model)
    device = next(model.parameters()).device
    window = host.input_size()[1:]
    labels = labels if labels is not None and labels.dim() == 3 else None
    size = tuple((images if labels is None else labels).shape[-2:])
    counts = PixelCounts(host.outputs().pixel_classes or 0, device)
    classes = [classes_at(sliding_logits(each, images.to(device), window), size) for each in (original, model)]
    agreement = (classes[0] == classes[1]).double().flatten(1).mean(1).cpu()
    if labels is None:
        return {"pixel_agreement": agreement}
    truth = labels.to(device)
    each = [[_totals(counts.add(p[None], t[None])) for p, t in zip(some, truth, strict=True)] for some in classes]
    return {"miou": torch.stack([torch.stack(totals) for totals in each], 1), "pixel_agreement": agreement}


def _totals(matrix: Tensor) -> Tensor:
    return torch.stack([matrix.diagonal(), matrix.sum(1), matrix.sum(0)])


def _miou(totals: Tensor) -> Tensor:
    """Mean over the classes that are somewhere, of (many, 3, classes)."""
    right, labelled, predicted = totals.unbind(1)
    union = labelled + predicted - right
    return torch.where(union > 0, right / union, 0.0).sum(1) / (union > 0).sum(1)


def _measure(name: str, values: Tensor) -> PairedMeasure:
    count = len(values)
    if name == "miou":
        return PairedMeasure(
            name,
            resampled(values[:, 1], _miou),
            resampled(values[:, 0], _miou),
            resampled(values, lambda pairs: _miou(pairs[:, 1]) - _miou(pairs[:, 0])),
        )
    if name in SINGLE:
        agrees = name == "agreement" and bool(((values == 0) | (values == 1)).all())
        return PairedMeasure(name, wilson(float(values.mean()), count) if agrees else resampled(values, _mean))
    difference = resampled(values[:, 1] - values[:, 0], _mean)
    sides = values.unbind(1)
    before, after = (wilson(float(v.mean()), count) if name in SHARES else resampled(v, _mean) for v in sides)
    return PairedMeasure(name, after, before, difference)


def _mean(means: Tensor) -> Tensor:
    return means
