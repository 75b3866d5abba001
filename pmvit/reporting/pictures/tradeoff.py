"""Quality against cost, as curves: a panel for each cost, a line for each method, the original as a star."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pmvit.errors import PmvitError
from pmvit.files import write_atomically
from pmvit.numbers.estimates import Estimate
from pmvit.numbers.measures import MEASURES
from pmvit.reporting.pictures.colours import BLUE, GREEN, ORANGE, PURPLE, SKY_BLUE, VERMILLION

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ORIGINAL = "original"
TUNED = "tuned"
COSTS = {"gflops": "GFLOPs (MACs)", "fps": "images a second"}
COLOURS = tuple(
    f"#{red:02x}{green:02x}{blue:02x}" for red, green, blue in (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY_BLUE)
)
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
    """Check rows and make points of them.

    Raises:
        PmvitError: That says which row has what it should not, or what no row has.
    """
    points = []
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise PmvitError(f"row {number}: expected an object with name, {quality} and costs; got {row!r}")
        name, stage, keep = row.get("name"), row.get("stage"), row.get("keep")
        if not isinstance(name, str):
            raise PmvitError(f"row {number}: expected the name of a method, got {name!r}")
        where = f"row {number} ({name})"
        measured = _measured(row, quality, where)
        if measured is None:
            raise PmvitError(f"{where}: expected a number for {quality}, got none")
        if keep is not None:
            _number(keep, "keep", where)
        found = {cost: value for cost in costs if (value := _measured(row, cost, where)) is not None}
        points.append(Point(name, stage, keep, measured, found))
    if not points:
        raise PmvitError("expected rows to draw, got none")
    for cost in costs:
        if not any(cost in point.costs for point in points):
            raise PmvitError(f"expected {cost} in some row to draw {quality} against it; none of {len(points)} has it")
    return points


def _measured(row: Mapping[str, Any], key: str, where: str) -> Estimate | None:
    if row.get(key) is None:
        return None
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
) -> "Figure":
    """Draw quality against each of the costs; what `draw_tradeoff` writes."""
    from matplotlib.figure import Figure

    points = read_rows(rows, quality, costs)
    figure = Figure(figsize=(5.2 * len(costs), 4.4), layout="constrained")
    panels = figure.subplots(1, len(costs), sharey=True, squeeze=False)[0]
    for axes, cost in zip(panels, costs, strict=True):
        _draw_panel(axes, [point for point in points if cost in point.costs], cost)
        axes.set_xlabel(_axis_title(cost))
    panels[0].set_ylabel(_axis_title(quality))
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 3), frameon=False)
    return figure


def _axis_title(name: str) -> str:
    return MEASURES[name].axis_title if name in MEASURES else COSTS.get(name, name)


def _draw_panel(axes: "Axes", points: Sequence[Point], cost: str) -> None:
    lines: dict[tuple[str, str | None], list[Point]] = {}
    for point in sorted(points, key=lambda point: (point.keep or 0, point.costs[cost].value)):
        lines.setdefault((point.name, point.stage), []).append(point)
    methods = [key for key in dict.fromkeys((p.name, p.stage) for p in points) if not _is_original(lines[key][0])]
    names = list(dict.fromkeys(name for name, _ in methods))
    several_stages = len({stage for _, stage in methods}) > 1
    for line in lines.values():
        if _is_original(line[0]):
            axes.axhline(line[0].quality.value, color="black", linestyle=":", linewidth=1)
            _draw_line(axes, line, cost, color="black", linestyle="none", marker="*", markersize=12, label=ORIGINAL)
    for name, stage in methods:
        place = names.index(name)
        colour, tuned = COLOURS[place % len(COLOURS)], stage in (TUNED, None)
        style = {"linestyle": "-" if tuned else "--", "markerfacecolor": colour if tuned else "white"}
        label = f"{name}, {stage}" if several_stages else name
        marker = MARKERS[place % len(MARKERS)]
        line = lines[name, stage]
        _draw_line(axes, line, cost, color=colour, marker=marker, label=label, **style)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    _label_points(axes, [lines[key] for key in methods], cost)


def _label_points(axes: "Axes", lines: Sequence[Sequence[Point]], cost: str) -> None:
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


def _draw_line(axes: "Axes", line: Sequence[Point], cost: str, **style: Any) -> None:
    across, upwards = [point.costs[cost] for point in line], [point.quality for point in line]
    x, y = ([measured.value for measured in side] for side in (across, upwards))
    axes.errorbar(x, y, xerr=_bars(across), yerr=_bars(upwards), elinewidth=1, **style)


def _bars(measured: Sequence[Estimate]) -> list[list[float]]:
    """How far the intervals reach to both sides, as matplotlib wants it."""
    return [[m.value - m.low for m in measured], [m.high - m.value for m in measured]]


def _is_original(point: Point) -> bool:
    return ORIGINAL in (point.stage, point.name)


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
