"""Blocks side by side, in bands of a few: a row of tiles for each thing to see of them, with a name at its left."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pmvit.reporting.canvas import FAINT_INK, FRAME, INK, TILE, Box, Canvas, Layer, in_lines, shortened
from pmvit.reporting.colours import BLUE, NEUTRAL, ORANGE, Colour
from pmvit.reporting.legend import Entry, Legend

MARGIN, SPACE, GUTTER, BAND_GAP = 16, 10, 92, 22
TITLE, NAME, TEXT, LINE, BAR, SWATCH, GAP = 20, 14, 12, 17, 6, 12, 16
FEW, MANY = 6, 8  # blocks in a band, up to two bands of few
LEAST_WIDTH = 720  # that titles and legends need
SHARES: tuple[tuple[str, Colour], ...] = (("kept", BLUE), ("merged", ORANGE), ("pruned", (255, 255, 255)))


class Heading(NamedTuple):
    """What stands above a block: its name, a line of words, and how many patches it keeps, merges and prunes."""

    name: str
    words: str
    counts: tuple[int, int, int]


class Tile(NamedTuple):
    """Pictures one over the other, and a line below; without pictures, lines that say why there are none."""

    layers: tuple[Layer, ...]
    words: str = ""


class Row(NamedTuple):
    """One thing to see: its name, in lines, and a tile for each block."""

    name: tuple[str, ...]
    tiles: Sequence[Tile]

    @property
    def has_words(self) -> bool:
        return any(tile.layers and tile.words for tile in self.tiles)


class Header(NamedTuple):
    """What stands on top: a title, sentences below it, and the photograph that it is about, if it is about one."""

    title: str
    lines: Sequence[str] = ()
    photograph: Layer | None = None


def tile_size(height: int, width: int) -> tuple[int, int]:
    """Width and height of the tiles that show something of this height and width."""
    factor = TILE / max(height, width)
    return max(1, round(width * factor)), max(1, round(height * factor))


def lay_out_bands(
    header: Header,
    headings: Sequence[Heading],
    rows: Sequence[Row],
    legends: Mapping[str, Sequence[Entry]],
    size: tuple[int, int],
) -> Canvas:
    """Draw what there is to see of every block.

    Args:
        header: What stands on top.
        headings: Of the blocks.
        rows: What is seen of them.
        legends: Their entries, by their names.
        size: Width and height of a tile.
    """
    across = min(len(headings), FEW if len(headings) <= 2 * FEW else MANY)
    return _Bands(size, across, rows).draw(header, headings, legends)


class _Bands:
    """Everything on a sheet, in pixels, for tiles of a size and so many blocks in a band."""

    def __init__(self, size: tuple[int, int], across: int, rows: Sequence[Row]) -> None:
        self.size, self.across, self.rows = size, across, rows
        self.column = max(size[0], TILE)  # captions need their width
        self.left = MARGIN + GUTTER
        self.width = max(self.left + across * (self.column + SPACE) - SPACE + MARGIN, LEAST_WIDTH)
        self.head = NAME + LINE + BAR + 14
        self.band = self.head + sum(self._height(row) for row in rows)

    def _height(self, row: Row) -> int:
        return self.size[1] + SPACE + (LINE if row.has_words else 0)

    def draw(self, header: Header, headings: Sequence[Heading], legends: Mapping[str, Sequence[Entry]]) -> Canvas:
        beside = MARGIN + (0 if header.photograph is None else self.size[0] + MARGIN)
        sizes = {"text": TEXT, "line": LINE, "swatch": SWATCH, "gap": GAP}
        room = self.width - beside - MARGIN
        lines = [line for words in header.lines for line in in_lines(words, TEXT, room)]
        lines_top = MARGIN + TITLE + 12
        key = Legend(legends, room, **sizes)
        key_top = lines_top + LINE * len(lines) + 6
        shown = 0 if header.photograph is None else MARGIN + self.size[1]
        top = max(key_top + key.height, shown) + BAND_GAP
        bands = -(-len(headings) // self.across)
        height = top + bands * self.band + (bands - 1) * BAND_GAP + MARGIN - SPACE
        canvas = Canvas(self.width, height, header.title)
        if header.photograph is not None:
            canvas.picture(Box(MARGIN, MARGIN, *self.size), header.photograph)
        canvas.text(beside, MARGIN, shortened(header.title, TITLE, room), TITLE)
        for number, words in enumerate(lines):
            canvas.text(beside, lines_top + number * LINE, words, TEXT, FAINT_INK)
        key.draw(canvas, beside, key_top)
        for start in range(0, len(headings), self.across):
            self._draw_band(canvas, headings[start : start + self.across], start, top)
            top += self.band + BAND_GAP
        return canvas

    def _draw_band(self, canvas: Canvas, headings: Sequence[Heading], start: int, top: int) -> None:
        lefts = [self.left + number * (self.column + SPACE) for number in range(len(headings))]
        for left, heading in zip(lefts, headings, strict=True):
            canvas.text(left, top, heading.name, NAME)
            canvas.text(left, top + NAME + 4, shortened(heading.words, TEXT, self.column), TEXT, FAINT_INK)
            self._draw_bar(canvas, heading.counts, left, top + NAME + LINE + 5)
        top += self.head
        for row in self.rows:
            middle = top + (self.size[1] - LINE * len(row.name)) // 2
            for number, words in enumerate(row.name):
                colour = FAINT_INK if number else INK
                canvas.text(MARGIN, middle + number * LINE, shortened(words, TEXT, GUTTER - 6), TEXT, colour)
            for left, tile in zip(lefts, row.tiles[start : start + len(lefts)], strict=True):
                self._draw_tile(canvas, tile, left, top)
            top += self._height(row)

    def _draw_bar(self, canvas: Canvas, counts: tuple[int, int, int], left: int, top: int) -> None:
        """How the patches are shared out, from the left: kept, merged, pruned."""
        width = self.size[0]
        canvas.rectangle(Box(left, top, width, BAR), SHARES[-1][1], FRAME)
        ends = [round(width * sum(counts[:number]) / sum(counts)) for number in range(3)]
        for number, (_, colour) in enumerate(SHARES[:-1]):
            if ends[number + 1] > ends[number]:
                canvas.rectangle(Box(left + ends[number], top, ends[number + 1] - ends[number], BAR), colour)

    def _draw_tile(self, canvas: Canvas, tile: Tile, left: int, top: int) -> None:
        box = Box(left, top, *self.size)
        canvas.rectangle(Box(left - 1, top - 1, self.size[0] + 2, self.size[1] + 2), NEUTRAL, FRAME)
        if tile.layers:
            canvas.picture(box, *tile.layers)
            canvas.text(left, top + self.size[1] + 3, shortened(tile.words, TEXT, self.column), TEXT, FAINT_INK)
            return
        lines = tile.words.splitlines()
        middle = top + (self.size[1] - LINE * len(lines)) // 2
        for number, words in enumerate(lines):
            words = shortened(words, TEXT, self.size[0] - 12)
            canvas.text(left + 6, middle + number * LINE, words, TEXT, FAINT_INK)
