"""What segmenters make of images: input, ground truth, original, compressed and difference side by side."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from pmvit.data.batches import IGNORED
from pmvit.data.loaders import Broken
from pmvit.errors import PmvitError
from pmvit.evaluation.segmentation import count_classes, mean_iou
from pmvit.numbers.colours import NEUTRAL, SKY_BLUE, VERMILLION, Colour, palette
from pmvit.reporting.images import fitted
from pmvit.reporting.pictures.figure import Layer, numbered_stem, write_png
from pmvit.reporting.pictures.tiles import Heading, Legends, Row, Tile, draw_tiles

SAME, CHANGED, WORSE, BETTER = range(4)
DIFFERENCES: dict[int, tuple[Colour, str]] = {
    WORSE: (VERMILLION, "worse: only the original is right"),
    BETTER: (SKY_BLUE, "better: only the compressed one is right"),
    CHANGED: ((255, 255, 255), "changed: both are wrong, or the pixel is ignored"),
}
OPACITY = 0.6  # of the colours of classes over the image
DIMMED = 0.4  # the image behind the differences
LEAST_WIDTH = 200  # of a picture beside others; smaller images are enlarged
TILE = 260  # longer side of a picture on a sheet of many images
LARGEST_SCALE = 4.0  # of letters and margins, as pictures get wider than a tile

Panel = tuple[Image.Image, tuple[str, ...]]  # a picture and the lines below it


def mask_overlay(image: Image.Image, labels: Tensor, classes: int) -> Image.Image:
    """The image in grey under the colours of its pixels' classes; ignored pixels have none."""
    table = np.array([*palette(classes), NEUTRAL], dtype=np.float64)
    index = torch.where(labels == IGNORED, classes, labels).numpy()
    return Image.fromarray(((1 - OPACITY) * _grey(image) + OPACITY * table[index]).round().astype(np.uint8))


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
    return Image.fromarray(pixels.round().astype(np.uint8))


def _grey(image: Image.Image) -> npt.NDArray[np.float64]:
    return np.asarray(image.convert("L").convert("RGB"), dtype=np.float64)


@dataclass(frozen=True)
class SegmentedImage:
    """An image, and the class of each of its pixels as (height, width)."""

    name: str  # where it comes from
    image: Image.Image  # as it is in its file
    classes: int  # how many there are
    labels: Tensor | None  # the ground truth, 255 where it has none; `None` if there are no masks
    original: Tensor  # what the original finds
    compressed: Tensor | None  # what the compressed model finds; `None` if there is only one model

    @property
    def agreement(self) -> float | None:
        """Share of the pixels to which both models give the same class."""
        return None if self.compressed is None else (self.original == self.compressed).double().mean().item()

    @property
    def original_miou(self) -> float | None:
        """Of the original on this image, over the classes that are somewhere on it."""
        return self._miou(self.original)

    @property
    def compressed_miou(self) -> float | None:
        """Of the compressed model on this image, over the classes that are somewhere on it."""
        return self._miou(self.compressed)

    def _miou(self, predicted: Tensor | None) -> float | None:
        if self.labels is None or predicted is None:
            return None
        counts = count_classes(predicted[None].long(), self.labels[None].long(), self.classes)
        miou = float(mean_iou(counts[0]))
        return None if math.isnan(miou) else miou

    def classes_found(self) -> list[int]:
        """The classes that are somewhere on the image, in the ground truth or in what a model finds."""
        maps = [each for each in (self.labels, self.original, self.compressed) if each is not None]
        return sorted({int(value) for each in maps for value in each.unique()})

    def panels(self) -> list[Panel]:
        """The pictures of the columns, with captions."""
        size = f"{self.image.width} x {self.image.height}"
        made: list[Panel] = [(self.image.convert("RGB"), (Path(self.name).name, size))]
        if self.labels is not None:
            made.append((mask_overlay(self.image, self.labels, self.classes), ()))
        before, after = self.original_miou, self.compressed_miou
        caption: tuple[str, ...] = () if before is None else (f"mIoU {before:.1%}",)
        made.append((mask_overlay(self.image, self.original, self.classes), caption))
        if self.compressed is not None:
            change = "" if before is None or after is None else f" ({100 * (after - before):+.1f})"
            caption = () if after is None else (f"mIoU {after:.1%}{change}",)
            made.append((mask_overlay(self.image, self.compressed, self.classes), caption))
            kinds = differences(self.original, self.compressed, self.labels)
            worse, better = ((kinds == kind).double().mean().item() for kind in (WORSE, BETTER))
            verdict = () if self.labels is None else (f"{worse:.1%} worse, {better:.1%} better",)
            made.append((difference_overlay(self.image, kinds), (f"{self.agreement:.1%} agree", *verdict)))
        return made


@dataclass(frozen=True)
class Segmentation:
    """Images that `segment` ran through a model and its original.

    Attributes:
        images: One after the other.
        names: Of the classes; empty if they have none but their numbers.
        titles: Of the models' columns: the original's, the compressed one's.
        broken: What could not be read and was left out.
    """

    images: tuple[SegmentedImage, ...]
    names: tuple[str, ...] = ()
    titles: tuple[str, str] = ("original", "compressed")
    broken: Broken = field(default_factory=Broken)

    def picture(self, index: int) -> Image.Image:
        """One image with its columns, at its own size."""
        width, height = self.images[index].image.size
        factor = -(-LEAST_WIDTH // width)
        scale = min(max(factor * width / TILE, 1.0), LARGEST_SCALE)
        return self._draw([self.images[index]], max(width, height) * factor, scale)

    def sheet(self, tile: int = TILE) -> Image.Image:
        """All images below each other, each with its longer side this long."""
        return self._draw(self.images, tile)

    def save(self, folder: str | Path) -> list[Path]:
        """Write the sheet of all images, `sheet.png`, and a picture of each; the sheet comes first in the list.

        Raises:
            PmvitError: If `folder` is a file.
        """
        if Path(folder).is_file():
            raise PmvitError(f"expected a folder or a new name to write pictures to, got the file {folder}")
        written = [write_png(self.sheet(), Path(folder) / "sheet.png")]
        for number, image in enumerate(self.images):
            stem = numbered_stem(number, len(self.images), image.name)
            written.append(write_png(self.picture(number), Path(folder) / f"{stem}.png"))
        return written

    def _draw(self, shown: Sequence[SegmentedImage], side: int, scale: float = 1.0) -> Image.Image:
        """Rows of pictures whose longer side has so many pixels, and letters so many times as large."""
        has_masks, has_two = shown[0].labels is not None, shown[0].compressed is not None
        titles = ["input", *(["ground truth"] if has_masks else []), self.titles[0]]
        titles += [self.titles[1], "difference"] if has_two else []
        rows = []
        for image in shown:
            panels = [(fitted(picture, side), lines) for picture, lines in image.panels()]
            width, height = panels[0][0].size
            tiles = [Tile((Layer(np.array(picture)),), lines) for picture, lines in panels]
            rows.append(Row(tiles, (width / scale, height / scale)))
        found, colours = sorted({each for image in shown for each in image.classes_found()}), palette(shown[0].classes)
        names = [(colours[i], self.names[i] if self.names else str(i)) for i in found if i != IGNORED]
        legends: Legends = {"classes": [*names, *([(NEUTRAL, "ignored")] if IGNORED in found else [])]}
        if has_two:
            kinds = list(DIFFERENCES.values()) if has_masks else [(DIFFERENCES[CHANGED][0], "another class")]
            legends = {**legends, "difference": kinds}
        return draw_tiles([Heading(title) for title in titles], rows, legends, scale=scale).image()
