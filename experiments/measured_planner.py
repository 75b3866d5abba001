"""Plans that need no fine-tuning: measured merges beside the paper's plan, a plan from scores and ToMe, at equal FLOPs.

    python -m experiments.measured_planner [--images 2000]

Scores and merge costs come from `imagenet/train` (1,000 images), accuracy from `imagenet/val` (2,000 images, or as
many of them as named, in an order that depends on a seed alone) below the folder that PMVIT_DATA names. Rows are kept
in `measured_planner.json` as they are measured, so that a stopped run goes on; the tables go to `measured_planner.md`.
Takes about an hour on two cores.
"""

import json
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pmvit
from experiments.common import Row
from experiments.paired import answers, logits, numbers, run, tables
from experiments.without_tuning import BATCH_SIZE, DATA, MODELS, loader
from pmvit.config import PAPER
from pmvit.files import write_text
from pmvit.loading import create_model
from pmvit.measuring import MergeCosts, Scores
from pmvit.measuring.flops import ModelCost, model_cost
from pmvit.methods import Evit, Pitome, Tome
from pmvit.methods.base import Method
from pmvit.methods.budget import method_for

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
PITOME, EVIT = "PiToMe (depends on the image)", "EViT (depends on the image)"
OTHERS: dict[str, type[Method]] = {PITOME: Pitome, EVIT: Evit}  # at the strength that comes nearest
METHODS = ["measured", WHOLE, *FROM_SCORES, TOME, EVERY_STEP, *ABLATIONS]


class Candidates:
    """One model, and what the methods make of it; scores and merge costs are measured when they are first asked for."""

    def __init__(self, name: str, count: int) -> None:
        self.model = create_model(name, DATA / "weights" / f"{name}.safetensors")
        self.cost: ModelCost = model_cost(self.model)
        self.sources: dict[str, Scores | MergeCosts] = {}
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
        if method in OTHERS:
            return pmvit.compress(self.model, method_for(self.model, OTHERS[method], budget / 1e9))
        options = {"prune": 0.1, **FROM_SCORES[method]} if method in FROM_SCORES else {}
        if method == EVERY_STEP:
            method, options = "measured", {"least_step": 0.0}
        return pmvit.compress(self.model, pmvit.plan(self._source(method), gflops=budget / 1e9, **options))

    def _source(self, method: str) -> Scores | MergeCosts:
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
    return "\n".join([*lines, *tables(rows, MODELS, SHARES, METHODS, ".3f", against=SCORED)]) + "\n"


if __name__ == "__main__":
    run(__doc__, RESULTS, measure, markdown)
