"""What segmenters make of images: input, ground truth, original, compressed and difference side by side."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image
from torch import Tensor

from pmvit.data.batches import IGNORED
from pmvit.data.loaders import Broken
from pmvit.errors import PmvitError
from pmvit.evaluation.segmentation import PixelCounts
from pmvit.reporting.canvas import numbered_stem, write_png
from pmvit.reporting.colours import NEUTRAL, palette
from pmvit.reporting.legend import Entry
from pmvit.reporting.overlays import BETTER, CHANGED, DIFFERENCES, WORSE, difference_overlay, differences, mask_overlay
from pmvit.reporting.panels import Panel, fitted, lay_out

LEAST_WIDTH = 200  # of a picture beside others; smaller images are enlarged
TILE = 260  # longer side of a picture on a sheet of many images


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
        counts = PixelCounts(self.classes, self.labels.device)
        counts.add(predicted[None].long(), self.labels[None].long())
        return counts.miou()

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
        chosen = self.images[index]
        factor = -(-LEAST_WIDTH // chosen.image.width)
        panels = [panel._replace(picture=_times(panel.picture, factor)) for panel in chosen.panels()]
        return self._lay_out([panels], [chosen])

    def sheet(self, tile: int = TILE) -> Image.Image:
        """All images below each other, each with its longer side this long."""
        rows = [[p._replace(picture=fitted(p.picture, tile)) for p in image.panels()] for image in self.images]
        return self._lay_out(rows, self.images)

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

    def _lay_out(self, rows: list[list[Panel]], shown: Sequence[SegmentedImage]) -> Image.Image:
        two_models = shown[0].compressed is not None
        titles = ["input"]
        titles += ["ground truth"] if shown[0].labels is not None else []
        titles += [*self.titles, "difference"] if two_models else [self.titles[0]]
        legends = {"classes": self._classes_on(shown)}
        if two_models:
            legends["difference"] = _differences_on(shown)
        return lay_out(titles, rows, legends)

    def _classes_on(self, shown: Sequence[SegmentedImage]) -> list[Entry]:
        maps = [m for image in shown for m in (image.labels, image.original, image.compressed) if m is not None]
        found = sorted({int(value) for labels in maps for value in labels.unique()})
        colours = palette(shown[0].classes)
        entries = [Entry(colours[i], self.names[i] if self.names else str(i)) for i in found if i != IGNORED]
        return entries + ([Entry(NEUTRAL, "ignored")] if IGNORED in found else [])


def _differences_on(shown: Sequence[SegmentedImage]) -> list[Entry]:
    if shown[0].labels is None:
        return [Entry(DIFFERENCES[CHANGED][0], "another class")]
    return [Entry(colour, text) for colour, text in DIFFERENCES.values()]


def _times(picture: Image.Image, factor: int) -> Image.Image:
    return picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)


def read_names(path: Path, classes: int) -> tuple[str, ...]:
    """Names of classes from a text file, one a line.

    Raises:
        PmvitError: If there is no such file, or not one name a class in it.
    """
    try:
        names = tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise PmvitError(f"expected names of classes in {path}, one a line; it cannot be read ({error})") from None
    if len(names) != classes:
        raise PmvitError(f"{path}: expected {classes} names, one a line for each class of the model; got {len(names)}")
    return names
