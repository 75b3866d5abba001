"""Mean IoU, pixel accuracy and IoU of each class; agreement with a reference model, pixel by pixel; cost."""

import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pmvit.data.batches import IGNORED, check_labels, count_items, unpack
from pmvit.data.opening import ImageData, evaluation_loader
from pmvit.errors import PmvitError
from pmvit.evaluation.classification import Measured, check_finite
from pmvit.evaluation.reference import Reference, named
from pmvit.evaluation.sliding import at_size, check_stride, count_windows, sliding_logits, window_of
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


def evaluate_segmentation(
    model: nn.Module,
    data: ImageData,
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
        data: Images with masks, as `as_loader` knows them: a path, a `Dataset`, or what yields batches of `(images,
            labels)`, with labels of shape (batch, height, width) of any size and 255 for pixels that do not count. Or
            images alone, which are compared with the reference.
        reference: The original; `reference_for(model)` finds it.
        window: Height and width of a window; the size of the model's images if not given.
        stride: Pixels from one window to the next; the window itself if not given.
        batch_size: Windows that run at a time.
        progress: Show a progress bar.
    """
    loader = evaluation_loader(model, data)
    return summarize(count_pixels(model, loader, reference, progress, window, stride, batch_size), model, reference)


def count_pixels(
    model: nn.Module,
    data: Iterable[Any],
    reference: nn.Module | Reference | None,
    progress: bool,
    window: tuple[int, int] | None = None,
    stride: int | tuple[int, int] | None = None,
    batch_size: int = 8,
) -> Measured:
    """What `evaluate_segmentation` goes by, of each image, by name; `images` and `broken` are ones to count.

    `classes` is what `count_classes` counts, where there are labels; `same` are those of the `pixels` to which the
    reference gives the same class; `seconds` are of `timed` images: all but the first batch, which warms up.
    """
    host = host_of(model)
    classes = host.outputs().pixel_classes
    if classes is None:
        raise PmvitError(f"expected a model that labels pixels; a {type(model).__name__} does not: use evaluate")
    device = next(model.parameters()).device
    size = window or window_of(host)
    strides = check_stride(size, stride)
    compared_with, _ = named(reference)
    models = {"": model} if compared_with is None else {"": model, "reference_": compared_with}
    counts: dict[str, list[Any]] = defaultdict(list)
    *_, last = models.values()
    with evaluation_mode(model), evaluation_mode(last), torch.inference_mode():
        for batch in track(data, "evaluate", count_items(data), show=progress):
            images, labels = unpack(batch)
            labels = labels.to(device) if labels is not None and labels.dim() == 3 else None
            if labels is None and compared_with is None:
                raise PmvitError("expected images with masks, or the uncompressed original as reference=; got neither")
            wanted = tuple(images.shape[-2:] if labels is None else labels.shape[-2:])
            ones, is_warm = torch.ones(len(images), dtype=torch.float64), bool(counts)
            counts["images"].append(ones)
            counts["timed"].append(ones * is_warm)
            counts["windows"].append(ones * count_windows((images.shape[-2], images.shape[-1]), size, strides))
            predictions = []
            for prefix, each in models.items():
                begun = time.perf_counter()
                scores = sliding_logits(each, images.to(device), size, strides, batch_size=batch_size)
                check_finite(scores, "the reference" if prefix else "the model")
                if device.type != "cpu":
                    torch.accelerator.synchronize(device)
                counts[f"{prefix}seconds"].append(ones * is_warm * (time.perf_counter() - begun) / len(images))
                predictions.append(classes_at(scores, wanted))
                if labels is not None:
                    counts[f"{prefix}classes"].append(count_classes(predictions[-1], labels, classes))
            if compared_with is not None:
                counts["pixels"].append(ones * predictions[0][0].numel())
                counts["same"].append((predictions[0] == predictions[1]).sum((1, 2)).cpu().double())
    if not counts:
        raise PmvitError("expected at least one image to evaluate on; got none")
    counts["broken"].append(torch.ones(len(getattr(data, "broken", ()))))
    return {name: torch.cat(values) for name, values in counts.items()}


def summarize(found: Measured, model: nn.Module, reference: nn.Module | Reference | None) -> SegmentationEvaluation:
    """What `count_pixels` found of all images together."""
    compared_with, name = named(reference)
    total = {name: values.sum(0) for name, values in found.items()}
    result: dict[str, Any] = {}
    for prefix, each in (("", model), ("reference_", compared_with)):
        if each is not None:
            result[f"{prefix}gflops"] = flops(each).gflops
            result[f"{prefix}fps"] = (total["timed"] / total[f"{prefix}seconds"]).item() if total["timed"] else None
            counts = total.get(f"{prefix}classes")
            result[f"{prefix}miou"] = None if counts is None else _number(mean_iou(counts))
            result[f"{prefix}pixel_accuracy"] = None if counts is None else _number(pixel_accuracy(counts))
    return SegmentationEvaluation(
        images=len(found["images"]),
        broken=len(found["broken"]),
        class_iou=tuple(map(_number, class_iou(total["classes"]))) if "classes" in total else None,
        agreement=(total["same"] / total["pixels"]).item() if "pixels" in total else None,
        windows=found["windows"].mean().item(),
        reference=name,
        **result,
    )


def _number(value: Tensor) -> float | None:
    return None if value.isnan() else value.item()


def classes_at(scores: Tensor, size: tuple[int, ...]) -> Tensor:
    """The class of each pixel, (batch, height, width), of scores that are upsampled or reduced to a size."""
    return at_size(scores, size).argmax(-1)
