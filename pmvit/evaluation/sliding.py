"""Images of any size through a model of one size: overlapping windows, many at a time, their logits averaged."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pmvit.errors import PmvitError
from pmvit.hosts import Host
from pmvit.hosts.outputs import predict


def window_starts(size: int, window: int, stride: int) -> list[int]:
    """Where windows begin along one side: every `stride` pixels, and so that the last one ends where the image does."""
    last = max(size - window, 0)
    return [*range(0, last, stride), last]


def count_windows(size: tuple[int, int], window: tuple[int, int], stride: tuple[int, int]) -> int:
    """How many windows an image takes."""
    rows, columns = (len(window_starts(*side)) for side in zip(size, window, stride, strict=True))
    return rows * columns


def window_of(host: Host) -> tuple[int, int]:
    """Height and width of the images that a model takes."""
    _, height, width = host.input_size()
    return height, width


def check_stride(window: tuple[int, int], stride: int | tuple[int, int] | None) -> tuple[int, int]:
    """The stride down and across, the window itself if none is given; `PmvitError` if it would leave pixels out."""
    if stride is None:
        return window
    down, across = (stride, stride) if isinstance(stride, int) else stride
    if not (0 < down <= window[0] and 0 < across <= window[1]):
        raise PmvitError(
            f"stride: expected 1 to {window[0]} down and 1 to {window[1]} across, the sides of a window; got "
            f"{down} and {across}"
        )
    return down, across


def sliding_logits(
    model: nn.Module,
    images: Tensor,
    window: tuple[int, int],
    stride: int | tuple[int, int] | None = None,
    *,
    batch_size: int = 8,
) -> Tensor:
    """Scores of every pixel, (batch, height, width, classes), each the mean over the windows that hold it.

    A side that is shorter than the window is padded with zeros, the mean of prepared images. An image that is one
    window gives to the last bit what the model gives for it. `batch_size` windows run at a time.
    """
    strides = check_stride(window, stride)
    height, width = images.shape[-2:]
    padded = F.pad(images, (0, max(window[1] - width, 0), 0, max(window[0] - height, 0)))
    rows, columns = padded.shape[-2:]
    areas = [
        (image, slice(top, top + window[0]), slice(left, left + window[1]))
        for image in range(len(padded))
        for top in window_starts(rows, window[0], strides[0])
        for left in window_starts(columns, window[1], strides[1])
    ]
    total: Tensor | None = None
    windows_at = torch.zeros(len(padded), rows, columns, 1, device=images.device)
    for start in range(0, len(areas), batch_size):
        some = areas[start : start + batch_size]
        crops = torch.stack([padded[image, :, down, across] for image, down, across in some])
        for area, scores in zip(some, at_size(predict(model, crops), window), strict=True):
            if total is None:
                total = scores.new_zeros(len(padded), rows, columns, scores.shape[-1])
            total[area] += scores
            windows_at[area] += 1
    if total is None:
        raise PmvitError("expected at least one image, got none")
    return (total / windows_at)[:, :height, :width]


def at_size(scores: Tensor, size: tuple[int, ...]) -> Tensor:
    """Scores with the classes last, upsampled or reduced to a size."""
    if scores.dim() != 4:
        raise PmvitError(
            f"expected a model that labels pixels, got predictions of shape {tuple(scores.shape)}: use evaluate for "
            "models that label images"
        )
    if tuple(scores.shape[1:3]) == size:
        return scores
    return F.interpolate(scores.movedim(-1, 1), size=size, mode="bilinear").movedim(1, -1)
