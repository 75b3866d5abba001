"""The parts of a report: measurements as tables, charts and sentences."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pmvit.errors import PmvitError
from pmvit.numbers.estimates import wilson
from pmvit.numbers.measures import MEASURES, QUALITIES, main_measure
from pmvit.numbers.tables import format_number
from pmvit.reporting.page.cells import NOTHING, Cell, change_cell, ratio_cell, value_cell
from pmvit.reporting.pictures.charts import Chart, Series, line_chart
from pmvit.runtime.bench.table import rows_of
from pmvit.training.metrics import thinned

Json = dict[str, Any]
VARIANTS = {"optimized": "compressed, optimised for inference", "bound": "equal-token bound"}
LOSSES = {
    "loss": "loss",
    "ce": "cross-entropy",
    "kl": "KL from the original",
    "cosine": "cosine distance",
    "tokens": "tokens",
}


class Card(NamedTuple):
    """One number that matters, and what it was before."""

    title: str
    value: str
    details: tuple[str, ...]


class Table(NamedTuple):
    """Cells under their heads; the first column names the rows."""

    head: tuple[str, ...]
    rows: list[list[Cell]]
    note: str = ""


@dataclass(frozen=True)
class Section:
    """A part of the page; of one that is empty, the page says how to fill it."""

    tables: list[Table] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)


def accuracy_table(evaluation: Json, compared_with: str) -> Table:
    """What a model reaches, what it is compared with does, and the difference, of a `PairedEvaluation`."""
    rows = []
    for one in evaluation["measures"]:
        name = one["name"]
        values = [value_cell(name, one[side]) for side in ("original", "compressed")]
        rows.append([Cell(MEASURES[name].full_title), *values, change_cell(name, one["difference"])])
    broken = f" {evaluation['broken']} could not be read and were left out." if evaluation["broken"] else ""
    note = (
        f"{evaluation['images']:,} images, both models on the same ones.{broken} In small print 95 % intervals: "
        "Wilson's for shares of images, bootstrap over images for the rest; differences are paired."
    )
    return Table(("", compared_with, "compressed", "difference"), rows, note)


def from_evaluate(document: Json, where: str) -> Json:
    """What `pmvit evaluate --json` printed, as a `PairedEvaluation` without paired intervals."""
    images = document.get("images")
    if not isinstance(images, int) or images < 1 or not ({"top1", "miou", "cosine"} & set(document)):
        got = ", ".join(document) or "nothing"
        raise PmvitError(f"{where}: expected what `pmvit evaluate --json` prints; got {got}")
    measures = []
    for name in MEASURES:
        value, before = document.get(name), document.get(f"reference_{name}")
        if value is not None:
            original, compressed = (_with_interval(name, each, images) for each in (before, value))
            change = None if before is None else (value - before, None, None)
            measures.append({"name": name, "original": original, "compressed": compressed, "difference": change})
    return {"images": images, "broken": document.get("broken", 0), "measures": measures}


def _with_interval(name: str, value: float | None, images: int) -> tuple[float | None, ...] | None:
    if value is None:
        return None
    return wilson(value, images) if MEASURES[name].counts_images else (value, None, None)


def stages_table(stages: Json) -> Table:
    """What `pmvit run` measured of the original, the compressed and the tuned model."""
    rows = [[Cell("GFLOPs"), *(Cell(format_number(row["gflops"], ".3f")) for row in stages.values())]]
    for name, measure in MEASURES.items():
        cells = [value_cell(name, _with_interval(name, row.get(name), row["images"])) for row in stages.values()]
        rows += [[Cell(measure.full_title), *cells]] if set(cells) != {NOTHING} else []
    images = next(iter(stages.values()))["images"]
    return Table(("", *stages), rows, f"As `pmvit run` measured it on {images:,} images.")


def speed_table(benchmark: Json) -> Table:
    """Speed of all variants in all runtimes and batch sizes."""
    rows = []
    for row in rows_of(benchmark):
        cells = [Cell(VARIANTS.get(row["variant"], row["variant"]), f"{row['runtime']}, batch {row['batch']}")]
        if row.get("speedup") is None:
            rows.append([*cells, Cell("does not run", str(row.get("failure") or "")), NOTHING, NOTHING])
            continue
        median = Cell(f"{format_number(1e3 * row['p50'], ',.1f')} ms")
        speed = Cell("1") if row["variant"] == "original" else ratio_cell(row["speedup"])
        rows.append([*cells, Cell(format_number(row["throughput"], ",.1f")), median, speed])
    said = ", ".join(f"{name} {value}" for name, value in benchmark.get("environment", {}).items())
    note = f"All take turns in one run; ratios are medians over the rounds, with 95 % bootstrap intervals. {said}."
    return Table(("", "images a second", "median", "speed"), rows, note)


def cards(costs: tuple[float, float], evaluation: Json | None, speed: Json | None) -> list[Card]:
    """Cost, quality and speed in a few large numbers."""
    before, after = costs
    made = [Card("Cost", f"{after:.3g} GFLOPs", (f"{before:.3g} before", f"{100 * (1 - after / before):.0f} % less"))]
    measures = {one["name"]: one for one in (evaluation or {}).get("measures", ())}
    for name in dict.fromkeys((main_measure(measures) or "", "agreement")):
        if name in measures:
            value, original, change = (measures[name][key] for key in ("compressed", "original", "difference"))
            text, aside = value_cell(name, value) if change is None else change_cell(name, change)
            details = [] if original is None else [f"{value_cell(name, original).text} before"]
            details += [f"{'' if change is None else text} {f'[{aside}]' if aside else ''}".strip()]
            made.append(Card(MEASURES[name].full_title, value_cell(name, value).text, tuple(details)))
    if (best := _best_speed(speed)) is not None:
        ratio = ratio_cell(best["speedup"])
        made.append(Card("Speed", ratio.text, (f"[{ratio.aside}]", f"{best['runtime']}, batch {best['batch']}")))
    return made


def _best_speed(speed: Json | None) -> Any:
    """The compressed model as one would deploy it, at the largest batch of the first runtime."""
    rows = [row for row in rows_of(speed or {}) if row.get("speedup") is not None]
    for name in ("optimized", "compressed"):
        found = [row for row in rows if row["variant"] == name and row["runtime"] == rows[0]["runtime"]]
        if found:
            return max(found, key=lambda row: row["batch"])
    return None


def curves(metrics: list[Json]) -> list[Chart]:
    """Loss, validation and learning rate of fine-tuning."""
    steps = [line for line in metrics if "loss" in line]
    epochs = [line for line in metrics if line.get("kind") == "epoch"]
    made = []
    if series := _over_steps(steps, LOSSES):
        made.append(line_chart("Training loss", series, "step", "loss", zero=True))
    name = next((name for name in QUALITIES if any(line.get(name) is not None for line in epochs)), None)
    if name is not None:
        measure = MEASURES[name]
        points = [(line["epoch"], measure.factor * line[name]) for line in epochs if line.get(name) is not None]
        one = Series(measure.full_title, points, [f"epoch {x:g}: {y:.2f}" for x, y in points], 2)
        made.append(line_chart("Validation", [one], "epoch", measure.axis_title))
    if rates := _over_steps(steps, {"lr": "weights", "matrix_lr": "M and R"}, scale=1e4):
        made.append(line_chart("Learning rate", rates, "step", "learning rate × 10⁴", zero=True))
    return made


def _over_steps(steps: list[Json], names: dict[str, str], scale: float = 1.0) -> list[Series]:
    made = []
    for number, (name, title) in enumerate(names.items()):
        points = [(line["step"], scale * line[name]) for line in steps if line.get(name) is not None]
        if len(points) > 1:
            made.append(Series(title, thinned(points), colour=number))
    return made
