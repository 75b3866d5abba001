"""Pictures side by side: columns with titles, a caption below each picture, legends below all of them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from PIL import Image

from pmvit.reporting.canvas import FAINT_INK, INK, Box, Canvas, Layer, shortened
from pmvit.reporting.legend import Entry, Legend

COLUMN, LEAST_COLUMN = 260, 200  # pixels across a column these sizes are meant for, and the least that captions need
TITLE, TEXT, LINE, MARGIN, SWATCH, GAP = 17, 14, 19, 12, 14, 16
LARGEST = 4.0  # times these sizes, as columns get wider


class Panel(NamedTuple):
    """A picture and the lines below it."""

    picture: Image.Image
    caption: tuple[str, ...] = ()


def fitted(picture: Image.Image, side: int) -> Image.Image:
    """A picture with its longer side this long; enlarged ones keep their pixels sharp."""
    factor = side / max(picture.size)
    size = max(1, round(picture.width * factor)), max(1, round(picture.height * factor))
    return picture.resize(size, Image.Resampling.NEAREST if factor > 1 else Image.Resampling.LANCZOS)


def lay_out(
    titles: Sequence[str], rows: Sequence[Sequence[Panel]], legends: Mapping[str, Sequence[Entry]]
) -> Image.Image:
    """Draw rows of panels under the titles of their columns, and the legends with their names below."""
    widest = max(panel.picture.width for row in rows for panel in row)
    return _Sheet(max(widest, LEAST_COLUMN)).draw(titles, rows, legends)


class _Sheet:
    """Everything on a sheet, in pixels, for a width of its columns."""

    def __init__(self, column: int) -> None:
        scale = min(max(column / COLUMN, 1.0), LARGEST)
        self.column = column
        self.line, self.margin, self.swatch, self.gap = (round(size * scale) for size in (LINE, MARGIN, SWATCH, GAP))
        self.title, self.text = (round(size * scale) for size in (TITLE, TEXT))

    def draw(
        self, titles: Sequence[str], rows: Sequence[Sequence[Panel]], legends: Mapping[str, Sequence[Entry]]
    ) -> Image.Image:
        width = self.margin + len(titles) * (self.column + self.margin)
        sizes = {"text": self.text, "line": self.line, "swatch": self.swatch, "gap": self.gap}
        key = Legend(legends, width - 2 * self.margin, **sizes)
        heights = [max(panel.picture.height for panel in row) for row in rows]
        captions = [self.line * max(len(panel.caption) for panel in row) for row in rows]
        top = self.margin + self.line + self.line // 2
        bottom = top + sum(heights) + sum(captions) + self.gap * len(rows)
        canvas = Canvas(width, bottom + key.height + self.margin // 2)
        lefts = [self.margin + number * (self.column + self.margin) for number in range(len(titles))]
        for left, title in zip(lefts, titles, strict=True):
            canvas.text(left, self.margin, shortened(title, self.title, self.column), self.title)
        for row, tall, below in zip(rows, heights, captions, strict=True):
            for left, panel in zip(lefts, row, strict=True):
                canvas.picture(Box(left, top, *panel.picture.size), Layer(panel.picture))
                for number, words in enumerate(panel.caption):
                    words = shortened(words, self.text, self.column)
                    height = top + tall + self.line // 5 + number * self.line
                    canvas.text(left, height, words, self.text, FAINT_INK if number else INK)
            top += tall + below + self.gap
        key.draw(canvas, self.margin, bottom)
        return canvas.image()
