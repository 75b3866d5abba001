"""A model beside other methods: quality over cost, and their numbers."""

from typing import Any

from pmvit.errors import PmvitError
from pmvit.numbers.measures import MEASURES, QUALITIES
from pmvit.numbers.tables import format_number
from pmvit.reporting.page.cells import NOTHING, Cell, ratio_cell, value_cell
from pmvit.reporting.page.sections import Section, Table
from pmvit.reporting.pictures.charts import Series, line_chart

Row = dict[str, Any]


def comparison_section(comparison: dict[str, Any], where: str) -> Section:
    """Quality over cost of all methods, and their numbers."""
    rows = [row for row in comparison.get("rows", ()) if isinstance(row, dict)]
    measured = [row for row in rows if row.get("gflops") is not None and isinstance(row.get("evaluation"), dict)]
    names = [name for name in QUALITIES if any(row["evaluation"].get(name) is not None for row in measured)]
    if not names:
        raise PmvitError(f"{where}: expected rows with gflops and evaluation, as `pmvit compare` writes them; got none")
    settings = list(dict.fromkeys((s["runtime"], s["batch"]) for row in rows for s in row.get("speeds") or ()))
    titles = [MEASURES[name].full_title for name in names]
    head = ("method", "GFLOPs", *titles, *(f"{runtime}, batch {batch}" for runtime, batch in settings))
    note = "Speeds are relative to the original, with 95 % bootstrap intervals."
    charts = [line_chart("Quality over cost", *_series(measured, names[0]))]
    return Section([Table(head, [_cells(row, names, settings) for row in rows], note)], charts)


def _series(rows: list[Row], quality: str) -> tuple[list[Series], str, str]:
    """A line for each method, and what the axes are."""
    measure, methods = MEASURES[quality], dict[str, list[Row]]()
    for row in rows:
        if row["evaluation"].get(quality) is not None:
            methods.setdefault(row["name"] if row.get("method") in (None, "given") else row["method"], []).append(row)
    series: list[Series] = []
    for name, some in methods.items():
        some = sorted(some, key=lambda row: float(row["gflops"]))
        points = [(row["gflops"], measure.factor * row["evaluation"][quality]) for row in some]
        titles = [f"{row['name']}: {x:.3g} GFLOPs, {y:.1f}" for row, (x, y) in zip(some, points, strict=True)]
        colour = None if name == "original" else sum(one.colour is not None for one in series)
        series.append(Series(name, points, titles, colour))
    return series, "GFLOPs (MACs) an image", measure.axis_title


def _cells(row: Row, names: list[str], settings: list[tuple[str, int]]) -> list[Cell]:
    evaluation = row.get("evaluation") or {}
    cells = [Cell(str(row["name"]), "" if evaluation else str(row.get("failure") or ""))]
    cells.append(NOTHING if row.get("gflops") is None else Cell(format_number(row["gflops"], ".3f")))
    for name in names:
        value = evaluation.get(name)
        cells.append(value_cell(name, None if value is None else (value, None, None)))
    speeds = {(speed["runtime"], speed["batch"]): speed.get("speedup") for speed in row.get("speeds") or ()}
    return [*cells, *(ratio_cell(speeds.get(setting)) for setting in settings)]
