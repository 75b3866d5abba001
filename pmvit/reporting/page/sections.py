"""The parts of a report: measurements as tables, charts and sentences."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pmvit.errors import PmvitError
from pmvit.evaluation.estimates import wilson
from pmvit.evaluation.measures import MEASURES, QUALITIES, main_measure
from pmvit.evaluation.tables import format_number
from pmvit.reporting.page import wording
from pmvit.reporting.pictures.charts import Chart, Series, line_chart

Json = dict[str, Any]


@dataclass(frozen=True)
class Card:
    """One number that matters, and what it was before."""

    title: str
    value: str
    details: tuple[str, ...]


@dataclass(frozen=True)
class Cell:
    """A cell of a table: a number, and its interval in smaller print."""

    text: str
    aside: str = ""


@dataclass(frozen=True)
class Table:
    """Cells under their heads; the first column names the rows."""

    head: tuple[str, ...]
    rows: list[list[Cell]]
    note: str = ""


@dataclass(frozen=True)
class Section:
    """A part of the page. What it has nothing for, `missing` says how to get."""

    tables: list[Table] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    missing: str = ""


def accuracy_table(evaluation: Json, stages: Sequence[str]) -> Table:
    """Before, after and the difference, of a `PairedEvaluation`."""
    rows = []
    for one in evaluation["measures"]:
        name, before, after, change = (one.get(key) for key in ("name", "original", "compressed", "difference"))
        cells = [Cell(wording.TITLES.get(name, name))]
        for value in (before, after):
            cells.append(
                Cell("–") if value is None else Cell(wording.number(name, value[0]), wording.interval(name, value))
            )
        if change is not None:
            cells.append(Cell(wording.change(name, change[0]), wording.change_interval(name, change)))
        rows.append(cells if change is not None else [*cells, Cell("–")])
    broken = f" {evaluation['broken']} could not be read and were left out." if evaluation["broken"] else ""
    note = (
        f"{evaluation['images']:,} images, both models on the same ones.{broken} In small print 95 % intervals: "
        "Wilson's for shares of images, bootstrap over images for the rest; differences are paired."
    )
    return Table(("", *stages, "difference"), rows, note)


def from_evaluate(document: Json, where: str) -> Json:
    """What `pmvit evaluate --json` printed, as a `PairedEvaluation` without paired intervals."""
    images = document.get("images")
    if not isinstance(images, int) or images < 1 or not ({"top1", "miou", "cosine"} & set(document)):
        got = ", ".join(document) or "nothing"
        raise PmvitError(f"{where}: expected what `pmvit evaluate --json` prints; got {got}")
    measures = []
    for name in wording.TITLES:
        value, before = document.get(name), document.get(f"reference_{name}")
        if value is not None:
            estimates = [None if v is None else _with_interval(name, v, images) for v in (before, value)]
            change = None if before is None else (value - before, None, None)
            measures.append({"name": name, "original": estimates[0], "compressed": estimates[1], "difference": change})
    return {"images": images, "broken": document.get("broken", 0), "measures": measures}


def _with_interval(name: str, value: float, images: int) -> Sequence[float | None]:
    return wilson(value, images) if MEASURES[name].counts_images else (value, None, None)


def stages_table(stages: Json) -> Table:
    """What `pmvit run` measured of the original, the compressed and the tuned model."""
    names = [name for name in wording.TITLES if any(row.get(name) is not None for row in stages.values())]
    rows = [[Cell("GFLOPs"), *(Cell(format_number(row["gflops"], ".3f")) for row in stages.values())]]
    for name in names:
        cells = [Cell(wording.TITLES[name])]
        for row in stages.values():
            value = row.get(name)
            if value is None:
                cells.append(Cell("–"))
                continue
            estimate = _with_interval(name, value, row["images"])
            cells.append(Cell(wording.number(name, value), wording.interval(name, estimate)))  # type: ignore[arg-type]
        rows.append(cells)
    images = next(iter(stages.values()))["images"]
    return Table(("", *stages), rows, f"As `pmvit run` measured it on {images:,} images.")


def speed_table(benchmark: Json) -> Table:
    """Speed of all variants in all runtimes and batch sizes."""
    rows = []
    for row in benchmark["rows"]:
        name = wording.VARIANTS.get(row["variant"], row["variant"])
        cells = [Cell(name, f"{row['runtime']}, batch {row['batch']}")]
        if row.get("speedup") is None:
            rows.append([*cells, Cell("does not run", str(row.get("failure") or "")), Cell("–"), Cell("–")])
            continue
        ratio = row["speedup"]
        is_base = row["variant"] == "original"
        speed = Cell("1") if is_base else Cell(wording.times(ratio), wording.times_interval(ratio))
        median = Cell(f"{format_number(1e3 * row['p50'], ',.1f')} ms")
        rows.append([*cells, Cell(format_number(row["throughput"], ",.1f")), median, speed])
    said = ", ".join(f"{name} {value}" for name, value in benchmark.get("environment", {}).items())
    note = f"All take turns in one run; ratios are medians over the rounds, with 95 % bootstrap intervals. {said}."
    return Table(("", "images a second", "median", "speed"), rows, note)


def cards(costs: tuple[float, float], evaluation: Json | None, speed: Json | None) -> list[Card]:
    """Cost, quality and speed in a few large numbers."""
    before, after = costs
    made = [Card("Cost", f"{after:.3g} GFLOPs", (f"{before:.3g} before", f"{100 * (1 - after / before):.0f} % less"))]
    measures = {one["name"]: one for one in (evaluation or {}).get("measures", ())}
    headline = main_measure(measures)
    for name in dict.fromkeys((headline or "", "agreement")):
        if name in measures:
            one = measures[name]
            details: tuple[str, ...] = ()
            if one["original"] is not None:
                details = (f"{wording.number(name, one['original'][0])} before",)
            if one["difference"] is not None:
                ends = wording.change_interval(name, one["difference"])
                details += (wording.change(name, one["difference"][0]) + (f" [{ends}]" if ends else ""),)
            else:
                details += (f"[{wording.interval(name, one['compressed'])}]",)
            made.append(Card(wording.TITLES[name], wording.number(name, one["compressed"][0]), details))
    if (best := _best_speed(speed)) is not None:
        where = f"{best['runtime']}, batch {best['batch']}"
        ratio = best["speedup"]
        made.append(Card("Speed", wording.times(ratio), (f"[{wording.times_interval(ratio)}]", where)))
    return made


def _best_speed(speed: Json | None) -> Any:
    """The compressed model as one would deploy it, at the largest batch of the first runtime."""
    rows = [row for row in (speed or {}).get("rows", ()) if row.get("speedup") is not None]
    for name in ("optimized", "compressed"):
        found = [row for row in rows if row["variant"] == name and row["runtime"] == rows[0]["runtime"]]
        if found:
            return max(found, key=lambda row: row["batch"])
    return None


def curves(metrics: list[Json]) -> list[Chart]:
    """Loss, validation and learning rate of fine-tuning."""
    steps = [line for line in metrics if "loss" in line]
    epochs = [line for line in metrics if line.get("kind") == "epoch"]
    losses = {"loss": "loss", "ce": "cross-entropy", "kl": "KL from the original", "cosine": "cosine distance"}
    made = []
    series = _over_steps(steps, {**losses, "tokens": "tokens"})
    if series:
        made.append(line_chart("Training loss", series, "step", "loss", zero=True))
    for name in QUALITIES:
        factor = 100 if name in wording.IN_PERCENT else 1
        points = [(line["epoch"], factor * line[name]) for line in epochs if line.get(name) is not None]
        if points:
            unit = f"{wording.TITLES[name]}{' (%)' if factor == 100 else ''}"
            one = Series(wording.TITLES[name], points, [f"epoch {x:g}: {y:.2f}" for x, y in points], 2)
            made.append(line_chart("Validation", [one], "epoch", unit))
            break
    rates = _over_steps(steps, {"lr": "weights", "matrix_lr": "M and R"}, scale=1e4)
    if rates:
        made.append(line_chart("Learning rate", rates, "step", "learning rate × 10⁴", zero=True))
    return made


def _over_steps(steps: list[Json], names: dict[str, str], scale: float = 1.0) -> list[Series]:
    made = []
    for number, (name, title) in enumerate(names.items()):
        points = [(line["step"], scale * line[name]) for line in steps if line.get(name) is not None]
        if len(points) > 1:
            made.append(Series(title, thinned(points), colour=number))
    return made


def thinned(points: list[tuple[float, float]], most: int = 120) -> list[tuple[float, float]]:
    """Means over runs of neighbouring points, at most so many of them."""
    length = max(1, -(-len(points) // most))
    runs = [points[start : start + length] for start in range(0, len(points), length)]
    return [(sum(x for x, _ in run) / len(run), sum(y for _, y in run) / len(run)) for run in runs]
