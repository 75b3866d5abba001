"""Classes of pixels over an image, and where two models differ."""

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from pmvit.data.batches import IGNORED
from pmvit.reporting.pictures.colours import NEUTRAL, SKY_BLUE, VERMILLION, Colour, palette

SAME, CHANGED, WORSE, BETTER = range(4)
DIFFERENCES: dict[int, tuple[Colour, str]] = {
    WORSE: (VERMILLION, "worse: only the original is right"),
    BETTER: (SKY_BLUE, "better: only the compressed one is right"),
    CHANGED: ((255, 255, 255), "changed: both are wrong, or the pixel is ignored"),
}
OPACITY = 0.6  # of the colours of classes over the image
DIMMED = 0.4  # the image behind the differences


def mask_overlay(image: Image.Image, labels: Tensor, classes: int) -> Image.Image:
    """The image in grey under the colours of its pixels' classes; ignored pixels have none."""
    table = np.array([*palette(classes), NEUTRAL], dtype=np.float64)
    index = torch.where(labels == IGNORED, classes, labels).numpy()
    return _from_array((1 - OPACITY) * _grey(image) + OPACITY * table[index])


def differences(original: Tensor, compressed: Tensor, labels: Tensor | None) -> Tensor:
    """For each pixel one of SAME, WORSE, BETTER and CHANGED; without labels there is neither worse nor better."""
    kinds = torch.where(original == compressed, SAME, CHANGED)
    if labels is not None:
        kinds[(original == labels) & (compressed != labels)] = WORSE
        kinds[(original != labels) & (compressed == labels)] = BETTER
    return kinds


def difference_overlay(image: Image.Image, kinds: Tensor) -> Image.Image:
    """The image in dark grey, and the differences in their colours."""
    pixels = DIMMED * _grey(image)
    for kind, (colour, _) in DIFFERENCES.items():
        pixels[(kinds == kind).numpy()] = colour
    return _from_array(pixels)


def _grey(image: Image.Image) -> npt.NDArray[np.float64]:
    grey = np.asarray(image.convert("L"), dtype=np.float64)
    return np.repeat(grey[..., None], 3, axis=-1)


def _from_array(pixels: npt.NDArray[np.float64]) -> Image.Image:
    return Image.fromarray(pixels.round().astype(np.uint8))
