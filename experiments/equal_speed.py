"""What is kept at equal measured speed: adaptive plans, fixed ones, ToMe, PiToMe and EViT, nothing tuned.

    python -m experiments.equal_speed

Speed is measured here, on DeiT-Tiny, all methods of a budget taking turns with the original in one run: so on a machine
that does nothing else. ViT-Tiny is the same architecture. What is kept comes from the rows of `adaptive` and
`measured_planner`, so run these first. Rows go to `equal_speed.json`, tables to `equal_speed.md`, curves to
`equal_speed.png`; a row that lacks one of the methods is measured again.
"""

from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import pmvit
from experiments import adaptive, measured_planner
from experiments.adaptive import ADAPTIVE, FIXED, SHARES, WithAdaptive
from experiments.common import Row, Rows, Settings, interval, read_rows, run
from experiments.measured_planner import EVIT, OTHERS, PITOME, TOME
from experiments.paired import lost, numbers
from experiments.without_tuning import MODELS
from pmvit.files import write_atomically
from pmvit.numbers.estimates import Estimate
from pmvit.numbers.tables import format_number, markdown_table

NAME = Path(__file__).stem
IMAGES = 2000  # of the rows that say what is kept
METHODS = (ADAPTIVE, TOME, FIXED, *OTHERS)
PLACES = (("onnxruntime", 1, 40), ("eager", 16, 12))  # runtime, batch and rounds
SPEEDS = (1.2, 1.4, 1.6, 2.0, 2.4)
PASSES = "original, optimised"  # where the curves of what is optimised begin
OPTIMISED = (ADAPTIVE, FIXED)
TITLES = {"vit_tiny_patch16_224": "ViT-Tiny", "deit_tiny_patch16_224": "DeiT-Tiny"}
RUNTIMES = {"onnxruntime": "ONNX Runtime", "eager": "eager"}


class Look(NamedTuple):
    """How a method is drawn."""

    label: str
    colour: str
    style: str
    width: float = 1.4


LOOKS = {
    ADAPTIVE: Look("ours", "#1f6fb4", "o-", 2.4),
    FIXED: Look("ours, fixed", "#6baed6", "s--"),
    TOME: Look("ToMe", "#d9822b", "^-"),
    PITOME: Look("PiToMe", "#2a9d5c", "v-"),
    EVIT: Look("EViT", "#8e6bb0", "D-"),
}


class Subject:
    """DeiT-Tiny, and what the methods make of it."""

    @cached_property
    def candidates(self) -> WithAdaptive:
        return WithAdaptive("deit_tiny_patch16_224", IMAGES)

    def speeds(self, share: float, runtime: str, batch: int, rounds: int) -> Row:
        """Times as fast as the original, by method."""
        against: dict[str, Any] = {"original": self.candidates.model}
        against[PASSES] = partial(_optimised, self.candidates.model)
        for method in METHODS:
            small = self.candidates.make(method, share)
            against[method] = partial(_optimised, small) if method in OPTIMISED else small
        result = pmvit.benchmark(
            self.candidates.make(ADAPTIVE, share), against=against, runtimes=[runtime], batches=[batch], rounds=rounds
        )
        return {row.variant: row.speedup for row in result.rows if row.variant != "original"}


def _optimised(small: nn.Module, target: Any) -> nn.Module:
    return pmvit.optimize_for_inference(small, target=target)


def measure(rows: Rows, settings: Settings) -> None:
    subject = Subject()
    for share in SHARES:
        for runtime, batch, rounds in PLACES:
            key = {"share": share, "runtime": runtime, "batch": batch}
            rows.rows = [
                row for row in rows.rows if row["key"] != key or is_whole(row)
            ]  # kept until the other is there
            rows.add(key, partial(subject.speeds, share, runtime, batch, rounds))


def is_whole(row: Row) -> bool:
    """Whether all methods took their turns; `None` is the speed of one that a runtime does not run."""
    return all(method in row for method in (PASSES, *METHODS))


def shown(rows: list[Row]) -> list[str]:
    """The methods that have speeds and rows of what they keep."""
    known = {method for model in MODELS for _, method in kept(model)}
    return [method for method in METHODS if method in known and any(row.get(method) for row in rows)]


def kept(model: str) -> dict[tuple[float, str], Row]:
    """What each method keeps of a model at each budget."""
    rows = [*read_rows(adaptive.RESULTS), *read_rows(measured_planner.RESULTS)]
    return {(row["key"][1], row["key"][2]): row for row in rows if row["key"][0] == model and row["key"][3] == IMAGES}


def curve(rows: list[Row], model: str, method: str, runtime: str) -> list[tuple[Estimate, Tensor, Tensor]]:
    """Speed, points lost and KL, image by image, from the original on to the fastest; the passes alone lose nothing."""
    of_model = kept(model)
    nothing = torch.zeros(IMAGES, dtype=torch.float64)
    points = []
    for row in (row for row in rows if row["key"]["runtime"] == runtime):
        found = of_model.get((row["key"]["share"], method))
        if found is not None and row.get(method) is not None:
            points.append((Estimate(*row[method]), lost(found), numbers(found, "kl")))
        if method in OPTIMISED and row["key"]["share"] == SHARES[0] and row.get(PASSES) is not None:
            points.append((Estimate(*row[PASSES]), nothing, nothing))
    return sorted([(Estimate(1.0, 1.0, 1.0), nothing, nothing), *points], key=lambda point: point[0].value)


def at(points: list[tuple[Estimate, Tensor, Tensor]], speed: float) -> tuple[Tensor, Tensor] | None:
    """Points lost and KL at a speed, on the straight line between the two budgets next to it; `None` beyond them."""
    for (slow, *low), (fast, *high) in pairwise(points):
        if slow.value <= speed <= fast.value:
            part = (speed - slow.value) / (fast.value - slow.value)
            first, second = (before + part * (after - before) for before, after in zip(low, high, strict=True))
            return first, second
    return None


def markdown(rows: list[Row]) -> str:
    """The tables, from the measured rows alone."""
    methods = shown(rows)
    text = (
        "`python -m experiments.equal_speed` made this page. Speed is times as fast as the original in the same "
        "runtime, measured in turns on two CPU threads; what is lost lies on straight lines between the budgets, of "
        "which the fastest may be slower than a speed: then there is no number. Ours are as `optimize_for_inference` "
        "leaves them, as in an export, and begin at what that makes of the original; the others are as their authors "
        "run them, for the passes know nothing of them. "
        f"On {IMAGES:,} images of ImageNet's validation set, in brackets 95 % intervals from resampling them."
    )
    if EVIT in methods:
        text += " EViT is trained in its paper, which does not report what it is before that."
    parts = ["# What is kept at equal speed, without fine-tuning", text, f"![Top-1 over speed]({NAME}.png)"]
    for model in MODELS:
        original = next(iter(kept(model).values()))
        cells = []
        for runtime, batch, _ in PLACES:
            for speed in SPEEDS:
                for method in methods:
                    found = at(curve(rows, model, method, runtime), speed)
                    line = [f"{runtime}, batch {batch}", f"{format_number(speed, '.1f')}x", method]
                    line += (
                        ["-", "-"]
                        if found is None
                        else [interval(found[0]).text(".1f"), interval(found[1]).text(".4f")]
                    )
                    cells.append(line)
        parts += [f"## {model}: original {format_number(float(numbers(original, 'original').mean()), '.1%')}"]
        parts += [markdown_table(["runtime", "speed", "method", "points lost", "KL"], cells)]
    parts += ["## Speeds", "Times as fast as the original, at each share of the blocks' FLOPs."]
    speeds = [
        [f"{row['key']['runtime']}, batch {row['key']['batch']}", str(row["key"]["share"])]
        + [f"{Estimate(*row[each]).text('.2f')}" if row.get(each) else "-" for each in (PASSES, *methods)]
        for row in rows
    ]
    parts += [markdown_table(["runtime", "share", PASSES, *methods], speeds)]
    return "\n\n".join(parts) + "\n"


def draw(rows: list[Row], path: Path) -> None:
    """Top-1 over speed, a panel for each model and place; the bands are 95 % intervals of what is lost."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5.6), layout="constrained")
    panels = figure.subplots(len(MODELS), len(PLACES), sharex="col", sharey="row")
    for model, line in zip(MODELS, panels, strict=True):
        original = 100 * float(numbers(next(iter(kept(model).values())), "original").mean())
        for (runtime, batch, _), axis in zip(PLACES, line, strict=True):
            axis.axhline(original, color="black", linewidth=1, linestyle=":", label="original")
            for method in (each for each in LOOKS if each in shown(rows)):
                points = curve(rows, model, method, runtime)
                speeds = [speed.value for speed, _, _ in points]
                ends = [interval(points_lost) for _, points_lost, _ in points]
                look = LOOKS[method]
                axis.fill_between(
                    speeds,
                    [original - end.high for end in ends],
                    [original - end.low for end in ends],
                    color=look.colour,
                    alpha=0.13,
                    linewidth=0,
                )
                values = [original - end.value for end in ends]
                axis.plot(speeds, values, look.style, color=look.colour, linewidth=look.width, label=look.label)
            axis.set_title(f"{TITLES[model]}, {RUNTIMES[runtime]}, batch {batch}", fontsize=10)
            axis.spines[["top", "right"]].set_visible(False)
            axis.grid(alpha=0.3)
        line[0].set_ylabel("top-1 in %, not tuned")
    for axis in panels[-1]:
        axis.set_xlabel("times as fast as the original")
        axis.xaxis.set_major_formatter("{x:.1f}x")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=6, frameon=False)
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png", dpi=200))


if __name__ == "__main__":
    run(NAME, measure, markdown)
    draw(read_rows(Path(__file__).with_suffix(".json")), Path(__file__).with_suffix(".png"))
