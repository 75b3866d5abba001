"""Speed of adaptive plans in every runtime, beside ToMe at equal FLOPs: `python -m benchmarks.adaptive_speed`.

Every place (model, runtime, batch) is one interleaved run at 0.6 of the FLOPs of the blocks. Rows land in
`adaptive_speed.json` and on the page, `adaptive_speed.md`, as they are measured, so that the command can be stopped and
started again. The schedule is DeiT-Tiny's, measured on 128 real images; weights do not change speeds: DeiT-Small's are
random, and it compares tokens by numbers of DeiT-Tiny. About ten minutes on two cores.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import pmvit
from benchmarks.__main__ import deit_tiny
from benchmarks.deployment import RUNTIMES, Row, ratio_of
from experiments.without_tuning import loader
from pmvit.files import write_text
from pmvit.measuring import TokenMetric
from pmvit.measuring.flops import model_cost
from pmvit.numbers.tables import format_number

import timm  # isort: skip  # after pmvit, which lets torchvision import

OUTPUT = Path(__file__).with_suffix(".json")
SHARE = 0.6
VARIANTS = ("compressed", "optimized", "bound", "tome")


def small_of(name: str, metric: TokenMetric) -> nn.Module:
    """A model with an adaptive plan."""
    torch.manual_seed(0)
    model = deit_tiny() if name == "DeiT-Tiny" else timm.create_model("deit_small_patch16_224").eval()
    cost = model_cost(model)
    repeats = cost.blocks[0].width // metric.projections.shape[1]
    metric = replace(metric, cost=cost, projections=metric.projections.repeat(1, repeats, 1))
    budget = cost.outside + SHARE * (cost.macs - cost.outside)
    return pmvit.compress(model, pmvit.plan(metric, gflops=budget / 1e9))


def measure(rows: list[Row]) -> None:
    metric = None
    for name in ("DeiT-Small", "DeiT-Tiny"):
        for batch in (1, 16):
            for runtime in RUNTIMES:
                if any((row["model"], row["place"], row["batch"]) == (name, runtime, batch) for row in rows):
                    continue
                if metric is None:
                    tiny = deit_tiny()
                    metric = pmvit.measure(tiny, loader(tiny, "train", shuffle=True), method="adaptive", limit=128)
                rounds = 30 if batch == 1 else 10
                result = pmvit.benchmark(
                    small_of(name, metric), against=VARIANTS, runtimes=[runtime], batches=[batch], rounds=rounds
                )
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
        "compared and nothing merged. *Optimised* is what export writes. ToMe has the r that comes nearest in FLOPs. "
        "Measured before each token looked for its partner in one round, which takes about half of the operations.",
        "",
        "| model | runtime | batch | FLOPs | compressed | optimised | bound | optimised / bound | ToMe |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    places = dict.fromkeys((row["model"], row["place"], row["batch"]) for row in rows)
    for place in places:
        found = {row["variant"]: row for row in rows if (row["model"], row["place"], row["batch"]) == place}
        ratio = found["original"]["gflops"] / found["compressed"]["gflops"]
        cells = [*map(str, place), f"{format_number(ratio, '.2f')}x"]
        cells += [ratio_of(found.get(name), "speedup") for name in ("compressed", "optimized", "bound")]
        cells += [ratio_of(found["optimized"], "of_bound"), ratio_of(found.get("tome"), "speedup")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    rows: list[Row] = json.loads(OUTPUT.read_text())["rows"] if OUTPUT.exists() else []
    measure(rows)


if __name__ == "__main__":
    main()
