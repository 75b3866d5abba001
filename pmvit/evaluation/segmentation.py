"""Mean IoU, pixel accuracy and IoU of each class; agreement with a reference model, pixel by pixel; cost."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pmvit.data.batches import IGNORED, check_labels, count_batches, unpack
from pmvit.errors import PmvitError
from pmvit.evaluation.reference import Reference, named
from pmvit.evaluation.sliding import check_stride, count_windows, sliding_logits
from pmvit.hosts import find_host, host_of
from pmvit.hosts.modes import evaluation_mode
from pmvit.measuring.flops import flops
from pmvit.numbers.measures import WithQuality
from pmvit.progress import track


@dataclass(frozen=True)
class SegmentationEvaluation(WithQuality):
    """Shares as numbers from 0 to 1. What could not be measured is `None`.

    Attributes:
        images: How many images were measured.
        broken: How many could not be read and were left out.
        miou: Mean over the classes of intersection over union; classes that are nowhere, neither labelled nor
            predicted, do not count.
        pixel_accuracy: Share of the labelled pixels whose class is right.
        class_iou: Intersection over union of each class, `None` for one that is nowhere.
        agreement: Share of all pixels to which model and reference give the same class.
        gflops: Of the model for one window, at its real size (MACs).
        windows: Windows an image takes, on average.
        reference_miou: Mean IoU of the reference on the same images.
        reference_pixel_accuracy: Pixel accuracy of the reference.
        reference_gflops: GFLOPs of the reference.
        reference: What the reference is, where it was told: `original`, `uncompressed` or `other`.
        fps: Images a second, each in its windows, without reading and preparing them; model and reference take turns.
        reference_fps: The same of the reference.
    """

    images: int
    broken: int
    miou: float | None
    pixel_accuracy: float | None
    class_iou: tuple[float | None, ...] | None
    agreement: float | None
    gflops: float
    windows: float
    reference_miou: float | None = None
    reference_pixel_accuracy: float | None = None
    reference_gflops: float | None = None
    reference: str | None = None
    fps: float | None = field(default=None, compare=False)
    reference_fps: float | None = field(default=None, compare=False)


def labels_pixels(model: nn.Module) -> bool:
    """Whether a model labels the pixels of an image, and not the image."""
    host = find_host(model)
    return host is not None and host.outputs().pixel_classes is not None


def count_classes(predicted: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Of each image and class the pixels that are rightly predicted, labelled and predicted: (images, 3, classes)."""
    check_labels(labels, classes)
    counted = []
    for found, truth in zip(predicted, labels, strict=True):
        found, truth = found[truth != IGNORED], truth[truth != IGNORED]
        kinds = (truth[truth == found], truth, found)
        counted.append(torch.stack([torch.bincount(pixels, minlength=classes) for pixels in kinds]))
    return torch.stack(counted).cpu().double()


def class_iou(counts: Tensor) -> Tensor:
    """Intersection over union of each class, from counts of shape (..., 3, classes); NaN for one that is nowhere."""
    right, labelled, predicted = counts.unbind(-2)
    return right / (labelled + predicted - right)


def mean_iou(counts: Tensor) -> Tensor:
    """Its mean over those classes that are somewhere."""
    return class_iou(counts).nanmean(-1)


def pixel_accuracy(counts: Tensor) -> Tensor:
    """Share of the labelled pixels whose class is right; NaN if there is none."""
    right, labelled, _ = counts.unbind(-2)
    return right.sum(-1) / labelled.sum(-1)


def _number(value: Tensor) -> float | None:
    return None if value.isnan() else value.item()


@dataclass
class ModelCounts:
    """What one model costs, took for the images that were timed, and what `count_classes` found of it."""

    gflops: float
    seconds: float = 0.0
    classes: list[Tensor] = field(default_factory=list)


@dataclass
class SegmentationCounts:
    """What was counted on some images; counts of other images can be added.

    Attributes:
        models: Of the model, and of the reference if there is one.
        reference: What the reference is, if that is known.
        images: How many images.
        broken: Images that could not be read.
        windows: Windows run, by each model.
        pixels: Of each image that both models labelled.
        same: Those of them to which both give the same class.
        timed: How many images were timed: all but those of the first batch, which warms up.
    """

    models: list[ModelCounts]
    reference: str | None = None
    images: int = 0
    broken: int = 0
    windows: int = 0
    pixels: list[int] = field(default_factory=list)
    same: list[int] = field(default_factory=list)
    timed: int = 0

    def evaluation(self) -> SegmentationEvaluation:
        if not self.images:
            raise PmvitError("expected at least one image to evaluate on; got none")
        (own, *reference) = (self._measured(model) for model in self.models)
        counts = self.models[0].classes
        return SegmentationEvaluation(
            images=self.images,
            broken=self.broken,
            class_iou=tuple(map(_number, class_iou(torch.cat(counts).sum(0)))) if counts else None,
            agreement=sum(self.same) / sum(self.pixels) if self.pixels else None,
            windows=self.windows / self.images,
            reference=self.reference,
            **own,
            **{f"reference_{name}": value for measured in reference for name, value in measured.items()},
        )

    def _measured(self, model: ModelCounts) -> dict[str, Any]:
        counts = torch.cat(model.classes).sum(0) if model.classes else None
        return {
            "miou": None if counts is None else _number(mean_iou(counts)),
            "pixel_accuracy": None if counts is None else _number(pixel_accuracy(counts)),
            "gflops": model.gflops,
            "fps": self.timed / model.seconds if self.timed else None,
        }


def pooled(parts: Sequence[SegmentationCounts]) -> SegmentationEvaluation:
    """What one evaluation of all images gives, from counts of parts of them."""
    total, *others = parts
    for part in others:
        for own, more in zip(total.models, part.models, strict=True):
            own.seconds += more.seconds
            own.classes += more.classes
        for name in ("images", "broken", "windows", "pixels", "same", "timed"):
            setattr(total, name, getattr(total, name) + getattr(part, name))
    return total.evaluation()


def evaluate_segmentation(
    model: nn.Module,
    data: Iterable[Any],
    *,
    reference: nn.Module | Reference | None = None,
    window: tuple[int, int] | None = None,
    stride: int | tuple[int, int] | None = None,
    batch_size: int = 8,
    progress: bool = True,
) -> SegmentationEvaluation:
    """Measure a model that labels pixels, in windows of its own size, at the size of the labels.

    Args:
        model: The model to measure, compressed or not.
        data: A loader of `(images, labels)`, with labels of shape (batch, height, width) of any size and 255 for pixels
            that do not count; or of images, which are compared with the reference alone.
        reference: The original; `reference_for(model)` finds it.
        window: Height and width of a window; the size of the model's images if not given.
        stride: Pixels from one window to the next; the window itself if not given.
        batch_size: Windows that run at a time.
        progress: Show a progress bar.
    """
    return count_pixels(
        model, data, reference=reference, window=window, stride=stride, batch_size=batch_size, progress=progress
    ).evaluation()


def count_pixels(
    model: nn.Module,
    data: Iterable[Any],
    *,
    reference: nn.Module | Reference | None = None,
    window: tuple[int, int] | None = None,
    stride: int | tuple[int, int] | None = None,
    batch_size: int = 8,
    progress: bool = True,
) -> SegmentationCounts:
    """`evaluate_segmentation` of a part of the images: what `pooled` puts together."""
    host = host_of(model)
    classes = host.outputs().pixel_classes
    if classes is None:
        raise PmvitError(f"expected a model that labels pixels; a {type(model).__name__} does not: use evaluate")
    device = next(model.parameters()).device
    size = window or host.input_size()[1:]
    strides = check_stride(size, stride)
    compared_with, name = named(reference)
    models = [model] if compared_with is None else [model, compared_with]
    counts = SegmentationCounts([ModelCounts(flops(each).gflops) for each in models], name)
    with evaluation_mode(model), evaluation_mode(models[-1]), torch.inference_mode():
        for batch in track(data, "evaluate", count_batches(data), show=progress):
            images, labels = unpack(batch)
            labels = labels.to(device) if labels is not None and labels.dim() == 3 else None
            if labels is None and len(models) == 1:
                raise PmvitError("expected images with masks, or the uncompressed original as reference=; got neither")
            at_size = tuple(images.shape[-2:] if labels is None else labels.shape[-2:])
            is_warm = counts.images > 0
            counts.images += len(images)
            counts.windows += len(images) * count_windows((images.shape[-2], images.shape[-1]), size, strides)
            predictions = []
            for each, of_model in zip(models, counts.models, strict=True):
                begun = time.perf_counter()
                scores = sliding_logits(each, images.to(device), size, strides, batch_size=batch_size)
                if device.type != "cpu":
                    torch.accelerator.synchronize()
                of_model.seconds += time.perf_counter() - begun if is_warm else 0.0
                predictions.append(classes_at(scores, at_size))
                if labels is not None:
                    of_model.classes.append(count_classes(predictions[-1], labels, classes))
            counts.timed += len(images) if is_warm else 0
            if len(models) == 2:
                counts.pixels += [image.numel() for image in predictions[0]]
                counts.same += (predictions[0] == predictions[1]).sum((1, 2)).tolist()
    counts.broken = len(getattr(data, "broken", ()))
    return counts


def classes_at(scores: Tensor, size: tuple[int, ...]) -> Tensor:
    """The class of each pixel, (batch, height, width), of scores that are upsampled or reduced to a size."""
    if tuple(scores.shape[1:3]) == size:
        return scores.argmax(-1)
    return F.interpolate(scores.movedim(-1, 1), size=size, mode="bilinear").argmax(1)
