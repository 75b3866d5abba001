"""One image and what is known of it, wherever it comes from; masks; how a file becomes pixels."""

import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from pmvit.data.batches import IGNORED, described
from pmvit.errors import PmvitError

BROKEN_IMAGE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
MASK_MODES = ("1", "L", "P", "I", "I;16")  # of Pillow: one number per pixel
UNKNOWN = -1


@dataclass(frozen=True)
class Mask:
    """A file with a number for each pixel of an image, not read yet.

    `classes` are the numbers of the classes, in their order; others up to the largest of them, and 255, are ignored.
    """

    path: Path
    classes: Sequence[int]

    def read(self, size: tuple[int, int]) -> Tensor:
        """The class of each pixel of an image of this size, (height, width); a `PmvitError` names a wrong file."""
        try:
            with Image.open(self.path) as image:
                mode, pixels = image.mode, np.array(image).astype(np.int64)
        except (OSError, SyntaxError, ValueError) as error:
            raise PmvitError(f"{self.path}: expected a mask, got a file that cannot be read ({error})") from None
        if mode not in MASK_MODES:
            raise PmvitError(f"{self.path}: expected a mask with one number per pixel, got an image of mode {mode}")
        if pixels.shape != size:
            raise PmvitError(
                f"{self.path}: expected a mask of {size[0]} x {size[1]} pixels, the size of its image; got "
                f"{pixels.shape[0]} x {pixels.shape[1]}"
            )
        last = max(self.classes)
        table = np.full(max(last, IGNORED) + 1, UNKNOWN)
        table[: last + 1] = IGNORED
        table[np.asarray(self.classes)] = np.arange(len(self.classes))
        table[IGNORED] = IGNORED
        labels = np.where((pixels < 0) | (pixels > IGNORED), UNKNOWN, table[pixels.clip(0, IGNORED)])
        if (unknown := pixels[labels == UNKNOWN]).size:
            raise PmvitError(
                f"{self.path}: expected labels 0 to {last}, or {IGNORED} ignored; got {unknown[0]}: are these the "
                "masks of this model's classes?"
            )
        return torch.from_numpy(labels)


class Sample(NamedTuple):
    """An image that is not decoded yet, its class or mask if it has one, and a name to find it again.

    Of a `Dataset` it is decoded (Pillow's), or even prepared (a tensor).
    """

    image: Path | bytes | Image.Image | Tensor
    label: int | Mask | Tensor | None
    name: str

    def open(self, mode: str) -> Image.Image:
        """Decode the image; raises what Pillow raises if it is broken. As in timm, EXIF does not turn it."""
        if isinstance(self.image, Tensor):
            raise PmvitError(f"{self.name}: expected an image to decode; got {described(self.image)}")
        if isinstance(self.image, Image.Image):
            return in_mode(self.image, mode)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's about odd metadata, once per image
            with Image.open(io.BytesIO(self.image) if isinstance(self.image, bytes) else self.image) as image:
                return in_mode(image, mode)


def in_mode(image: Image.Image, mode: str) -> Image.Image:
    """The first frame of an image in one of Pillow's modes of eight bits a channel.

    Of sixteen bits the upper eight are kept, as Pillow itself has it for coloured images, while it would make grey ones
    white. Raises `ValueError` if the file does not say which numbers are black and white.
    """
    is_wide = image.mode == "I" or image.mode.startswith("I;16")
    values = np.asarray(image) if is_wide else None
    if image.mode == "F" or (values is not None and not 0 <= values.min() <= values.max() < 1 << 16):
        raise ValueError(f"pixels of mode {image.mode}, of which the file does not say what is black and what white")
    plain = image if values is None else Image.fromarray((values >> 8).astype(np.uint8))
    converted: Image.Image = plain.convert(mode)
    return converted
