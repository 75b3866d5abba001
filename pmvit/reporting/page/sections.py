"""The parts of a report: measurements as tables, charts and sentences."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from pmvit.errors import PmvitError
from pmvit.numbers.estimates import wilson
from pmvit.numbers.measures import MEASURES, QUALITIES, main_measure
from pmvit.numbers.tables import format_number
from pmvit.reporting.pictures.charts import Chart, Series, line_chart
from pmvit.runtime.bench.table import rows_of
from pmvit.training import metrics

Json = dict[str, Any]
Numbers = Sequence[Any] | None  # an `Estimate` as JSON: the value and the ends of its interval, which may be `None`
DIGITS = {name: 1 if measure.is_share else 3 for name, measure in MEASURES.items()} | {"cosine": 4}
Card = tuple[str, str, Sequence[str]]  # one number that matters: its title, it, and what it was before
MOST_CLASSES = 12
VARIANTS = {"optimized": "compressed, optimised for inference", "bound": "equal-token bound"}


class Cell(NamedTuple):
    """A measured number with its unit and, in smaller print, its interval."""

    text: str
    aside: str = ""


class Table(NamedTuple):
    """Cells under their heads; the first column names the rows."""

    head: tuple[str, ...]
    rows: list[list[Cell]]
    note: str = ""


NOTHING = Cell("–")


def value_cell(name: str, estimate: Numbers) -> Cell:
    """What was measured, and its interval if it has one."""
    if estimate is not None and estimate[0] == estimate[1] == estimate[2]:
        estimate = estimate[:1]
    return _cell(estimate, f".{DIGITS[name]}f", MEASURES[name].factor, " %" if MEASURES[name].is_share else "")


def change_cell(name: str, estimate: Numbers) -> Cell:
    """A difference with its sign; of shares in points."""
    unit = " points" if MEASURES[name].is_share else ""
    return _cell(estimate, f"+.{DIGITS[name]}f", MEASURES[name].factor, unit, " to ")


def ratio_cell(ratio: Numbers) -> Cell:
    """How many times as fast."""
    return _cell(ratio, ".2f", 1, "×")


def _cell(estimate: Numbers, form: str, factor: float, unit: str, between: str = " – ") -> Cell:
    """An estimate in words, with the minus of typesetters."""
    if estimate is None:
        return NOTHING
    texts = [format_number(factor * number, form) for number in estimate if number is not None]
    value, *ends = (text.replace("-", "−") if float(text) else text.lstrip("+-") for text in texts)
    return Cell(value + unit, between.join(ends))


def accuracy_table(evaluation: Json, compared_with: str) -> Table:
    """What a model reaches, what it is compared with does, and the difference, of a `PairedEvaluation`."""
    rows = []
    for one in evaluation["measures"]:
        name = one["name"]
        values = [value_cell(name, one[side]) for side in ("original", "compressed")]
        rows.append([Cell(MEASURES[name].against(compared_with)), *values, change_cell(name, one["difference"])])
    broken = f" {evaluation['broken']} could not be read and were left out." if evaluation["broken"] else ""
    note = (
        f"{evaluation['images']:,} images, both models on the same ones.{broken} In small print 95 % intervals: "
        "Wilson's for shares of images, bootstrap over images for the rest; differences are paired."
    )
    return Table(("", compared_with, "compressed", "difference"), rows, note)


def class_table(evaluation: Json) -> Table | None:
    """What the classes that lose most lose; `None` if nothing is known of classes."""
    classes = evaluation.get("classes") or []
    if not classes:
        return None
    names = {one["name"] for one in evaluation["measures"]}
    name = "miou" if "miou" in names else "top1" if "top1" in names else "agreement"
    rows = []
    for one in classes[:MOST_CLASSES]:
        values = [_with_interval(name, one[key], one["images"]) for key in ("original", "compressed")]
        changes = [] if one["original"] is None else [(one["compressed"] - one["original"], None, None)]
        shown = values if changes else values[1:]
        cells = [*(value_cell(name, value) for value in shown), *(change_cell(name, change) for change in changes)]
        rows.append([Cell(one["name"]), Cell(f"{one['images']:,}"), *cells])
    if name == "agreement":
        return Table(("class, as the original sees it", "images", "agreement"), rows, "The lowest first.")
    lose, gain = (sum(sign * (one["compressed"] - one["original"]) > 0 for one in classes) for sign in (-1, 1))
    note = f"Of {len(classes):,} classes {lose:,} lose and {gain:,} gain; those that lose most come first."
    title = "IoU" if name == "miou" else MEASURES[name].title
    return Table(("class", "images", f"{title}, original", f"{title}, compressed", "difference"), rows, note)


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
    named = {"reference": document.get("reference"), "broken": document.get("broken", 0)}
    return {"images": images, **named, "measures": measures}


def _with_interval(name: str, value: float | None, images: int) -> Numbers:
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
    has_memory = any(row.get("memory") is not None for row in rows_of(benchmark))
    for row in rows_of(benchmark):
        cells = [Cell(VARIANTS.get(row["variant"], row["variant"]), f"{row['runtime']}, batch {row['batch']}")]
        memory = [_cell(None if row.get("memory") is None else [row["memory"]], ",.0f", 1, " MB")] if has_memory else []
        if row.get("speedup") is None:
            nothing = [NOTHING] * (2 + has_memory)
            rows.append([*cells, Cell("does not run", str(row.get("failure") or "")), *nothing])
            continue
        median = Cell(f"{format_number(1e3 * row['p50'], ',.1f')} ms")
        speed = Cell("1") if row["variant"] == "original" else ratio_cell(row["speedup"])
        rows.append([*cells, Cell(format_number(row["throughput"], ",.1f")), median, speed, *memory])
    said = ", ".join(f"{name} {value}" for name, value in benchmark.get("environment", {}).items())
    note = f"All take turns in one run; ratios are medians over the rounds, with 95 % bootstrap intervals. {said}."
    if has_memory:
        note += " Memory is the peak while it runs, weights included, in a process that does nothing else."
    return Table(("", "images a second", "median", "speed", *(["peak memory"] if has_memory else [])), rows, note)


def cards(costs: tuple[float, float], evaluation: Json | None, speed: Json | None, compared_with: str) -> list[Card]:
    """Cost, quality and speed in a few large numbers."""
    before, after = costs
    less = f"{100 * (1 - after / before):.0f} % less"
    made: list[Card] = [("Cost", f"{after:.3g} GFLOPs", (f"{before:.3g} before", less))]
    measures = {one["name"]: one for one in (evaluation or {}).get("measures", ())}
    for name in dict.fromkeys((main_measure(measures) or "", "agreement")):
        if name in measures:
            value, original, change = (measures[name][key] for key in ("compressed", "original", "difference"))
            text, aside = value_cell(name, value) if change is None else change_cell(name, change)
            details = [] if original is None else [f"{value_cell(name, original).text} before"]
            details += [f"{'' if change is None else text} {f'[{aside}]' if aside else ''}".strip()]
            made.append((MEASURES[name].against(compared_with), value_cell(name, value).text, details))
    rows = [row for row in rows_of(speed or {}) if row.get("speedup") is not None]
    for variant in ("optimized", "compressed"):  # as one would deploy it, at the largest batch of the first runtime
        found = [row for row in rows if (row["variant"], row["runtime"]) == (variant, rows[0]["runtime"])]
        if found:
            best = max(found, key=lambda row: int(row["batch"]))
            text, aside = ratio_cell(best["speedup"])
            return [*made, ("Speed", text, (f"[{aside}]", f"{best['runtime']}, batch {best['batch']}"))]
    return made


def curves(lines: list[Json]) -> list[Chart]:
    """Loss, validation and learning rate of fine-tuning, as far as they were measured."""
    made = []
    for title, x, y, found in metrics.curves(lines):
        is_epoch = x == "epoch"
        series = [
            Series(name, points, [f"epoch {at:g}: {value:.2f}" for at, value in points] if is_epoch else (), number)
            for number, (name, points) in enumerate(found.items(), 2 if is_epoch else 0)
            if is_epoch or len(points) > 1
        ]
        made += [line_chart(title, series, x, y, zero=not is_epoch)] if series else []
    return made


def comparison_section(comparison: Json, where: str) -> tuple[list[Table], list[Chart]]:
    """Quality over cost of all methods, and their numbers."""
    rows = [row for row in comparison.get("rows", ()) if isinstance(row, dict)]
    measured = [row for row in rows if row.get("gflops") is not None and isinstance(row.get("evaluation"), dict)]
    names = [name for name in QUALITIES if any(row["evaluation"].get(name) is not None for row in measured)]
    if not names:
        raise PmvitError(f"{where}: expected rows with gflops and evaluation, as `pmvit compare` writes them; got none")
    settings = list(dict.fromkeys((s["runtime"], s["batch"]) for row in rows for s in row.get("speeds") or ()))
    titles = [MEASURES[name].full_title for name in names]
    head = ("method", "GFLOPs", *titles, *(f"{runtime}, batch {batch}" for runtime, batch in settings))
    cells = []
    for row in rows:
        found = row.get("evaluation") or {}
        speeds = {(speed["runtime"], speed["batch"]): speed.get("speedup") for speed in row.get("speeds") or ()}
        cells.append(
            [
                Cell(str(row["name"]), "" if found else str(row.get("failure") or "")),
                _cell(None if row.get("gflops") is None else [row["gflops"]], ".3f", 1, ""),
                *(value_cell(name, None if found.get(name) is None else (found[name], None, None)) for name in names),
                *(ratio_cell(speeds.get(setting)) for setting in settings),
            ]
        )
    note = "Speeds are relative to the original, with 95 % bootstrap intervals."
    return [Table(head, cells, note)], [_quality_chart(measured, names[0])]


def _quality_chart(rows: list[Json], quality: str) -> Chart:
    """A line for each method, the original in ink."""
    measure, methods = MEASURES[quality], dict[str, list[Json]]()
    for row in rows:
        if row["evaluation"].get(quality) is not None:
            methods.setdefault(row["name"] if row.get("method") in (None, "given") else row["method"], []).append(row)
    series: list[Series] = []
    for name, some in methods.items():
        some.sort(key=lambda row: float(row["gflops"]))
        points = [(row["gflops"], measure.factor * row["evaluation"][quality]) for row in some]
        titles = [f"{row['name']}: {x:.3g} GFLOPs, {y:.1f}" for row, (x, y) in zip(some, points, strict=True)]
        colour = None if name == "original" else sum(one.colour is not None for one in series)
        series.append(Series(name, points, titles, colour))
    return line_chart("Quality over cost", series, "GFLOPs (MACs) an image", measure.axis_title)
