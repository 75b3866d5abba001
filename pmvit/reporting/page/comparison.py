"""A model beside other methods: quality over cost, and their numbers."""

from pmvit.errors import PmvitError
from pmvit.evaluation.measures import QUALITIES
from pmvit.evaluation.tables import format_number
from pmvit.reporting.page import wording
from pmvit.reporting.page.sections import Cell, Json, Section, Table
from pmvit.reporting.pictures.charts import Series, line_chart


def comparison_section(comparison: Json, where: str) -> Section:
    """Quality over cost of all methods, and their numbers."""
    rows = [row for row in comparison.get("rows", ()) if isinstance(row, dict)]
    measured = [row for row in rows if row.get("gflops") is not None and isinstance(row.get("evaluation"), dict)]
    names = [name for name in QUALITIES if any(row["evaluation"].get(name) is not None for row in measured)]
    if not names:
        raise PmvitError(f"{where}: expected rows with gflops and evaluation, as `pmvit compare` writes them; got none")
    quality = names[0]
    factor, unit = (100, " (%)") if quality in wording.IN_PERCENT else (1, "")
    kinds: dict[str, list[Json]] = {}
    for row in measured:
        if row["evaluation"].get(quality) is not None:
            kind = row["name"] if row.get("method") in (None, "given") else row["method"]
            kinds.setdefault(kind, []).append(row)
    series, colour = [], 0
    for kind, some in kinds.items():
        some = sorted(some, key=lambda row: float(row["gflops"]))
        points = [(row["gflops"], factor * row["evaluation"][quality]) for row in some]
        titles = [f"{row['name']}: {x:.3g} GFLOPs, {y:.1f}" for row, (x, y) in zip(some, points, strict=True)]
        series.append(Series(kind, points, titles, None if kind == "original" else colour))
        colour += kind != "original"
    chart = line_chart("Quality over cost", series, "GFLOPs (MACs) an image", wording.TITLES[quality] + unit)
    places = list(dict.fromkeys((s["runtime"], s["batch"]) for row in rows for s in row.get("speeds") or ()))
    head = ("method", "GFLOPs", *(wording.TITLES[name] for name in names), *(f"{r}, batch {b}" for r, b in places))
    cells = [_compared(row, names, places) for row in rows]
    return Section([Table(head, cells, "Speeds are relative to the original, with 95 % bootstrap intervals.")], [chart])


def _compared(row: Json, names: list[str], places: list[tuple[str, int]]) -> list[Cell]:
    evaluation = row.get("evaluation") or {}
    cells = [Cell(str(row["name"]), "" if evaluation else str(row.get("failure") or ""))]
    cells.append(Cell("–" if row.get("gflops") is None else format_number(row["gflops"], ".3f")))
    for name in names:
        value = evaluation.get(name)
        cells.append(Cell("–") if value is None else Cell(wording.number(name, value)))
    speeds = {(speed["runtime"], speed["batch"]): speed.get("speedup") for speed in row.get("speeds") or ()}
    for place in places:
        ratio = speeds.get(place)
        cells.append(Cell("–") if ratio is None else Cell(wording.times(ratio), wording.times_interval(ratio)))
    return cells
