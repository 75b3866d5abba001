"""Prune and Merge beside all other methods at equal cost, without training: Table I of the paper before any tuning.

    python -m experiments.comparison            # accuracy, agreement, divergence, export
    python -m experiments.comparison --speed    # and speed at the middle budget: on a machine that does nothing else

What plans are made from, and what the other methods have to look at, comes from `imagenet/train` (1,000 images),
accuracy from `imagenet/val` (the first image of each class) below the folder that PMVIT_DATA names. Rows are kept in
`comparison.json` as they are measured, so that a stopped run goes on; scores, merge costs and metrics that they share
are in the folder that PMVIT_WORK names. Tables go to `comparison.md`, accuracy over GFLOPs to a chart for each model.
"""

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import pmvit
from experiments.common import percent
from pmvit.comparison import Comparison, ComparisonRow
from pmvit.comparison.making import WEIGHTS, MethodInputs, make_smaller
from pmvit.comparison.run import try_export
from pmvit.config.measuring import OURS
from pmvit.data.opening import open_loader
from pmvit.errors import PmvitError
from pmvit.evaluation.classification import Evaluation
from pmvit.evaluation.classification import measure as measure_images
from pmvit.files import write_atomically, write_text
from pmvit.hosts.outputs import predict
from pmvit.loading import create_model
from pmvit.measuring import MergeCosts, Scores, TokenMetric
from pmvit.methods import METHODS
from pmvit.numbers.bootstrap import bootstrap
from pmvit.numbers.estimates import Estimate
from pmvit.numbers.tables import format_number

DATA = Path(os.environ.get("PMVIT_DATA", "../shared/data"))
WORK = Path(os.environ.get("PMVIT_WORK", "comparison-work"))
RESULTS = Path(__file__).with_suffix(".json")
MODELS = ("deit_tiny_patch16_224", "vit_tiny_patch16_224")
MIDDLE = 0.86
BUDGETS = (MIDDLE, 0.74, 0.99)  # GFLOPs of the plans that keep 0.7, 0.6 and 0.8 of the tokens
RUNTIMES = ("eager", "onnxruntime", "openvino")
VARIANTS = (*OURS, *(name for name, kind in METHODS.items() if not kind.needs_training), *WEIGHTS)

Row = dict[str, Any]
Batches = list[tuple[Tensor, Tensor]]
T = TypeVar("T")


def original(name: str) -> nn.Module:
    return create_model(name, DATA / "weights" / f"{name}.safetensors").float().eval()


def validation(model: nn.Module) -> Batches:
    """The first of the two images of each class."""
    return [(x[::2].clone(), y[::2]) for x, y in open_loader(model, str(DATA / "imagenet/val"), batch_size=50)]


def kept(path: Path, load: Callable[[Path], T], make: Callable[[], T]) -> T:
    """What was made before, or make it and keep it."""
    if not path.exists():
        made: Any = make()
        made.save(path)
    return load(path)


def inputs(name: str, model: nn.Module) -> MethodInputs:
    """Scores, merge costs, the metric and images of a model."""
    images = open_loader(model, str(DATA / "imagenet/train"), batch_size=50, shuffle=True)
    scores = kept(WORK / f"{name}.scores.json", Scores.load, lambda: pmvit.measure(model, images, method="scored"))
    merge_costs = kept(
        WORK / f"{name}.prices.json", MergeCosts.load, lambda: pmvit.measure(model, images, method="measured")
    )
    metric = kept(
        WORK / f"{name}.metric.safetensors",
        TokenMetric.load,
        lambda: pmvit.measure(model, images, method="adaptive"),
    )
    return MethodInputs(scores, merge_costs, metric, images)


def evaluate(model: nn.Module, batches: Batches, reference: list[Tensor]) -> dict[str, Tensor]:
    """What each image says, by name."""
    with torch.inference_mode():
        parts = [measure_images(predict(model, x), y, r) for (x, y), r in zip(batches, reference, strict=True)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def measured(row: ComparisonRow, model: nn.Module, batches: Batches, reference: list[Tensor]) -> Row:
    """A row with what the images say, and how sure that is."""
    found = evaluate(model, batches, reference)
    names = {field.name for field in fields(Evaluation)}
    means: dict[str, Any] = {name: float(values.double().mean()) for name, values in found.items() if name in names}
    error = float(found["top1"].std(correction=0)) / len(found["top1"]) ** 0.5
    row = replace(row, evaluation=Evaluation(len(found["top1"]), 0, top1_error=error, **means))
    drop = found["top1"] - found["reference_top1"]
    spread = {"top1_change": drop, "agreement": found["agreement"], "kl": found["kl"]}
    return {**asdict(row), "intervals": {name: bootstrap(values)[1:] for name, values in spread.items()}}


def measure(rows: list[Row]) -> None:
    """Measure the rows that are not there yet and write them one by one."""
    for name in MODELS:
        done = {key_of(row) for row in rows}
        wanted = [
            (budget, variant) for budget in BUDGETS for variant in VARIANTS if (name, budget, variant) not in done
        ]
        if not wanted:
            continue
        model = original(name)
        known = inputs(name, model)
        batches = validation(model)
        with torch.inference_mode():
            reference = [predict(model, images) for images, _ in batches]
        for budget, variant in wanted:
            row = ComparisonRow(variant, variant, wanted=budget)
            try:
                made, options = make_smaller(model, variant, budget, known)
            except PmvitError as error:
                keep(rows, {"model": name, **asdict(replace(row, failure=str(error)))})
                continue
            cost = pmvit.flops(made)
            row = replace(row, options=options, gflops=cost.gflops, parameters=cost.parameters)
            if budget == MIDDLE:
                row = replace(row, **try_export(made))
            keep(rows, {"model": name, **measured(row, made, batches, reference)})


def measure_speed(rows: list[Row]) -> None:
    """Time all variants at the middle budget, side by side, and keep it with their rows."""
    for name in MODELS:
        model = original(name)
        known = inputs(name, model)
        few = validation(model)[:1]
        given: dict[str, Any] = vars(known)
        found = pmvit.compare(model, few, gflops=MIDDLE, runtimes=RUNTIMES, batches=(1, 16), rounds=30, **given)
        for compared in found.rows:
            method = compared.name if compared.name.endswith("optimized") else compared.method
            speeds = [asdict(speed) for speed in compared.speeds]
            kind = {"model": name, "method": method, "speeds": speeds, "environment": found.environment}
            rows[:] = [row for row in rows if "environment" not in row or key_of(row) != key_of(kind)]
            keep(rows, kind)


def key_of(row: Row) -> tuple[str, float | None, str]:
    return row["model"], row.get("wanted"), row["method"]


def keep(rows: list[Row], row: Row) -> None:
    rows.append(row)
    write_text(RESULTS, json.dumps(rows, indent=1) + "\n")
    quality = row.get("evaluation")
    said = f"top-1 {quality['top1']:.1%}, KL {quality['kl']:.3f}" if quality else row.get("failure") or "timed"
    print(row["model"], row["method"], row.get("wanted", ""), said, flush=True)


def markdown(rows: list[Row]) -> str:
    """All tables, from the measured rows alone."""
    images = next(row["evaluation"]["images"] for row in rows if row.get("evaluation"))
    lines = [
        "# Methods at equal cost, without training",
        "",
        f"`python -m experiments.comparison` made this page: {images:,} ImageNet validation images, one a class; "
        "calibration on 1,000 training images. Every method has the strength at which its counted GFLOPs come nearest "
        "to the budget; one that stays more than 5 % off is not in the table. In brackets: 95 % bootstrap intervals "
        "over images; the change of top-1 is paired with the original on the same images. Methods whose papers train "
        "them (EViT, Evo-ViT, PS-ViT, eTPS) are shown as they are before that. Charts leave out pruned weights, "
        "which are far below.",
    ]
    for name in MODELS:
        own = [row for row in rows if row["model"] == name and row.get("evaluation")]
        if own:
            reference = own[0]["evaluation"]["reference_top1"]
            lines += ["", f"## {name}: original {percent(reference)}", "", f"![accuracy over cost]({chart(name).name})"]
        for budget in sorted(BUDGETS, reverse=True):
            at = [row for row in own if row["wanted"] == budget]
            if at:
                lines += ["", f"### {budget} GFLOPs", "", "| method | GFLOPs | top-1 | change | agreement | KL |"]
                lines += ["|---|---|---|---|---|---|", *map(line, sorted(at, key=lambda r: r["evaluation"]["kl"]))]
            for row in rows:
                if row["model"] == name and row.get("wanted") == budget and not row["evaluation"]:
                    lines += ["", f"{row['method']} is not here: {row['failure']}."]
        lines += speed_lines([row for row in rows if row["model"] == name], own)
    return "\n".join(lines) + "\n"


def line(row: Row) -> str:
    found, ends = row["evaluation"], row["intervals"]
    change = 100 * (found["top1"] - found["reference_top1"])
    cells = [
        row["method"],
        format_number(row["gflops"], ".3f"),
        percent(found["top1"]),
        _with_ends(change, [100 * end for end in ends["top1_change"]], "+.1f"),
        _with_ends(found["agreement"], ends["agreement"], ".1%"),
        _with_ends(found["kl"], ends["kl"], ".3f"),
    ]
    return f"| {' | '.join(cells)} |"


def _with_ends(value: float, ends: list[float], form: str) -> str:
    value_text, low, high = (format_number(each, form) for each in (value, *ends))
    return f"{value_text} ({low} ... {high})"


def speed_lines(rows: list[Row], evaluated: list[Row]) -> list[str]:
    """Speed-ups at the middle budget, if they were measured, and which of the methods are static graphs."""
    exports = {row["method"]: row["exports"] for row in evaluated if row["exports"] is not None}
    said = {True: "yes", False: "no", None: "-"}
    timed = [row for row in rows if "environment" in row]
    if not timed:
        listed = ", ".join(f"{method} {said[found]}" for method, found in exports.items())
        return ["", f"A static graph for any batch size (`torch.export`): {listed}."] if exports else []
    places = [(speed["runtime"], speed["batch"]) for speed in timed[0]["speeds"]]
    head = " | ".join(f"{runtime}, batch {batch}" for runtime, batch in places)
    about = ", ".join(f"{name} {value}" for name, value in timed[0]["environment"].items())
    lines = ["", f"### Times as fast as the original at {MIDDLE} GFLOPs", "", f"{about}.", ""]
    lines += [f"| method | {head} | exports |", f"|---|{'---|' * (len(places) + 1)}"]
    for row in timed:
        cells = [str(Estimate(*s["speedup"])) if s["speedup"] else "does not run" for s in row["speeds"]]
        base = row["method"].partition(",")[0]
        lines.append(f"| {row['method']} | {' | '.join(cells)} | {said[exports.get(base)]} |")
    return lines


def chart(name: str) -> Path:
    return RESULTS.with_name(f"comparison_{name.partition('_patch')[0]}.png")


def draw(rows: list[Row], name: str) -> None:
    """Accuracy over GFLOPs, but for pruned weights, far below all others."""
    points = []
    for row in rows:
        if row["model"] == name and row.get("evaluation") and row["method"] not in WEIGHTS:
            known = Evaluation(**row["evaluation"])
            points.append(ComparisonRow(row["name"], row["method"], gflops=row["gflops"], evaluation=known))
    if points:
        write_atomically(chart(name), Comparison(points).draw)


def main() -> None:
    parser = argparse.ArgumentParser(description="Methods side by side at equal cost.")
    parser.add_argument("--speed", action="store_true", help="time them at the middle budget")
    torch.manual_seed(0)
    rows: list[Row] = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    (measure_speed if parser.parse_args().speed else measure)(rows)
    for name in MODELS:
        draw(rows, name)
    write_text(RESULTS.with_suffix(".md"), markdown(rows))


if __name__ == "__main__":
    main()
