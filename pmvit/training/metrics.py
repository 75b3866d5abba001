"""What a run measures: one JSON line per step and per epoch, and the learning curves."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from pmvit.errors import PmvitError
from pmvit.files import write_atomically, write_text
from pmvit.numbers.measures import MEASURES, QUALITIES

FILE, CURVES = "metrics.jsonl", "curves.png"


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run so far; one that a kill cut short is left out."""
    path = folder / FILE
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    result = []
    for line in lines:
        try:
            result.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return result


class MetricsLog:
    """Appends lines to `metrics.jsonl`. After a resume it goes on behind the step the checkpoint is of."""

    def __init__(self, folder: Path, step: int) -> None:
        kept = [json.dumps(line) for line in read_metrics(folder) if line["step"] <= step]
        write_text(folder / FILE, "".join(f"{line}\n" for line in kept))
        self._file: TextIO = (folder / FILE).open("a", encoding="utf-8")

    def write(self, values: dict[str, Any], last_checkpoint: Callable[[], Path | None]) -> None:
        """Append a line.

        Raises:
            PmvitError: If it cannot be written, as on a full disk; it names the checkpoint to go on from.
        """
        try:
            self._file.write(json.dumps(values) + "\n")
            self._file.flush()
        except OSError as error:
            raise PmvitError(
                f"could not write {self._file.name} ({error.strerror}); the last checkpoint is {last_checkpoint()}. "
                "Make room, then resume"
            ) from None

    def close(self) -> None:
        with suppress(OSError):  # what could not be written was said already
            self._file.close()


def draw_curves(folder: Path) -> None:
    """Draw loss, validation and learning rate over the steps of a run into `curves.png`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = read_metrics(folder)
    steps = [line for line in lines if "loss" in line]
    epochs = [line for line in lines if line.get("kind") == "epoch"]
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    losses, validation, rate = figure.subplots(1, 3)
    for name, label in (
        ("loss", "loss"),
        ("ce", "cross-entropy"),
        ("kl", "KL from the original"),
        ("cosine", "cosine distance from the original"),
        ("tokens", "tokens"),
    ):
        points = [(line["step"], line[name]) for line in steps if name in line]
        if points:
            losses.plot(*zip(*thinned(points), strict=True), label=label, linewidth=1.2)
    losses.set(title="training loss", xlabel="step")
    losses.set_ylim(bottom=0)
    losses.legend(frameon=False)
    name = next((name for name in QUALITIES if any(name in line for line in epochs)), QUALITIES[0])
    measure = MEASURES[name]
    points = [(line["epoch"], line[name] * measure.factor) for line in epochs if name in line]
    if points:
        validation.plot(*zip(*points, strict=True), marker="o", color="tab:green")
    else:
        validation.text(0.5, 0.5, "no validation images", ha="center", transform=validation.transAxes)
    validation.set(title=f"validation {measure.axis_title}", xlabel="epoch")
    validation.xaxis.get_major_locator().set_params(integer=True)
    rate.plot(*zip(*[(line["step"], line["lr"]) for line in steps], strict=True), label="weights", color="tab:gray")
    matrices = [(line["step"], line["matrix_lr"]) for line in steps if "matrix_lr" in line]
    if matrices:
        rate.plot(*zip(*matrices, strict=True), label="M and R", color="tab:orange", linestyle="--")
    rate.set(title="learning rate", xlabel="step")
    rate.legend(frameon=False)
    for axis in (losses, validation, rate):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
    write_atomically(folder / CURVES, lambda temporary: figure.savefig(temporary, format="png", dpi=110))


def thinned(points: list[tuple[int, float]], most: int = 100) -> list[tuple[float, float]]:
    """Means over runs of neighbouring points, at most so many of them."""
    length = max(1, -(-len(points) // most))
    runs = [points[start : start + length] for start in range(0, len(points), length)]
    return [(sum(x for x, _ in run) / len(run), sum(y for _, y in run) / len(run)) for run in runs]
