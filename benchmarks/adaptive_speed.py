"""Speed of adaptive plans, beside fixed ones and ToMe at equal FLOPs: `python -m benchmarks.adaptive_speed`.

Every place (model, runtime, batch) is one interleaved run at 0.6 of the FLOPs of the blocks. Rows land in
`adaptive_speed.json` and on the page, `adaptive_speed.md`, as they are measured, so that the command can be stopped and
started again. The plans are DeiT-Tiny's, measured on some hundred real images; weights do not change speeds:
DeiT-Small's are random, and it compares tokens by numbers of DeiT-Tiny. About ten minutes on two cores.
"""

import json
import warnings
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import pmvit
from benchmarks.__main__ import deit_tiny, merge_costs_of
from benchmarks.deployment import RUNTIMES, Row, ratio_of
from experiments.without_tuning import loader
from pmvit.errors import PmvitWarning
from pmvit.files import write_text
from pmvit.measuring import MergeCosts, TokenMetric
from pmvit.measuring.flops import model_cost
from pmvit.numbers.tables import format_number
from pmvit.runtime.bench.variants import variant

import timm  # isort: skip  # after pmvit, which lets torchvision import

OUTPUT = Path(__file__).with_suffix(".json")
SHARE = 0.6
VARIANTS = ("compressed", "optimized", "bound", "tome")
FIXED, WHOLE = "fixed", "original-optimized"


def variants(name: str, metric: TokenMetric, costs: MergeCosts) -> tuple[nn.Module, dict[str, Any]]:
    """A model with an adaptive plan, and what takes turns."""
    torch.manual_seed(0)
    model = deit_tiny() if name == "DeiT-Tiny" else timm.create_model("deit_small_patch16_224").eval()
    cost = model_cost(model)
    repeats = cost.blocks[0].width // metric.projections.shape[1]
    metric = replace(metric, cost=cost, projections=metric.projections.repeat(1, repeats, 1))
    budget = cost.outside + SHARE * (cost.macs - cost.outside)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PmvitWarning)  # the plans are of other weights
        small = pmvit.compress(model, pmvit.plan(metric, gflops=budget / 1e9))
        fixed = pmvit.compress(model, pmvit.plan(replace(costs, cost=cost), gflops=budget / 1e9))
    makers = {each: partial(variant, each, model) for each in ("original", WHOLE)}
    makers |= {each: partial(variant, each, small) for each in VARIANTS}
    return small, {**makers, FIXED: partial(variant, "optimized", fixed)}


def measure(rows: list[Row]) -> None:
    metric, costs = None, None
    for name in ("DeiT-Small", "DeiT-Tiny"):
        for batch in (1, 16):
            for runtime in RUNTIMES:
                if any((row["model"], row["place"], row["batch"]) == (name, runtime, batch) for row in rows):
                    continue
                if metric is None or costs is None:
                    tiny = deit_tiny()
                    metric = pmvit.measure(tiny, loader(tiny, "train", shuffle=True), method="adaptive", limit=128)
                    costs = merge_costs_of(tiny)
                rounds = 30 if batch == 1 else 10
                small, makers = variants(name, metric, costs)
                result = pmvit.benchmark(small, against=makers, runtimes=[runtime], batches=[batch], rounds=rounds)
                rows += [{"model": name, "place": runtime, **asdict(row)} for row in result.rows]
                write_text(OUTPUT, json.dumps({"environment": result.environment, "rows": rows}, indent=1) + "\n")
                write_text(OUTPUT.with_suffix(".md"), markdown(rows, result.environment))
                print(name, runtime, batch, {row.variant: str(row.speedup or row.failure) for row in result.rows})


def markdown(rows: list[Row], environment: dict[str, Any]) -> str:
    lines = [
        "# Speed of adaptive plans",
        "",
        f"`python -m benchmarks.adaptive_speed` made this page: torch {environment['torch']}, "
        f"{environment['threads']} CPU threads, {SHARE} of the FLOPs of the blocks. Times as fast as the original in "
        "the same runtime, medians of paired rounds with 95 % bootstrap intervals; all variants of a line took turns "
        "in one run. *Bound* is the equal-token bound: the original's blocks on as many tokens, sliced away, nothing "
        "compared and nothing merged. *Optimised* is what export writes, *fixed* the same of a fixed plan with as many "
        "FLOPs, and *original optimised* the original after the same passes. ToMe has the r that comes nearest in "
        "FLOPs.",
        "",
        "| model | runtime | batch | FLOPs | compressed | optimised | bound | optimised / bound | fixed | ToMe | "
        "original optimised |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    places = dict.fromkeys((row["model"], row["place"], row["batch"]) for row in rows)
    for place in places:
        found = {row["variant"]: row for row in rows if (row["model"], row["place"], row["batch"]) == place}
        ratio = found["original"]["gflops"] / found["compressed"]["gflops"]
        cells = [*map(str, place), f"{format_number(ratio, '.2f')}x"]
        cells += [ratio_of(found.get(name), "speedup") for name in ("compressed", "optimized", "bound")]
        cells += [ratio_of(found["optimized"], "of_bound")]
        cells += [ratio_of(found.get(name), "speedup") for name in (FIXED, "tome", WHOLE)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    rows: list[Row] = json.loads(OUTPUT.read_text())["rows"] if OUTPUT.exists() else []
    measure(rows)


if __name__ == "__main__":
    main()
