"""What loaders yield: images, or pairs of images and labels."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from operator import length_hint
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pmvit.errors import PmvitError

IGNORED = 255  # the label of pixels that count for nothing
IMAGE_COLUMNS = ("pixel_values", "pixel_values_videos", "input_values", "image", "images", "img")
LABEL_COLUMNS = ("label", "labels", "fine_label", "class", "target")
COLUMNS = (IMAGE_COLUMNS, LABEL_COLUMNS)
DIMENSIONS = (3, 4, 5)  # of a batch of spectrograms, images, videos


class TrainingBatch(NamedTuple):
    """Images, their labels if they have some, and names that say which they are."""

    images: Tensor
    labels: Tensor | None
    names: list[str]


def split_item(item: Any) -> tuple[Any, Any]:
    """What stands for images and for labels in an item of a dataset or a batch of a loader; `None` where nothing does.

    An item is images alone, `(images, labels)`, or a dictionary with one of `IMAGE_COLUMNS` and perhaps one of
    `LABEL_COLUMNS`.
    """
    if isinstance(item, Mapping):
        images, labels = (next((item[name] for name in names if name in item), None) for names in COLUMNS)
        return images, labels
    if isinstance(item, (tuple, list)) and len(item) in (1, 2):
        return item[0], item[1] if len(item) == 2 else None
    return item, None


def unpack(batch: Any, *, bytes_too: bool = False) -> tuple[Tensor, Tensor | None]:
    """Split a batch of a loader into prepared images, of floats unless `bytes_too`, and labels if there are some.

    Raises:
        PmvitError: If it is no batch.
    """
    images, labels = split_item(batch)
    if not isinstance(images, Tensor) or images.dim() not in DIMENSIONS:
        raise PmvitError(
            "expected batches of images, of (images, labels) or of {'pixel_values': images, 'labels': labels}, with "
            f"images of shape (batch, channels, height, width), or videos or spectrograms; got {described(batch)}"
        )
    if not (images.is_floating_point() or (bytes_too and images.dtype == torch.uint8)):
        raise PmvitError(f"expected images that are normalised, as the model takes them; got a batch of {images.dtype}")
    if labels is None:
        return images, None
    if isinstance(labels, (list, tuple)) and all(isinstance(label, int) for label in labels):
        labels = torch.tensor(labels)
    if not isinstance(labels, Tensor) or labels.dim() == 0 or len(labels) != len(images):
        raise PmvitError(f"expected a label for each of {len(images)} images; got {described(labels)}")
    return images, labels


def described(value: Any) -> str:
    """What something is that came in place of something else, for an error."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with {', '.join(map(str, list(value)[:8])) or 'nothing'}"
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, (tuple, list)) else "")


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


def count_items(loader: Iterable[Any]) -> int | None:
    """How many batches a loader has, or images a dataset; `None` if that cannot be told, as of a stream."""
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
