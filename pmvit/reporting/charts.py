"""Small charts as SVG, coloured by the style sheet of the page so that they follow its theme."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH, HEIGHT = 440, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 12, 40
COLOURS = 8  # classes c0 ... c7 of the style sheet


@dataclass(frozen=True)
class Series:
    """Points with one name: joined by a line, marked, or both."""

    name: str
    points: Sequence[tuple[float, float]]
    titles: Sequence[str] = ()
    colour: int | None = 0  # None is ink
    line: bool = True
    marks: bool = False
    bars: Sequence[tuple[float, float]] = ()  # the interval of each point


@dataclass(frozen=True)
class Chart:
    """A chart to be put on a page: the drawing, and the names that go with its colours."""

    title: str
    svg: Markup
    legend: list[tuple[str, str]]


def line_chart(title: str, series: Sequence[Series], x: str, y: str, *, zero: bool = False) -> Chart:
    """Draw series over a common pair of axes.

    Args:
        title: Of the chart.
        series: What to draw; the first one lies below the others.
        x: What goes to the right.
        y: What goes upwards.
        zero: Whether the upward axis begins at zero.
    """
    xs = [point[0] for one in series for point in one.points]
    ys = [value for one in series for values in (_column(one.points, 1), *map(list, one.bars)) for value in values]
    ys += [0.0] if zero else []
    across, upwards = Axis.around(xs, WIDTH - LEFT - RIGHT), Axis.around(ys, HEIGHT - TOP - BOTTOM)
    parts = [_grid(across, upwards)]
    parts += [_series(one, across, upwards) for one in series]
    parts.append(f'<text class="axis" x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 4}">{escape(x)}</text>')
    turned = f"translate(11 {(TOP + HEIGHT - BOTTOM) / 2:.0f}) rotate(-90)"
    parts.append(f'<text class="axis" transform="{turned}">{escape(y)}</text>')
    label = escape(f"{title}: {y} over {x}, {', '.join(one.name for one in series)}")
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
    return Chart(title, Markup(svg), [(one.name, _colour(one)) for one in series])  # noqa: S704  # every text is escaped


@dataclass(frozen=True)
class Axis:
    """From numbers to pixels, with round numbers to mark."""

    low: float
    high: float
    step: float
    length: int

    @staticmethod
    def around(values: Sequence[float], length: int) -> "Axis":
        low, high = min(values), max(values)
        if high - low < 1e-9:
            margin = abs(high) * 0.1 or 1.0
            low, high = low - margin, high + margin
        rough = (high - low) / 4
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
        return Axis(math.floor(low / step + 1e-6) * step, math.ceil(high / step - 1e-6) * step, step, length)

    def at(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low) * self.length

    def ticks(self) -> list[float]:
        return [self.low + number * self.step for number in range(round((self.high - self.low) / self.step) + 1)]

    def label(self, value: float) -> str:
        digits = max(0, -math.floor(math.log10(self.step) + 1e-9) + (1 if f"{self.step:e}".startswith("2.5") else 0))
        return f"{value:,.{digits}f}" if digits < 5 else f"{value:g}"


def _place(point: tuple[float, float], across: Axis, upwards: Axis) -> tuple[float, float]:
    return LEFT + across.at(point[0]), HEIGHT - BOTTOM - upwards.at(point[1])


def _grid(across: Axis, upwards: Axis) -> str:
    parts = []
    for value in upwards.ticks():
        y = HEIGHT - BOTTOM - upwards.at(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick end" x="{LEFT - 6}" y="{y + 4:.1f}">{upwards.label(value)}</text>')
    for value in across.ticks():
        x = LEFT + across.at(value)
        parts.append(f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}">{across.label(value)}</text>')
    return "".join(parts)


def _series(series: Series, across: Axis, upwards: Axis) -> str:
    places = [_place(point, across, upwards) for point in series.points]
    colour, parts = _colour(series), []
    if series.line and len(places) > 1:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline class="line {colour}" points="{path}"/>')
    for (x, _), (low, high) in zip(places, series.bars, strict=False):
        ends = [HEIGHT - BOTTOM - upwards.at(end) for end in (low, high)]
        parts.append(f'<line class="bar {colour}" x1="{x:.1f}" x2="{x:.1f}" y1="{ends[0]:.1f}" y2="{ends[1]:.1f}"/>')
    if series.marks or len(places) == 1:
        titles = series.titles or [series.name] * len(places)
        for (x, y), title in zip(places, titles, strict=True):
            dot = f'<circle class="mark {colour}" cx="{x:.1f}" cy="{y:.1f}" r="4.5">'
            parts.append(f"{dot}<title>{escape(title)}</title></circle>")
    return "".join(parts)


def _colour(series: Series) -> str:
    return "ink" if series.colour is None else f"c{series.colour % COLOURS}"


def _column(points: Sequence[tuple[float, float]], place: int) -> list[float]:
    return [point[place] for point in points]
