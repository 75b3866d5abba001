"""Tiles in rows and columns: headings above, names at the left, captions below, and what the colours stand for."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from pmvit.reporting.pictures.colours import BLUE, NEUTRAL, ORANGE, Colour
from pmvit.reporting.pictures.figure import (
    FAINT_INK,
    FRAME,
    INK,
    Box,
    Layer,
    PixelFigure,
    in_lines,
    shortened,
    text_width,
)

TILE, LEAST_PATCH = 168, 3  # about the longer side of a tile, and the least of a patch with a dot or lines around it
MARGIN, SPACE, GUTTER, GAP = 16, 10, 96, 22  # around the figure, between tiles, for the names of rows, above headings
TITLE, HEADING, TEXT, LINE, BAR, SWATCH, ENTRY_SPACE = 18, 13, 11, 17, 6, 12, 16
FEW, MANY = 6, 8  # blocks side by side, up to twice the few
LEAST_WIDTH = 720  # that titles and legends need
SHARES: tuple[tuple[str, Colour], ...] = (("kept", BLUE), ("merged", ORANGE), ("pruned", (255, 255, 255)))


class Entry(NamedTuple):
    """What a colour stands for; without a colour, words alone."""

    colour: Colour | None
    text: str


Legends = Mapping[str, Sequence[Entry]]


class Heading(NamedTuple):
    """What stands above a column: a name, a line of words, and how many patches are kept, merged and pruned."""

    name: str
    words: str = ""
    counts: tuple[int, int, int] | None = None


class Tile(NamedTuple):
    """Pictures one over the other, and lines below; without pictures, lines that say why there are none."""

    layers: tuple[Layer, ...]
    lines: tuple[str, ...] = ()


class Row(NamedTuple):
    """A tile for each column, all of one width and height, and a name in lines."""

    tiles: Sequence[Tile]
    size: tuple[float, float]
    name: tuple[str, ...] = ()

    @property
    def caption_lines(self) -> int:
        return max(len(tile.lines) if tile.layers else 0 for tile in self.tiles)


class Header(NamedTuple):
    """What stands on top: a title, sentences below it, and the photograph that it is about, if it is about one."""

    title: str = ""
    lines: Sequence[str] = ()
    photograph: Layer | None = None


def patch_side(grid: tuple[int, int]) -> int:
    """Whole pixels of a patch in a tile that shows a grid of them."""
    return max(LEAST_PATCH, round(TILE / max(grid)))


def tile_size(grids: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Width and height of the tiles that show blocks with these grids; patches of the finest have whole pixels."""
    rows, columns = finest = max(grids)
    side = patch_side(finest)
    return side * columns, side * rows


def draw_tiles(
    header: Header, headings: Sequence[Heading], rows: Sequence[Row], legends: Legends, *, scale: float = 1.0
) -> PixelFigure:
    """Lay out rows of tiles under their headings; more columns than fit go on below, all rows again.

    Args:
        header: What stands on top.
        headings: Of the columns.
        rows: One thing to see each, in all columns.
        legends: What colours stand for, by the names of the legends; one without entries is left out.
        scale: Pixels of the file for each pixel of this layout.
    """
    across = min(len(headings), FEW if len(headings) <= 2 * FEW else MANY)
    column = max(TILE, *(row.size[0] for row in rows))  # captions need their width
    left = MARGIN + (GUTTER if any(row.name for row in rows) else 0)
    least = LEAST_WIDTH if header.title else 0
    figure = PixelFigure(max(left + across * (column + SPACE) - SPACE + MARGIN, least), header.title, scale)
    top = _draw_header(figure, header, legends, rows[0].size)
    for start in range(0, len(headings), across):
        chosen = slice(start, start + across)
        lefts = [left + number * (column + SPACE) for number in range(len(headings[chosen]))]
        top += _draw_headings(figure, headings[chosen], lefts, top, column, rows[0].size[0])
        for row in rows:
            top += _draw_row(figure, row._replace(tiles=row.tiles[chosen]), lefts, top, column, row.caption_lines)
        top += GAP - SPACE
    figure.height = top - GAP + MARGIN
    return figure


def _draw_header(figure: PixelFigure, header: Header, legends: Legends, size: tuple[float, float]) -> float:
    """Draw what stands on top; return where it ends."""
    left, top, end = float(MARGIN), MARGIN, 0.0
    if header.photograph is not None:
        figure.picture(Box(MARGIN, MARGIN, *size), header.photograph)
        left, end = left + size[0] + MARGIN, MARGIN + size[1]
    room = figure.width - left - MARGIN
    if header.title:
        figure.text(left, top, shortened(header.title, TITLE, room), TITLE)
        top += TITLE + 12
    for words in (line for each in header.lines for line in in_lines(each, TEXT, room)):
        figure.text(left, top, words, TEXT, FAINT_INK)
        top += LINE
    top += 4 if header.lines else 0
    for name, entries in legends.items():
        top += _draw_legend(figure, name, entries, left, top) if entries else 0
    return max(top, end) + (GAP if header.title else SPACE)


def _draw_legend(figure: PixelFigure, name: str, entries: Sequence[Entry], left: float, top: int) -> int:
    """Draw swatches with words behind the name of a legend, in as many lines as they need; return their height."""
    step, begin = LINE + 4, top
    figure.text(left, top, name, TEXT, FAINT_INK)
    first = at = left + text_width(name, TEXT) + ENTRY_SPACE
    for colour, words in entries:
        indent = 0 if colour is None else SWATCH + 5
        width = indent + text_width(words, TEXT)
        if at > first and at + width > figure.width - MARGIN:
            at, top = first, top + step
        if colour is not None:
            figure.rectangle(Box(at, top, SWATCH, SWATCH), colour, FRAME)
        figure.text(at + indent, top, words, TEXT, FAINT_INK if colour is None else INK)
        at += width + ENTRY_SPACE
    return top + step - begin


def _draw_headings(
    figure: PixelFigure, headings: Sequence[Heading], lefts: Sequence[float], top: float, column: float, width: float
) -> float:
    """Draw what stands above tiles of a width; return its height."""
    has_words, has_bar = any(each.words for each in headings), any(each.counts for each in headings)
    for left, (name, words, counts) in zip(lefts, headings, strict=True):
        figure.text(left, top, shortened(name, HEADING, column), HEADING)
        figure.text(left, top + HEADING + 5, shortened(words, TEXT, column), TEXT, FAINT_INK)
        if counts is not None:
            _draw_bar(figure, counts, Box(left, top + HEADING + LINE + 6, width, BAR))
    return HEADING + 8 + (LINE if has_words else 0) + (BAR + 6 if has_bar else 0)


def _draw_bar(figure: PixelFigure, counts: tuple[int, int, int], box: Box) -> None:
    """How the patches are shared out, from the left: kept, merged, pruned."""
    figure.rectangle(box, SHARES[-1][1], FRAME)
    ends = [round(box.width * sum(counts[:number]) / sum(counts)) for number in range(3)]
    for begin, end, (_, colour) in zip(ends, ends[1:], SHARES, strict=False):
        if end > begin:
            figure.rectangle(Box(box.left + begin, box.top, end - begin, box.height), colour)


def _draw_row(
    figure: PixelFigure, row: Row, lefts: Sequence[float], top: float, column: float, caption_lines: int
) -> float:
    """Draw tiles side by side with the name of the row and their captions; return their height."""
    width, height = row.size
    _draw_lines(figure, row.name, MARGIN, top + (height - LINE * len(row.name)) / 2, GUTTER - 6)
    for left, (layers, lines) in zip(lefts, row.tiles, strict=True):
        figure.rectangle(Box(left - 1, top - 1, width + 2, height + 2), NEUTRAL, FRAME)
        if layers:
            figure.picture(Box(left, top, width, height), *layers)
            _draw_lines(figure, lines, left, top + height + 5, column)
        else:
            _draw_lines(figure, lines, left + 6, top + (height - LINE * len(lines)) / 2, width - 12, faint=0)
    return height + SPACE + LINE * caption_lines + (2 if caption_lines else 0)


def _draw_lines(
    figure: PixelFigure, lines: Sequence[str], left: float, top: float, width: float, *, faint: int = 1
) -> None:
    """Write lines below each other, those from number `faint` on in grey."""
    for number, words in enumerate(lines):
        colour = FAINT_INK if number >= faint else INK
        figure.text(left, top + number * LINE, shortened(words, TEXT, width), TEXT, colour)
