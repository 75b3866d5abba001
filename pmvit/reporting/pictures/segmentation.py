"""What segmenters make of images: input, ground truth, original, compressed and difference side by side."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from torch import Tensor

from pmvit.data.batches import IGNORED
from pmvit.data.loaders import Broken
from pmvit.errors import PmvitError
from pmvit.evaluation.segmentation import count_classes, mean_iou
from pmvit.reporting.images import fitted
from pmvit.reporting.pictures.colours import NEUTRAL, palette
from pmvit.reporting.pictures.figure import Layer, numbered_stem, write_png
from pmvit.reporting.pictures.overlays import (
    BETTER,
    CHANGED,
    DIFFERENCES,
    WORSE,
    difference_overlay,
    differences,
    mask_overlay,
)
from pmvit.reporting.pictures.tiles import Entry, Header, Heading, Row, Tile, draw_tiles

LEAST_WIDTH = 200  # of a picture beside others; smaller images are enlarged
TILE = 260  # longer side of a picture on a sheet of many images
LARGEST_SCALE = 4.0  # of letters and margins, as pictures get wider than a tile


class Panel(NamedTuple):
    """A picture and the lines below it."""

    picture: Image.Image
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class SegmentedImage:
    """An image, and the class of each of its pixels as (height, width).

    Attributes:
        name: Where it comes from.
        image: As it is in its file.
        classes: How many there are.
        labels: The ground truth, 255 where it has none; `None` if there are no masks.
        original: What the original finds.
        compressed: What the compressed model finds; `None` if there is only one model.
    """

    name: str
    image: Image.Image
    classes: int
    labels: Tensor | None
    original: Tensor
    compressed: Tensor | None

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
        return None if self.compressed is None else self._miou(self.compressed)

    def _miou(self, predicted: Tensor) -> float | None:
        if self.labels is None:
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
        made = [Panel(self.image.convert("RGB"), (Path(self.name).name, size))]
        if self.labels is not None:
            made.append(Panel(mask_overlay(self.image, self.labels, self.classes)))
        made.append(Panel(mask_overlay(self.image, self.original, self.classes), _miou_caption(self.original_miou)))
        if self.compressed is not None and self.agreement is not None:
            change = _miou_caption(self.compressed_miou, self.original_miou)
            made.append(Panel(mask_overlay(self.image, self.compressed, self.classes), change))
            kinds = differences(self.original, self.compressed, self.labels)
            shares = {kind: (kinds == kind).double().mean().item() for kind in (WORSE, BETTER)}
            verdict = (f"{shares[WORSE]:.1%} worse, {shares[BETTER]:.1%} better",) if self.labels is not None else ()
            made.append(Panel(difference_overlay(self.image, kinds), (f"{self.agreement:.1%} agree", *verdict)))
        return made


def _miou_caption(miou: float | None, before: float | None = None) -> tuple[str, ...]:
    if miou is None:
        return ()
    return (f"mIoU {miou:.1%}" + (f" ({100 * (miou - before):+.1f})" if before is not None else ""),)


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
        two_models = shown[0].compressed is not None
        titles = ["input"]
        titles += ["ground truth"] if shown[0].labels is not None else []
        titles += [*self.titles, "difference"] if two_models else [self.titles[0]]
        legends = {"classes": self._classes_on(shown)}
        if two_models:
            legends["difference"] = _differences_on(shown)
        rows = []
        for image in shown:
            panels = [Panel(fitted(picture, side), lines) for picture, lines in image.panels()]
            width, height = panels[0].picture.size
            tiles = [Tile((Layer(np.array(picture)),), lines) for picture, lines in panels]
            rows.append(Row(tiles, (width / scale, height / scale)))
        return draw_tiles(Header(), [Heading(title) for title in titles], rows, legends, scale=scale).image()

    def _classes_on(self, shown: Sequence[SegmentedImage]) -> list[Entry]:
        found = sorted({each for image in shown for each in image.classes_found()})
        colours = palette(shown[0].classes)
        entries = [Entry(colours[i], self.names[i] if self.names else str(i)) for i in found if i != IGNORED]
        return entries + ([Entry(NEUTRAL, "ignored")] if IGNORED in found else [])


def _differences_on(shown: Sequence[SegmentedImage]) -> list[Entry]:
    if shown[0].labels is None:
        return [Entry(DIFFERENCES[CHANGED][0], "another class")]
    return [Entry(colour, text) for colour, text in DIFFERENCES.values()]
