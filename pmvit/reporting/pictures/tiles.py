"""Tiles in rows and columns: headings above, names at the left, captions below, and what the colours stand for."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from pmvit.numbers.colours import BLUE, NEUTRAL, ORANGE, Colour
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

Legends = Mapping[str, Sequence[tuple[Colour | None, str]]]  # what colours stand for; words alone have no colour


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


def patch_side(grid: tuple[int, int]) -> int:
    """Whole pixels of a patch in a tile that shows a grid of them."""
    return max(LEAST_PATCH, round(TILE / max(grid)))


def tile_size(grids: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Width and height of the tiles that show blocks with these grids; patches of the finest have whole pixels."""
    rows, columns = finest = max(grids)
    return patch_side(finest) * columns, patch_side(finest) * rows


def draw_tiles(
    headings: Sequence[Heading],
    rows: Sequence[Row],
    legends: Legends,
    *,
    title: str = "",
    lines: Sequence[str] = (),
    photograph: Layer | None = None,
    scale: float = 1.0,
) -> PixelFigure:
    """Lay out rows of tiles under the headings of their columns; more columns than fit go on below, all rows again.

    On top stand a title, sentences, and the photograph that it is about, if it is about one. `scale` is how many pixels
    of the file there are for each of this layout.
    """
    across = min(len(headings), FEW if len(headings) <= 2 * FEW else MANY)
    column = max(TILE, *(row.size[0] for row in rows))  # captions need their width
    left = MARGIN + (GUTTER if any(row.name for row in rows) else 0)
    width = left + across * (column + SPACE) - SPACE + MARGIN
    figure = PixelFigure(max(width, LEAST_WIDTH if title else 0), title, scale)
    begin, top, end = float(MARGIN), float(MARGIN), 0.0
    if photograph is not None:
        figure.picture((MARGIN, MARGIN, *rows[0].size), photograph)
        begin, end = begin + rows[0].size[0] + MARGIN, MARGIN + rows[0].size[1]
    room = figure.width - begin - MARGIN
    if title:
        figure.text(begin, top, shortened(title, TITLE, room), TITLE)
        top += TITLE + 12
    wrapped = [line for each in lines for line in in_lines(each, TEXT, room)]
    _draw_lines(figure, wrapped, begin, top, room, faint=0)
    top += LINE * len(wrapped) + (4 if wrapped else 0)
    for name, entries in legends.items():
        top = _draw_legend(figure, name, entries, begin, top)
    top = max(top, end) + (GAP if title else SPACE)
    for start in range(0, len(headings), across):
        places = [(left + number * (column + SPACE), start + number) for number in range(across)]
        places = places[: len(headings) - start]
        for at, number in places:
            _draw_heading(figure, headings[number], at, top, column, rows[0].size[0])
        top += HEADING + 8 + (LINE if any(each.words for each in headings) else 0)
        top += BAR + 6 if any(each.counts for each in headings) else 0
        for tiles, (width, height), words in rows:
            _draw_lines(figure, words, MARGIN, top + (height - LINE * len(words)) / 2, GUTTER - 6)
            for at, number in places:
                _draw_tile(figure, tiles[number], (at, top, width, height), column)
            below = max(len(tile.lines) if tile.layers else 0 for tile in tiles)
            top += height + SPACE + LINE * below + (2 if below else 0)
        top += GAP - SPACE
    figure.height = top - GAP + MARGIN
    return figure


def _draw_legend(
    figure: PixelFigure, name: str, entries: Sequence[tuple[Colour | None, str]], left: float, top: float
) -> float:
    """Draw swatches with words behind the name of a legend, in as many lines as they need; return where they end."""
    figure.text(left, top, name, TEXT, FAINT_INK)
    first = at = left + text_width(name, TEXT) + ENTRY_SPACE
    for colour, words in entries:
        indent = 0 if colour is None else SWATCH + 5
        width = indent + text_width(words, TEXT)
        if at > first and at + width > figure.width - MARGIN:
            at, top = first, top + LINE + 4
        if colour is not None:
            figure.rectangle((at, top, SWATCH, SWATCH), colour, FRAME)
        figure.text(at + indent, top, words, TEXT, FAINT_INK if colour is None else INK)
        at += width + ENTRY_SPACE
    return top + LINE + 4


def _draw_heading(figure: PixelFigure, heading: Heading, left: float, top: float, column: float, width: float) -> None:
    """Draw what stands above a tile of a width: words, and a bar that is shared by kept, merged and pruned patches."""
    name, words, counts = heading
    figure.text(left, top, shortened(name, HEADING, column), HEADING)
    figure.text(left, top + HEADING + 5, shortened(words, TEXT, column), TEXT, FAINT_INK)
    if counts is not None:
        top += HEADING + LINE + 6
        figure.rectangle((left, top, width, BAR), SHARES[-1][1], FRAME)
        ends = [round(width * sum(counts[:number]) / sum(counts)) for number in range(3)]
        for begin, end, (_, colour) in zip(ends, ends[1:], SHARES, strict=False):
            if end > begin:
                figure.rectangle((left + begin, top, end - begin, BAR), colour)


def _draw_tile(figure: PixelFigure, tile: Tile, box: Box, column: float) -> None:
    left, top, width, height = box
    figure.rectangle((left - 1, top - 1, width + 2, height + 2), NEUTRAL, FRAME)
    if tile.layers:
        figure.picture(box, *tile.layers)
        _draw_lines(figure, tile.lines, left, top + height + 5, column)
    else:
        middle = top + (height - LINE * len(tile.lines)) / 2
        _draw_lines(figure, tile.lines, left + 6, middle, width - 12, faint=0)


def _draw_lines(
    figure: PixelFigure, lines: Sequence[str], left: float, top: float, width: float, *, faint: int = 1
) -> None:
    """Write lines below each other, those from number `faint` on in grey."""
    for number, words in enumerate(lines):
        colour = FAINT_INK if number >= faint else INK
        figure.text(left, top + number * LINE, shortened(words, TEXT, width), TEXT, colour)
