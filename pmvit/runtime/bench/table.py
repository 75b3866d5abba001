"""What a benchmark found: as a table, as JSON and as bars."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pmvit.numbers.colours import LINES
from pmvit.numbers.estimates import Estimate
from pmvit.numbers.tables import NOT_MEASURED, Results, format_number


@dataclass(frozen=True)
class BenchmarkRow:
    """One variant in one runtime at one batch size."""

    variant: str
    runtime: str
    batch: int
    gflops: float | None  # billions of multiply-accumulates of what runs, for one image
    throughput: float | None = None  # images a second, at the median
    p50: float | None = None  # seconds a batch, median
    p95: float | None = None  # seconds a batch, 95th percentile
    speedup: Estimate | None = None  # how many times faster than the original, in the same rounds
    of_bound: Estimate | None = None  # how many times faster than the equal-token bound, in the same rounds
    efficiency: float | None = None  # speed-up over FLOPs ratio: how much of what is not computed is time not spent
    memory: float | None = None  # peak in megabytes, over what the process had before; `None` if it was not measured
    failure: str | None = None  # why it did not run


@dataclass(frozen=True)
class Benchmark(Results):
    """Rows, and where they were measured."""

    rows: list[BenchmarkRow]
    name: ClassVar = "benchmark"
    note: ClassVar = (
        "Ratios are medians over rounds in which all variants of a runtime take turns, with 95 % bootstrap intervals."
    )

    def columns(self) -> list[str]:
        times = ["images/s", "p50 ms", "p95 ms", "speed-up", "of bound"]
        return ["runtime", "batch", "variant", "GFLOPs", *times, "efficiency", "MB"]

    def cells(self) -> list[list[str]]:
        """The rows as text; a variant that did not run says why in place of its speed-up."""
        table = []
        for row in self.rows:
            times = [None if seconds is None else 1e3 * seconds for seconds in (row.p50, row.p95)]
            speedup = str(row.speedup) if row.failure is None else f"does not run: {row.failure}"
            cells = [row.runtime, str(row.batch), row.variant, format_number(row.gflops, ".2f")]
            cells += [format_number(value, ".1f") for value in (row.throughput, *times)]
            cells += [speedup, str(row.of_bound or NOT_MEASURED), format_number(row.efficiency, ".2f")]
            table.append([*cells, format_number(row.memory, ".0f")])
        return table

    def draw(self, path: Path) -> None:
        """Speed-ups as bars with their intervals, one panel a runtime."""
        import numpy as np
        from matplotlib.figure import Figure

        runtimes = list(dict.fromkeys(row.runtime for row in self.rows))
        names = list(dict.fromkeys(row.variant for row in self.rows if row.variant != "original"))
        batches = sorted({row.batch for row in self.rows})
        figure = Figure(figsize=(2 + 3.4 * len(runtimes), 4.2), layout="constrained")
        axes = figure.subplots(1, len(runtimes), sharey=True, squeeze=False)[0]
        width = 0.8 / max(1, len(names))
        for axis, runtime in zip(axes, runtimes, strict=True):
            for index, name in enumerate(names):
                rows = [row for row in self.rows if (row.runtime, row.variant) == (runtime, name) and row.speedup]
                places = [batches.index(row.batch) + (index - (len(names) - 1) / 2) * width for row in rows]
                value, low, high = np.array([row.speedup for row in rows]).reshape(-1, 3).T
                style = {"capsize": 2, "label": name, "color": LINES[index % len(LINES)]}
                axis.bar(places, value, width * 0.92, yerr=[value - low, high - value], **style)
            axis.axhline(1.0, color="black", linewidth=0.8)
            axis.set(title=runtime, xticks=range(len(batches)), xticklabels=[f"batch {batch}" for batch in batches])
            axis.spines[["top", "right"]].set_visible(False)
        axes[0].set_ylabel("times as fast as the original")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(names), frameon=False)
        figure.savefig(path, format="png", dpi=110)


def rows_of(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a benchmark that was written as JSON; version 0.1 called a variant a contender."""
    return [{"variant": row.get("contender"), **row} for row in document.get("rows", ())]
