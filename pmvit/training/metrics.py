"""What a run measures: one JSON line per step and per epoch, and the learning curves."""

import json
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from pmvit.errors import PmvitError, PmvitWarning
from pmvit.files import parse_json, typed, write_atomically, write_text
from pmvit.numbers.measures import MEASURES, QUALITIES

FILE, CURVES = "metrics.jsonl", "curves.png"
LOSSES = {
    "loss": "loss",
    "ce": "cross-entropy",
    "kl": "KL from the original",
    "cosine": "cosine distance from the original",
    "tokens": "tokens",
}
RATES = {"lr": "weights", "matrix_lr": "M and R"}


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run so far; one that a kill cut short is left out, and one that is damaged, with a warning."""
    path, result = folder / FILE, []
    lines = path.read_bytes().decode("utf-8", errors="replace").split("\n") if path.exists() else [""]
    for number, text in enumerate(lines[:-1], start=1):  # behind the last end of line is what a kill cut short
        try:
            result.append(_checked(parse_json(text, f"{path}, line {number}"), f"{path}, line {number}"))
        except PmvitError as error:
            warnings.warn(f"{error}: the line is left out", PmvitWarning, stacklevel=2)
    return result


def _checked(line: Any, where: str) -> dict[str, Any]:
    """A line of metrics, if it is one."""
    values: dict[str, Any] = typed(dict[str, Any], line, where)
    for name in ("step", "epoch") if values.get("kind") == "epoch" else ("step",):
        typed(int, values.get(name), f"{where}: {name}")
    for name in (*LOSSES, *RATES, *QUALITIES):
        typed(float | None, values.get(name), f"{where}: {name}")
    return values


def keep_metrics(folder: Path, step: int) -> None:
    """Drop the lines behind a step: a resumed run writes them again."""
    kept = [json.dumps(line) for line in read_metrics(folder) if line["step"] <= step]
    write_text(folder / FILE, "".join(f"{line}\n" for line in kept))


class Curves(NamedTuple):
    """What one chart of a run shows: points by the names of their lines, over steps or epochs."""

    title: str
    x: str
    y: str
    lines: dict[str, list[tuple[float, float]]]


def curves(metrics: list[dict[str, Any]]) -> list[Curves]:
    """Loss, validation and learning rate of a run, from the lines of its metrics."""
    steps = [line for line in metrics if "loss" in line]
    epochs = [line for line in metrics if line.get("kind") == "epoch"]
    name = next((name for name in QUALITIES if any(line.get(name) is not None for line in epochs)), QUALITIES[0])
    quality, made = MEASURES[name], list[Curves]()
    for title, x, y, names, factor in (
        ("Training loss", "step", "loss", LOSSES, 1.0),
        ("Validation", "epoch", quality.axis_title, {name: quality.full_title}, quality.factor),
        ("Learning rate", "step", "learning rate × 10⁴", RATES, 1e4),
    ):
        rows, lines = (steps if x == "step" else epochs), dict[str, list[tuple[float, float]]]()
        for key, label in names.items():
            points = [(line[x], factor * line[key]) for line in rows if line.get(key) is not None]
            if points:
                lines[label] = _thinned(points) if x == "step" else points
        made.append(Curves(title, x, y, lines))
    return made


def _thinned(points: list[tuple[float, float]], most: int = 100) -> list[tuple[float, float]]:
    """Means over runs of neighbouring points, at most so many of them."""
    length = max(1, -(-len(points) // most))
    runs = [points[start : start + length] for start in range(0, len(points), length)]
    return [(sum(x for x, _ in run) / len(run), sum(y for _, y in run) / len(run)) for run in runs]


def draw_curves(folder: Path) -> None:
    """Draw loss, validation and learning rate of a run into `curves.png`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    for axis, (title, x, y, lines) in zip(figure.subplots(1, 3), curves(read_metrics(folder)), strict=True):
        for name, points in lines.items():
            axis.plot(*zip(*points, strict=True), label=name, linewidth=1.2, marker="o" if x == "epoch" else None)
        axis.set(title=title, xlabel=x, ylabel=y)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
        if not lines:
            axis.text(0.5, 0.5, "no validation images", ha="center", transform=axis.transAxes)
        elif x == "epoch":
            axis.xaxis.get_major_locator().set_params(integer=True)
        else:
            axis.set_ylim(bottom=0)
            axis.legend(frameon=False)
    write_atomically(folder / CURVES, lambda temporary: figure.savefig(temporary, format="png", dpi=110))
