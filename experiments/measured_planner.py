"""Plans that need no fine-tuning: measured merges beside the paper's plan, a plan from scores and ToMe, at equal FLOPs.

    python -m experiments.measured_planner [--images 2000]

Scores and merge costs come from `imagenet/train` (1,000 images), accuracy from `imagenet/val` (2,000 images, or as
many of them as named, in an order that depends on a seed alone) below the folder that PMVIT_DATA names. Rows are kept
in `measured_planner.json` as they are measured, so that a stopped run goes on; the tables go to `measured_planner.md`.
Takes about an hour on two cores.
"""

import argparse
import json
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pmvit
from experiments.common import Row, percent
from experiments.paired import answers, logits, lost, numbers, with_interval
from experiments.without_tuning import BATCH_SIZE, DATA, MODELS, loader
from pmvit.config import PAPER
from pmvit.files import write_text
from pmvit.loading import create_model
from pmvit.measuring.flops import ModelCost, model_cost
from pmvit.methods import Tome
from pmvit.numbers.tables import format_number

RESULTS = Path(__file__).with_suffix(".json")
SHARES = (0.79, 0.68, 0.58)  # of the FLOPs of the blocks
SCORED = "scores, `residual`"
WHOLE = "measured, whole blocks"
ABLATIONS: dict[str, dict[str, Any]] = {  # at one budget
    "measured, whole blocks, not nested": {"parts": "whole", "nested": False},
    "measured, `early=1`": {"early": 1.0},
    "measured, 256 images": {"images": 256},
    "measured, no mirror images": {"mirror": False},
    "measured, any groups": {"groups": "any"},
}
EVERY_STEP = "measured, `least_step=0`"
ABLATED = 0.68
MEASURED: dict[str, dict[str, Any]] = {"measured": {}, WHOLE: {"parts": "whole"}, **ABLATIONS}
FROM_SCORES = {SCORED: {}, "scores, `pinv` (the paper's plan)": PAPER}
TOME = "ToMe (depends on the image)"
METHODS = ["measured", WHOLE, *FROM_SCORES, TOME, EVERY_STEP, *ABLATIONS]


class Candidates:
    """One model, and what the methods make of it; scores and merge costs are measured when they are first asked for."""

    def __init__(self, name: str, count: int) -> None:
        self.model = create_model(name, DATA / "weights" / f"{name}.safetensors")
        self.cost: ModelCost = model_cost(self.model)
        self.sources: dict[str, pmvit.Scores | pmvit.MergeCosts] = {}
        self.count = count

    @cached_property
    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """As many of the validation images, in an order that depends on a seed alone."""
        return list(islice(loader(self.model, "val", shuffle=True), self.count // BATCH_SIZE))

    @cached_property
    def reference(self) -> Tensor:
        """The logits of the original."""
        return logits(self.model, self.batches)

    def row(self, method: str, share: float) -> Row:
        """What a method has for each of the validation images."""
        small = self.make(method, share)
        labels = torch.cat([labels for _, labels in self.batches])
        macs = pmvit.flops(small).macs
        return {
            "gflops": macs / 1e9,
            "share": (macs - self.cost.outside) / (self.cost.macs - self.cost.outside),
            **answers(logits(small, self.batches), labels, self.reference),
        }

    def make(self, method: str, share: float) -> nn.Module:
        """The model at this share of the FLOPs of its blocks."""
        budget = self.cost.outside + share * (self.cost.macs - self.cost.outside)
        if method == TOME:
            merged = (pmvit.compress(self.model, Tome(r)) for r in range(1, 99))
            return next(small for small in merged if pmvit.flops(small).macs <= budget)
        options = {"prune": 0.1, **FROM_SCORES[method]} if method in FROM_SCORES else {}
        if method == EVERY_STEP:
            method, options = "measured", {"least_step": 0.0}
        return pmvit.compress(self.model, pmvit.plan(self._source(method), gflops=budget / 1e9, **options))

    def _source(self, method: str) -> pmvit.Scores | pmvit.MergeCosts:
        name = "scores" if method in FROM_SCORES else method
        if name not in self.sources:
            images = loader(self.model, "train", shuffle=True)
            if method in FROM_SCORES:
                self.sources[name] = pmvit.measure(self.model, images, method="scored")
            else:
                self.sources[name] = pmvit.measure(self.model, images, method="measured", **MEASURED[method])
        return self.sources[name]


def measure(rows: list[Row], count: int) -> None:
    """Measure the rows that are not there yet and write them one by one."""
    everything = {name: Candidates(name, count) for name in MODELS}
    for method in METHODS:
        for name, candidates in everything.items():
            for share in (ABLATED,) if method in ABLATIONS else SHARES:
                key = [name, share, method, count]
                if all(row["key"] != key for row in rows):
                    rows.append({"key": key, **candidates.row(method, share)})
                    write_text(RESULTS, json.dumps(rows) + "\n")
                    print(key, f"KL {numbers(rows[-1], 'kl').mean():.3f}", flush=True)


def markdown(rows: list[Row]) -> str:
    """The tables, from the measured rows alone."""
    lines = [
        "# Plans without fine-tuning, measured by measurement",
        "",
        "`python -m experiments.measured_planner` made this page. Shares are of the FLOPs of the blocks. Points lost "
        "and KL are to the original on the same images; in brackets 95 % intervals, from 2,000 resamplings of the "
        "images. The last column is the difference of the KL from that of the plan from scores at the same budget, "
        "image by image: below zero is better. `least_step` was chosen among four values on the first 500 of these "
        "images, with DeiT-Tiny.",
    ]
    for name in MODELS:
        own = [row for row in rows if row["key"][0] == name]
        if own:
            original = numbers(own[0], "original").mean()
            lines += ["", f"## {name}: original {percent(original)} on {own[0]['key'][3]:,} images", ""]
            lines += [
                "| budget | plan | GFLOPs | share | top-1 | points lost | agreement | KL | KL to those of scores |",
                "|---|---|---|---|---|---|---|---|---|",
            ]
            for share in SHARES:
                at = [row for method in METHODS for row in own if row["key"][1:3] == [share, method]]
                scored = next((row for row in at if row["key"][2] == SCORED), None)
                lines += [_line(row, scored) for row in at]
    return "\n".join(lines) + "\n"


def _line(row: Row, scored: Row | None) -> str:
    _, share, method, _ = row["key"]
    kl = numbers(row, "kl")
    against = "-"
    if scored is not None and scored is not row:
        against = with_interval(kl - numbers(scored, "kl"), "+.3f")
    cost = f"{format_number(row['gflops'], '.3f')} | {format_number(row['share'], '.3f')}"
    return (
        f"| {share} | {method} | {cost} | {percent(numbers(row, 'correct').mean())} | "
        f"{with_interval(lost(row), '.1f')} | {percent(numbers(row, 'agrees').mean())} | {with_interval(kl, '.3f')} | "
        f"{against} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--images", type=int, default=2000, help=f"validation images, a multiple of {BATCH_SIZE}")
    count = parser.parse_args().images
    torch.manual_seed(0)
    rows: list[Row] = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    rows = [row for row in rows if row["key"][3] == count]
    measure(rows, count)
    write_text(RESULTS.with_suffix(".md"), markdown(rows))


if __name__ == "__main__":
    main()
