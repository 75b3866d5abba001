"""What a comparison found: as a table, as JSON, and as a picture of accuracy over cost."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pmvit.evaluation import Evaluation
from pmvit.evaluation.segmentation import SegmentationEvaluation
from pmvit.files import write_atomically, write_text
from pmvit.runtime.bench.run import Row

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#555555")
MARKS = "os^Dv<>P"


@dataclass(frozen=True)
class Compared:
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
    speeds: tuple[Row, ...] = ()
    exports: bool | None = None
    failure: str | None = None

    @property
    def quality(self) -> float | None:
        """What stands for how good it is: top-1 or mIoU; without labels agreement, or cosine without classes."""
        found = self.evaluation
        if isinstance(found, SegmentationEvaluation):
            return found.agreement if found.miou is None else found.miou
        if found is None:
            return None
        return next((value for value in (found.top1, found.agreement, found.cosine) if value is not None), None)


@dataclass(frozen=True)
class Comparison:
    """All methods on the same images, and where their speed was measured."""

    rows: list[Compared]
    environment: dict[str, Any] = field(default_factory=dict)

    def columns(self) -> list[str]:
        """The heads of the table: what was measured."""
        names = [name for name, _ in self._measures()]
        return [
            "method",
            "GFLOPs",
            *names,
            *(f"{runtime}, batch {batch}" for runtime, batch in self._places()),
            "exports",
        ]

    def cells(self) -> list[list[str]]:
        """The rows as text, under `columns`; a speed is a number of times that of the original."""
        return [self._cells_of(row) for row in self.rows]

    def _cells_of(self, row: Compared) -> list[str]:
        cells = [row.name, "-" if row.gflops is None else f"{row.gflops:.3f}"]
        if row.evaluation is None:
            return [*cells, f"nothing: {row.failure}", *[""] * (len(self.columns()) - 3)]
        measured = asdict(row.evaluation)
        for _, attribute in self._measures():
            value = measured[attribute]
            form = "{:.4f}" if attribute in ("kl", "cosine") else "{:.1%}"
            cells.append("-" if value is None else form.format(value))
        speeds = {(speed.runtime, speed.batch): speed for speed in row.speeds}
        for place in self._places():
            speed = speeds.get(place)
            cells.append("does not run" if speed is None or speed.speedup is None else str(speed.speedup))
        return [*cells, {None: "-", True: "yes", False: "no"}[row.exports]]

    def _measures(self) -> list[tuple[str, str]]:
        """What was measured of any model: the head of its column and the attribute."""
        known = {"top1": "top-1", "miou": "mIoU", "agreement": "agreement", "kl": "KL", "cosine": "cosine"}
        found = [asdict(row.evaluation) for row in self.rows if row.evaluation is not None]
        return [(title, name) for name, title in known.items() if any(one.get(name) is not None for one in found)]

    def _places(self) -> list[tuple[str, int]]:
        return list(dict.fromkeys((speed.runtime, speed.batch) for row in self.rows for speed in row.speeds))

    def to_json(self) -> str:
        return (
            json.dumps({"environment": self.environment, "rows": [asdict(row) for row in self.rows]}, indent=1) + "\n"
        )

    def to_markdown(self) -> str:
        said = ", ".join(f"{name} {value}" for name, value in self.environment.items())
        lines = [f"| {' | '.join(self.columns())} |", f"|{'---|' * len(self.columns())}"]
        lines += [f"| {' | '.join(cells)} |" for cells in self.cells()]
        return "\n".join([f"{said}.", "", *lines] if said else lines) + "\n"

    def write(self, folder: Path) -> None:
        """Write `comparison.json`, `comparison.md` and `comparison.png`."""
        write_text(folder / "comparison.json", self.to_json())
        write_text(folder / "comparison.md", self.to_markdown())
        write_atomically(folder / "comparison.png", self.draw)

    def front(self) -> list[Compared]:
        """Those that no other one beats in both cost and quality, from the cheapest on."""
        measured = [row for row in self.rows if row.gflops is not None and row.quality is not None]
        found: list[Compared] = []
        for row in sorted(measured, key=lambda row: (row.gflops, -(row.quality or 0.0))):
            if not found or (row.quality or 0.0) > (found[-1].quality or 0.0):
                found.append(row)
        return found

    def draw(self, path: Path) -> None:
        """Quality over GFLOPs, a line for each method; the Pareto front is grey behind them.

        What is nowhere half as good as the best is named and not drawn: the others could not be told apart beside it.
        """
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7.2, 4.6), layout="constrained")
        FigureCanvasAgg(figure)
        axis: Any = figure.subplots()
        front = self.front()
        axis.step([row.gflops for row in front], [row.quality for row in front], where="post", color="#cccccc", lw=5)
        kinds: dict[str, list[Compared]] = {}
        for row in self.rows:
            if row.gflops is not None and row.quality is not None:
                kinds.setdefault(row.name if row.method == "given" else row.method, []).append(row)
        best = {name: max(row.quality or 0.0 for row in rows) for name, rows in kinds.items()}
        far = [name for name, quality in best.items() if quality < max(best.values()) / 2]
        if far:
            axis.set_title(f"below the chart: {', '.join(far)}", loc="left", fontsize=9)
        for number, (name, rows) in enumerate(kinds.items()):
            if name in far:
                continue
            ordered = sorted(rows, key=lambda row: row.gflops or 0.0)
            points = [row.gflops for row in ordered], [row.quality for row in ordered]
            mark, colour = MARKS[number // 8 % 8], COLOURS[number % 8]
            axis.plot(*points, marker=mark, color="black" if name == "original" else colour, label=name)
        measures = [title for title, _ in self._measures()]
        axis.set(xlabel="GFLOPs (MACs) an image", ylabel=measures[0] if measures else "")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
        figure.savefig(path, format="png", dpi=110)
