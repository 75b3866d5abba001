"""Masks: files with a number for each pixel, and what the numbers stand for."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from pmvit.data.batches import IGNORED
from pmvit.errors import PmvitError

UNKNOWN = -1
MASK_MODES = {"1", "L", "P", "I", "I;16"}  # one number per pixel


@dataclass(frozen=True)
class LabelMap:
    """What the numbers in a mask stand for.

    Attributes:
        classes: For each number from 0 to 255 a class, 255 for pixels that are ignored, -1 for what may not occur.
        expected: The numbers that may occur, in words.
    """

    classes: tuple[int, ...]
    expected: str

    @staticmethod
    def counted(num_classes: int, first: int = 0) -> "LabelMap":
        """Classes are counted from `first`; what is below, and 255, is ignored."""
        table = [UNKNOWN] * 256
        table[:first] = [IGNORED] * first
        table[first : first + num_classes] = range(num_classes)
        table = [*table[:IGNORED], IGNORED]
        below = f", below that or {IGNORED} ignored" if first else f", or {IGNORED} ignored"
        return LabelMap(tuple(table), f"{first} to {first + num_classes - 1}{below}")

    @staticmethod
    def chosen(ids: tuple[int, ...], last: int) -> "LabelMap":
        """Classes are these numbers, in this order; others up to `last`, and 255, are ignored."""
        table = [IGNORED] * (last + 1) + [UNKNOWN] * (IGNORED - last - 1) + [IGNORED]
        for number, value in enumerate(ids):
            table[value] = number
        return LabelMap(tuple(table), f"0 to {last}, or {IGNORED} ignored")

    def __call__(self, mask: npt.NDArray[np.int64], name: str) -> Tensor:
        """The class of each pixel as int64.

        Raises:
            PmvitError: That names the file, if it has a number that stands for nothing.
        """
        outside = mask[(mask < 0) | (mask > IGNORED)]
        labels = np.asarray(self.classes, dtype=np.int64)[mask] if not outside.size else mask
        unknown = outside if outside.size else mask[labels == UNKNOWN]
        if unknown.size:
            raise PmvitError(
                f"{name}: expected labels {self.expected}; got {int(unknown[0])}: are these the masks of this model's "
                "classes?"
            )
        return torch.from_numpy(labels)


@dataclass(frozen=True)
class Mask:
    """The mask of an image, not read yet.

    Attributes:
        path: Its file.
        labels: What the numbers in it stand for.
    """

    path: Path
    labels: LabelMap

    def read(self, size: tuple[int, int]) -> Tensor:
        """The classes of the pixels of an image of this size, (height, width).

        Raises:
            PmvitError: That names the file, if it cannot be read or is not a mask of an image of this size.
        """
        try:
            with Image.open(self.path) as image:
                mode, pixels = image.mode, np.array(image).astype(np.int64)
        except (OSError, SyntaxError, ValueError) as error:
            raise PmvitError(f"{self.path}: expected a mask, got a file that cannot be read ({error})") from None
        if mode not in MASK_MODES or pixels.ndim != 2:
            raise PmvitError(f"{self.path}: expected a mask with one number per pixel, got an image of mode {mode}")
        if pixels.shape != size:
            raise PmvitError(
                f"{self.path}: expected a mask of {size[0]} x {size[1]} pixels, the size of its image; got "
                f"{pixels.shape[0]} x {pixels.shape[1]}"
            )
        return self.labels(pixels, str(self.path))
