"""What colours stand for: named lines of swatches with words."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pmvit.reporting.canvas import FAINT_INK, FRAME, Box, Canvas, font
from pmvit.reporting.colours import Colour


class Entry(NamedTuple):
    """What a colour stands for; without a colour, the name of the legend."""

    colour: Colour | None
    text: str


class Legend:
    """Legends one below the other, in as many lines as they need.

    Args:
        legends: The entries of each legend, by its name; one without entries is left out.
        width: How wide a line may be.
        text: Size of the letters.
        line: Height of a line of text.
        swatch: Side of a swatch.
        gap: Between two entries.
    """

    def __init__(
        self, legends: Mapping[str, Sequence[Entry]], width: int, *, text: int, line: int, swatch: int, gap: int
    ) -> None:
        self.text, self.line, self.swatch, self.gap = text, line, swatch, gap
        self.step = round(1.2 * line)
        self.lines = [row for name, entries in legends.items() for row in self._rows(name, entries, width)]

    @property
    def height(self) -> int:
        return self.step * len(self.lines)

    def draw(self, canvas: Canvas, left: int, top: int) -> None:
        """Draw all lines, from a place down and to the right."""
        for number, row in enumerate(self.lines):
            for indent, entry in row:
                self._draw_entry(canvas, entry, left + indent, top + number * self.step)

    def _rows(self, name: str, entries: Sequence[Entry], width: int) -> list[list[tuple[int, Entry]]]:
        """Entries and how far from the left each stands."""
        if not entries:
            return []
        rows: list[list[tuple[int, Entry]]] = [[(0, Entry(None, name))]]
        indent = left = self._width(Entry(None, name))
        for entry in entries:
            if left > indent and left + self._width(entry) - self.gap > width:
                rows.append([])
                left = indent
            rows[-1].append((left, entry))
            left += self._width(entry)
        return rows

    def _width(self, entry: Entry) -> int:
        swatch = 0 if entry.colour is None else round(1.4 * self.swatch)
        return swatch + round(font(self.text).getlength(entry.text)) + self.gap

    def _draw_entry(self, canvas: Canvas, entry: Entry, left: int, top: int) -> None:
        if entry.colour is None:
            canvas.text(left, top, entry.text, self.text, FAINT_INK)
            return
        box = Box(left, top + self.line // 10, self.swatch + 1, self.swatch + 1)
        canvas.rectangle(box, entry.colour, FRAME)
        canvas.text(left + round(1.4 * self.swatch), top, entry.text, self.text)
