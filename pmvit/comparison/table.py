"""What a comparison found: as a table, as JSON, and as a picture of accuracy over cost."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pmvit.evaluation.classification import Evaluation
from pmvit.evaluation.segmentation import SegmentationEvaluation
from pmvit.numbers.colours import LINES
from pmvit.numbers.measures import MEASURES, main_measure
from pmvit.numbers.tables import NOT_MEASURED, Results, format_number
from pmvit.runtime.bench.table import BenchmarkRow

MARKS = "os^Dv<>P"
COLUMNS = ("top1", "miou", "agreement", "kl", "cosine")


@dataclass(frozen=True)
class ComparisonRow:
    """One method at one cost.

    Attributes:
        name: In the table; no two have the same.
        method: What made it: a name that `compare` takes, `original` or `given`.
        options: Of the method.
        wanted: GFLOPs that were asked for.
        gflops: Those that it has, counted as it runs.
        parameters: How many it has.
        evaluation: How good it is.
        speeds: How fast, in each runtime and at each batch size.
        exports: Whether it is a static graph for any batch size, as runtimes take it.
        failure: Why there is nothing of it, or why it is not exported.
    """

    name: str
    method: str
    options: dict[str, Any] = field(default_factory=dict)
    wanted: float | None = None
    gflops: float | None = None
    parameters: int | None = None
    evaluation: Evaluation | SegmentationEvaluation | None = None
    speeds: tuple[BenchmarkRow, ...] = ()
    exports: bool | None = None
    failure: str | None = None

    @property
    def quality(self) -> float | None:
        """How good it is by the main measure of its evaluation; more is better."""
        return None if self.evaluation is None else self.evaluation.quality


@dataclass(frozen=True)
class Comparison(Results):
    """All methods on the same images, and where their speed was measured."""

    rows: list[ComparisonRow]
    name: ClassVar = "comparison"

    def columns(self) -> list[str]:
        measures = [MEASURES[name].title for name in self._measures()]
        return ["method", "GFLOPs", *measures, *(f"{runtime}, batch {n}" for runtime, n in self._settings()), "exports"]

    def cells(self) -> list[list[str]]:
        """The rows as text, under `columns`; a speed is a number of times that of the original."""
        return [self._cells_of(row) for row in self.rows]

    def _cells_of(self, row: ComparisonRow) -> list[str]:
        cells = [row.name, format_number(row.gflops, ".3f")]
        if row.evaluation is None:
            return [*cells, f"nothing: {row.failure}", *[""] * (len(self.columns()) - 3)]
        measured = vars(row.evaluation)
        cells += [MEASURES[name].text(measured[name]) for name in self._measures()]
        speeds = {(speed.runtime, speed.batch): speed.speedup for speed in row.speeds}
        cells += [str(speeds.get(setting) or "does not run") for setting in self._settings()]
        return [*cells, {None: NOT_MEASURED, True: "yes", False: "no"}[row.exports]]

    def _measures(self) -> list[str]:
        """What was measured of any model."""
        found = [vars(row.evaluation) for row in self.rows if row.evaluation is not None]
        return [name for name in COLUMNS if any(one.get(name) is not None for one in found)]

    def _settings(self) -> list[tuple[str, int]]:
        """Runtimes and batch sizes."""
        return list(dict.fromkeys((speed.runtime, speed.batch) for row in self.rows for speed in row.speeds))

    def front(self) -> list[ComparisonRow]:
        """Those that no other one beats in both cost and quality, from the cheapest on."""
        found: list[ComparisonRow] = []
        for row in sorted(self._measured(), key=lambda row: (row.gflops, -row.quality)):
            if not found or row.quality > found[-1].quality:
                found.append(row)
        return found

    def _measured(self) -> list[Any]:
        """The rows that have a cost and a quality."""
        return [row for row in self.rows if row.gflops is not None and row.quality is not None]

    def draw(self, path: Path) -> None:
        """Quality over GFLOPs, a line for each method; the Pareto front is grey behind them.

        What is nowhere half as good as the best is named and not drawn: the others could not be told apart beside it.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7.2, 4.6), layout="constrained")
        axis: Any = figure.subplots()
        kinds: dict[str, list[Any]] = {}
        for row in sorted(self._measured(), key=lambda row: row.gflops):
            kinds.setdefault(row.name if row.method == "given" else row.method, []).append(row)
        name = next((main_measure(vars(row.evaluation)) for row in self._measured()), None)
        measure = MEASURES[name or COLUMNS[0]]
        factor = -1 if name == "kl" else measure.factor  # a divergence is drawn as it is, the axis turned over

        def points(rows: list[Any]) -> tuple[list[float], list[float]]:
            return [row.gflops for row in rows], [factor * row.quality for row in rows]

        best = {kind: max(row.quality for row in rows) for kind, rows in kinds.items()}
        far = [kind for kind, quality in best.items() if measure.is_share and quality < max(best.values()) / 2]
        if far:
            axis.set_title(f"below the chart: {', '.join(far)}", loc="left", fontsize=9)
        axis.step(*points(self.front()), where="post", color="#cccccc", lw=5)
        for number, (kind, rows) in enumerate(kinds.items()):
            if kind not in far:
                colour = "black" if kind == "original" else LINES[number % len(LINES)]
                axis.plot(*points(rows), marker=MARKS[number // len(LINES) % len(MARKS)], color=colour, label=kind)
        axis.set(xlabel="GFLOPs (MACs) an image", ylabel=measure.axis_title)
        if name == "kl":
            axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
        figure.savefig(path, format="png", dpi=110)
