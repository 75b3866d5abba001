"""Pictures side by side: columns with titles, a caption below each picture, legends below all of them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont

from pmvit.report.colours import Colour

BACKGROUND: Colour = (250, 250, 250)
INK, FAINT_INK, FRAME = (25, 25, 25), (95, 95, 95), (170, 170, 170)
COLUMN, LEAST_COLUMN = 260, 200  # pixels across a column these sizes are meant for, and the least that captions need
TITLE, TEXT, LINE, MARGIN, SWATCH, GAP = 17, 14, 19, 12, 14, 16
LARGEST = 4.0  # times these sizes, as columns get wider

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


class Panel(NamedTuple):
    """A picture and the lines below it."""

    picture: Image.Image
    caption: tuple[str, ...] = ()


class Entry(NamedTuple):
    """What a colour stands for; without a colour, the name of the legend."""

    colour: Colour | None
    text: str


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
        self.title, self.text = (ImageFont.load_default(round(size * scale)) for size in (TITLE, TEXT))

    def draw(
        self, titles: Sequence[str], rows: Sequence[Sequence[Panel]], legends: Mapping[str, Sequence[Entry]]
    ) -> Image.Image:
        width = self.margin + len(titles) * (self.column + self.margin)
        key = [line for name, entries in legends.items() for line in self._lines(name, entries, width - self.margin)]
        heights = [max(panel.picture.height for panel in row) for row in rows]
        captions = [self.line * max(len(panel.caption) for panel in row) for row in rows]
        top = self.margin + self.line + self.line // 2
        bottom = top + sum(heights) + sum(captions) + self.gap * len(rows)
        height = bottom + round(1.2 * self.line) * len(key) + self.margin // 2
        canvas = Image.new("RGB", (width, height), BACKGROUND)
        pen = ImageDraw.Draw(canvas)
        lefts = [self.margin + number * (self.column + self.margin) for number in range(len(titles))]
        for left, title in zip(lefts, titles, strict=True):
            pen.text((left, self.margin), shortened(title, self.title, self.column), fill=INK, font=self.title)
        for row, tall, below in zip(rows, heights, captions, strict=True):
            for left, panel in zip(lefts, row, strict=True):
                canvas.paste(panel.picture, (left, top))
                for number, words in enumerate(panel.caption):
                    place = (left, top + tall + self.line // 5 + number * self.line)
                    words = shortened(words, self.text, self.column)
                    pen.text(place, words, fill=FAINT_INK if number else INK, font=self.text)
            top += tall + below + self.gap
        for number, line in enumerate(key):
            self._draw_line(pen, line, bottom + number * round(1.2 * self.line))
        return canvas

    def _lines(self, name: str, entries: Sequence[Entry], width: int) -> list[list[tuple[int, Entry]]]:
        """Entries and how far from the left each stands, in as many lines as they need."""
        if not entries:
            return []
        lines: list[list[tuple[int, Entry]]] = [[(self.margin, Entry(None, name))]]
        indent = left = self.margin + self._width(Entry(None, name))
        for entry in entries:
            if left > indent and left + self._width(entry) - self.gap > width:
                lines.append([])
                left = indent
            lines[-1].append((left, entry))
            left += self._width(entry)
        return lines

    def _width(self, entry: Entry) -> int:
        swatch = 0 if entry.colour is None else round(1.4 * self.swatch)
        return swatch + round(self.text.getlength(entry.text)) + self.gap

    def _draw_line(self, pen: ImageDraw.ImageDraw, line: Sequence[tuple[int, Entry]], top: int) -> None:
        for left, entry in line:
            if entry.colour is None:
                pen.text((left, top), entry.text, fill=FAINT_INK, font=self.text)
                continue
            below = top + self.line // 10
            pen.rectangle((left, below, left + self.swatch, below + self.swatch), fill=entry.colour, outline=FRAME)
            pen.text((left + round(1.4 * self.swatch), top), entry.text, fill=INK, font=self.text)


def shortened(words: str, font: Font, width: int) -> str:
    """Words that fit into a width: their middle is left out if it has to be."""
    if font.getlength(words) <= width:
        return words
    kept = len(words)
    while kept > 2 and font.getlength(f"{words[: kept - kept // 2]}...{words[-(kept // 2) :]}") > width:
        kept -= 1
    return f"{words[: kept - kept // 2]}...{words[-(kept // 2) :]}"
