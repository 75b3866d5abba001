"""What loaders yield: images, or pairs of images and labels."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from operator import length_hint
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pmvit.errors import PmvitError

IGNORED = 255  # the label of pixels that count for nothing


class TrainingBatch(NamedTuple):
    """Images, their labels if they have some, and names that say which they are."""

    images: Tensor
    labels: Tensor | None
    names: list[str]


def unpack(batch: Any) -> tuple[Tensor, Tensor | None]:
    """Split a batch of a loader into images and labels: a pair, or images alone."""
    if isinstance(batch, Tensor):
        return batch, None
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    raise PmvitError(f"expected batches of images or of (images, labels); got {type(batch).__name__}")


def first_images(loader: Iterable[Any], count: int) -> Tensor:
    """The first `count` images of a loader, or all of them if there are fewer; `PmvitError` if there are none."""
    found: list[Tensor] = []
    for batch in loader:
        found.append(unpack(batch)[0])
        if sum(map(len, found)) >= count:
            break
    if not found:
        raise PmvitError(f"expected at least one batch of images; the loader is empty{unreadable(loader)}")
    return torch.cat(found)[:count]


def count_batches(loader: Iterable[Any]) -> int | None:
    """How many batches a loader has; `None` if that cannot be told, as of a stream."""
    count = length_hint(loader, -1)
    return count if count >= 0 else None


@dataclass(frozen=True)
class EveryNth:
    """The batches that are for one of several processes, of a loader that knows nothing of processes."""

    loader: Iterable[Any]
    process: tuple[int, int]

    def __iter__(self) -> Iterator[Any]:
        return islice(self.loader, self.process[0], None, self.process[1])


def unreadable(loader: Any) -> str:
    """Words for an error about a loader without images: that there were some, if none of them could be read."""
    broken = getattr(loader, "broken", None)
    if not broken or not isinstance(broken, dict):
        return ""
    return f" ({len(broken)} could not be read, the first is {next(iter(broken))})"


def check_labels(labels: Tensor, num_classes: int) -> None:
    """Raise `PmvitError` if a label is not one of the model's classes, or 255 for a pixel that is ignored."""
    if labels.dim() > 1:
        labels = labels[labels != IGNORED]
    if not labels.numel():
        return
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= num_classes:
        raise PmvitError(
            f"expected labels below {num_classes}, the number of the model's classes; got "
            f"{low if low < 0 else high}: is this the data of this model?"
        )


def resize_labels(labels: Tensor, size: tuple[int, int]) -> Tensor:
    """Labels of pixels, (batch, height, width), at another size: each pixel takes the label nearest to it."""
    if tuple(labels.shape[-2:]) == tuple(size):
        return labels
    return F.interpolate(labels[:, None].float(), size=size, mode="nearest-exact")[:, 0].to(labels.dtype)
