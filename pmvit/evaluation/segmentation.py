"""Mean IoU, pixel accuracy and IoU of each class; agreement with a reference model, pixel by pixel; cost."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.classification import MulticlassConfusionMatrix

from pmvit.data.batches import IGNORED, check_labels, count_batches, unpack
from pmvit.errors import PmvitError
from pmvit.evaluation.sliding import check_stride, count_windows, sliding_logits
from pmvit.hosts import host_of
from pmvit.hosts.modes import evaluation_mode
from pmvit.measuring.flops import flops
from pmvit.progress import track


@dataclass(frozen=True)
class SegmentationEvaluation:
    """Shares as numbers from 0 to 1. What could not be measured is `None`.

    Attributes:
        images: How many images were measured.
        broken: How many could not be read and were left out.
        miou: Mean over the classes of intersection over union; classes that are nowhere, neither labelled nor
            predicted, do not count.
        pixel_accuracy: Share of the labelled pixels whose class is right.
        class_iou: Intersection over union of each class, `None` for one that is nowhere.
        agreement: Share of all pixels to which model and reference give the same class.
        reference_miou: Mean IoU of the reference on the same images.
        reference_pixel_accuracy: Pixel accuracy of the reference.
        gflops: Of the model for one window, at its real size (MACs).
        reference_gflops: The same of the reference.
        windows: Windows an image takes, on average.
        fps: Images a second, each in its windows, without reading and preparing them; model and reference take turns.
        reference_fps: The same of the reference.
    """

    images: int
    broken: int
    miou: float | None
    pixel_accuracy: float | None
    class_iou: tuple[float | None, ...] | None
    agreement: float | None
    reference_miou: float | None
    reference_pixel_accuracy: float | None
    gflops: float
    reference_gflops: float | None
    windows: float
    fps: float | None = field(default=None, compare=False)
    reference_fps: float | None = field(default=None, compare=False)

    @property
    def quality(self) -> float | None:
        """What makes one evaluation better than another: mean IoU, or without masks agreement."""
        return self.miou if self.miou is not None else self.agreement

    @property
    def headline(self) -> str:
        """That in words."""
        return f"mIoU {self.miou:.2%}" if self.miou is not None else f"agreement {self.agreement or 0:.2%}"


class PixelCounts:
    """How often each class was predicted for pixels of each class, over all images so far."""

    def __init__(self, classes: int, device: torch.device) -> None:
        self.classes = classes
        self.matrix = torch.zeros(classes, classes, dtype=torch.float64)
        self._metric = MulticlassConfusionMatrix(classes, ignore_index=IGNORED, validate_args=False).to(device)

    def add(self, predicted: Tensor, labels: Tensor) -> Tensor:
        """Count predicted classes, (batch, height, width), of labelled pixels; return the counts of these alone."""
        check_labels(labels, self.classes)
        counted: Tensor = self._metric(predicted, labels).cpu().double()
        self.matrix += counted
        self._metric.reset()
        return counted

    def class_iou(self) -> tuple[float | None, ...]:
        """Intersection over union of each class."""
        right, labelled, predicted = self._totals()
        union = labelled + predicted - right
        return tuple(float(i / u) if u else None for i, u in zip(right, union, strict=True))

    def miou(self) -> float | None:
        """The mean over those classes that are somewhere."""
        found = [value for value in self.class_iou() if value is not None]
        return sum(found) / len(found) if found else None

    def pixel_accuracy(self) -> float | None:
        """Share of the labelled pixels whose class is right."""
        right, labelled, _ = self._totals()
        return float(right.sum() / labelled.sum()) if labelled.sum() else None

    def _totals(self) -> tuple[Tensor, Tensor, Tensor]:
        """For each class: pixels that are rightly predicted, labelled and predicted."""
        return self.matrix.diagonal(), self.matrix.sum(1), self.matrix.sum(0)


@dataclass
class SegmentationCounts:
    """What was counted on some images; counts of other images can be added.

    Attributes:
        models: Right and wrong pixels of the model, and of the reference if there is one.
        gflops: Of these.
        images: Images seen.
        broken: Images that could not be read.
        windows: Windows run, by each model.
        labelled: Whether there were masks.
        pixels: Pixels on which the models were compared.
        same: Those to which they give the same class.
        seconds: What each model took for the images that were timed.
        timed: How many these are: all but those of the first batch, which warms up.
    """

    models: list[PixelCounts]
    gflops: list[float]
    seconds: list[float]
    images: int = 0
    broken: int = 0
    windows: int = 0
    labelled: bool = False
    pixels: int = 0
    same: int = 0
    timed: int = 0

    def evaluation(self) -> SegmentationEvaluation:
        if not self.images:
            raise PmvitError("expected at least one image to evaluate on; got none")
        model, *others = self.models
        reference = others[0] if others and self.labelled else None
        return SegmentationEvaluation(
            images=self.images,
            broken=self.broken,
            miou=model.miou() if self.labelled else None,
            pixel_accuracy=model.pixel_accuracy() if self.labelled else None,
            class_iou=model.class_iou() if self.labelled else None,
            agreement=self.same / self.pixels if self.pixels else None,
            reference_miou=None if reference is None else reference.miou(),
            reference_pixel_accuracy=None if reference is None else reference.pixel_accuracy(),
            gflops=self.gflops[0],
            reference_gflops=self.gflops[1] if others else None,
            windows=self.windows / self.images,
            fps=self._fps(0),
            reference_fps=self._fps(1) if others else None,
        )

    def _fps(self, model: int) -> float | None:
        return self.timed / self.seconds[model] if self.timed else None


def pooled(parts: Sequence[SegmentationCounts]) -> SegmentationEvaluation:
    """What one evaluation of all images gives, from counts of parts of them."""
    total, *others = parts
    for part in others:
        for count, more in zip(total.models, part.models, strict=True):
            count.matrix += more.matrix
        total.seconds = [own + more for own, more in zip(total.seconds, part.seconds, strict=True)]
        for name in ("images", "broken", "windows", "pixels", "same", "timed"):
            setattr(total, name, getattr(total, name) + getattr(part, name))
        total.labelled |= part.labelled
    return total.evaluation()


def evaluate_segmentation(
    model: nn.Module,
    data: Iterable[Any],
    *,
    reference: nn.Module | None = None,
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
        reference: The uncompressed original.
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
    reference: nn.Module | None = None,
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
    models = [model] if reference is None else [model, reference]
    costs = [flops(candidate).gflops for candidate in models]
    counts = SegmentationCounts([PixelCounts(classes, device) for _ in models], costs, [0.0 for _ in models])
    total = count_batches(data)
    with evaluation_mode(model), evaluation_mode(reference or model), torch.inference_mode():
        for batch in track(data, "evaluate", total, show=progress):
            images, labels = unpack(batch)
            labels = labels.to(device) if labels is not None and labels.dim() == 3 else None
            at_size = tuple(images.shape[-2:] if labels is None else labels.shape[-2:])
            counts.images += len(images)
            counts.windows += len(images) * count_windows((images.shape[-2], images.shape[-1]), size, strides)
            predictions = []
            is_warm = counts.images > len(images)
            for place, candidate in enumerate(models):
                begun = time.perf_counter()
                scores = sliding_logits(candidate, images.to(device), size, strides, batch_size=batch_size)
                if device.type != "cpu":
                    torch.accelerator.synchronize()
                counts.seconds[place] += time.perf_counter() - begun if is_warm else 0.0
                predictions.append(classes_at(scores, at_size))
            counts.timed += len(images) if is_warm else 0
            if labels is not None:
                counts.labelled = True
                for count, predicted in zip(counts.models, predictions, strict=True):
                    count.add(predicted, labels)
            if reference is not None:
                counts.pixels += predictions[0].numel()
                counts.same += int((predictions[0] == predictions[1]).sum())
            elif labels is None:
                raise PmvitError("expected images with masks, or the uncompressed original as reference=; got neither")
    counts.broken = len(getattr(data, "broken", ()))
    return counts


def classes_at(scores: Tensor, size: tuple[int, ...]) -> Tensor:
    """The class of each pixel, (batch, height, width), of scores that are upsampled or reduced to a size."""
    if tuple(scores.shape[1:3]) == size:
        return scores.argmax(-1)
    return F.interpolate(scores.movedim(-1, 1), size=size, mode="bilinear").argmax(1)
