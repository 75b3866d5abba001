"""Quality against cost, as curves: a panel for each cost, a line for each method, the original as a star."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pmvit.errors import PmvitError
from pmvit.files import write_atomically
from pmvit.numbers.colours import BLUE, GREEN, ORANGE, PURPLE, SKY_BLUE, VERMILLION, to_hex
from pmvit.numbers.estimates import Estimate
from pmvit.numbers.measures import MEASURES

ORIGINAL, TUNED = "original", "tuned"
COSTS = {"gflops": "GFLOPs (MACs)", "fps": "images a second"}
COLOURS = tuple(map(to_hex, (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY_BLUE)))
MARKERS = "os^Dvp"
TOO_CLOSE = 25  # pixels between points that share a label


class Point(NamedTuple):
    """A row, checked: quality and the costs it has, shares in percent."""

    name: str
    stage: str | None
    keep: float | None
    quality: Estimate
    costs: dict[str, Estimate]


def read_rows(rows: Iterable[Mapping[str, Any]], quality: str, costs: Sequence[str]) -> list[Point]:
    """Check rows and make points of them; a `PmvitError` says which row has what it should not, or what no row has."""
    points = []
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise PmvitError(f"row {number}: expected an object with name, {quality} and costs; got {row!r}")
        name, stage, keep = row.get("name"), row.get("stage"), row.get("keep")
        if not isinstance(name, str):
            raise PmvitError(f"row {number}: expected the name of a method, got {name!r}")
        where = f"row {number} ({name})"
        if row.get(quality) is None:
            raise PmvitError(f"{where}: expected a number for {quality}, got none")
        if keep is not None:
            _number(keep, "keep", where)
        found = {key: _measured(row, key, where) for key in (quality, *costs) if row.get(key) is not None}
        points.append(Point(name, stage, keep, found[quality], found))
    if not points:
        raise PmvitError("expected rows to draw, got none")
    for cost in costs:
        if not any(cost in point.costs for point in points):
            raise PmvitError(f"expected {cost} in some row to draw {quality} against it; none of {len(points)} has it")
    return points


def _measured(row: Mapping[str, Any], key: str, where: str) -> Estimate:
    value = _number(row[key], key, where)
    ends = [row.get(f"{key}_{end}") for end in ("low", "high")]
    low, high = (value if end is None else _number(end, f"the interval of {key}", where) for end in ends)
    if not low <= value <= high:
        raise PmvitError(f"{where}: expected {key} within its interval, {low} to {high}; got {value}")
    factor = MEASURES[key].factor if key in MEASURES else 1
    return Estimate(factor * value, factor * low, factor * high)


def _number(value: Any, what: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise PmvitError(f"{where}: expected a number for {what}, got {value!r}")
    return float(value)


def tradeoff_figure(
    rows: Iterable[Mapping[str, Any]], *, quality: str = "miou", costs: Sequence[str] = ("gflops", "fps")
) -> Figure:
    """Draw quality against each of the costs; what `draw_tradeoff` writes."""
    points = read_rows(rows, quality, costs)
    titles = {**COSTS, **{name: measure.axis_title for name, measure in MEASURES.items()}}
    figure = Figure(figsize=(5.2 * len(costs), 4.4), layout="constrained")
    panels = figure.subplots(1, len(costs), sharey=True, squeeze=False)[0]
    for axes, cost in zip(panels, costs, strict=True):
        _draw_panel(axes, [point for point in points if cost in point.costs], cost)
        axes.set_xlabel(titles.get(cost, cost))
    panels[0].set_ylabel(titles.get(quality, quality))
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 3), frameon=False)
    return figure


def _draw_panel(axes: Axes, points: Sequence[Point], cost: str) -> None:
    lines: dict[tuple[str, str | None], list[Point]] = {(point.name, point.stage): [] for point in points}
    for point in sorted(points, key=lambda point: (point.keep or 0, point.costs[cost].value)):
        lines[point.name, point.stage].append(point)
    methods = {key: line for key, line in lines.items() if ORIGINAL not in key}
    names = list(dict.fromkeys(name for name, _ in methods))
    several_stages = len({stage for _, stage in methods}) > 1
    for (name, stage), line in sorted(lines.items(), key=lambda item: item[0] in methods):  # the original first
        if (name, stage) in methods:
            place, is_tuned = names.index(name), stage in (TUNED, None)
            colour = COLOURS[place % len(COLOURS)]
            style: dict[str, Any] = {"color": colour, "marker": MARKERS[place % len(MARKERS)]}
            style |= {"linestyle": "-", "mfc": colour} if is_tuned else {"linestyle": "--", "mfc": "white"}
            style |= {"label": f"{name}, {stage}" if several_stages else name}
        else:
            axes.axhline(line[0].quality.value, color="black", linestyle=":", linewidth=1)
            style = {"color": "black", "linestyle": "none", "marker": "*", "ms": 12, "label": ORIGINAL}
        (x, xerr), (y, yerr) = (_bars([point.costs[cost] for point in line]), _bars([point.quality for point in line]))
        axes.errorbar(x, y, xerr=xerr, yerr=yerr, elinewidth=1, **style)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    _label_points(axes, list(methods.values()), cost)


def _bars(measured: Sequence[Estimate]) -> tuple[list[float], list[list[float]]]:
    """Values, and how far their intervals reach to both sides, as matplotlib wants it."""
    values = [one.value for one in measured]
    return values, [[one.value - one.low for one in measured], [one.high - one.value for one in measured]]


def _label_points(axes: Axes, lines: Sequence[Sequence[Point]], cost: str) -> None:
    """Write `keep` beside the points; once where points of the same share are close to each other."""
    axes.autoscale_view()
    written: list[tuple[float, float, float]] = []
    for line in lines:
        rises = (line[0].costs[cost].value < line[-1].costs[cost].value) == (line[0].quality < line[-1].quality)
        for point in line:
            at = (point.costs[cost].value, point.quality.value)
            x, y = axes.transData.transform(at)
            near = [keep for left, top, keep in written if math.hypot(x - left, y - top) < TOO_CLOSE]
            if point.keep is not None and point.keep not in near:
                written.append((x, y, point.keep))
                aside = (5, -11) if rises else (5, 4)
                axes.annotate(f"{point.keep:g}", at, aside, textcoords="offset points", color="0.3", size=8)


def draw_tradeoff(
    rows: Iterable[Mapping[str, Any]],
    output: str | Path,
    *,
    quality: str = "miou",
    costs: Sequence[str] = ("gflops", "fps"),
) -> Path:
    """Draw how quality falls as cost does, one line a method, as a PNG.

    Args:
        rows: One object a measured model: `name` of the method, optionally `stage` (`original`, `compressed`, `tuned`:
            each its own line) and `keep` (written beside its point); the quality and the costs by their names, with
            their intervals in `NAME_low` and `NAME_high`. A row without a cost is left out of its panel.
        output: The file to write.
        quality: What is drawn upwards: `miou`, `top1` or any other number of the rows. Shares are shown in percent.
        costs: What is drawn across, a panel each.

    Raises:
        PmvitError: If a row is not what it should be; the message says which and why.
    """
    figure = tradeoff_figure(rows, quality=quality, costs=costs)
    path = Path(output)
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png", dpi=120))
    return path
