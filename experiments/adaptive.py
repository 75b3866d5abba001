"""Plans that adapt to the image beside fixed ones, ToMe, PiToMe and EViT, at equal FLOPs, nothing tuned.

    python -m experiments.adaptive [--images 2000]

The metric comes from `imagenet/train`, accuracy from the same images of `imagenet/val` as in
`measured_planner`, whose rows of fixed plans and ToMe stand beside. Rows are kept in `adaptive.json` as they are
measured, so that a stopped run goes on; the tables go to `adaptive.md`. Takes about an hour on two cores.
"""

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

import pmvit
from experiments import measured_planner
from experiments.common import Row
from experiments.measured_planner import EVIT, OTHERS, TOME, Candidates
from experiments.paired import numbers, run, tables
from experiments.without_tuning import DATA, MODELS, loader
from pmvit.files import write_text
from pmvit.measuring import TokenMetric

RESULTS = Path(__file__).with_suffix(".json")
SHARES = (0.79, 0.68, 0.58, 0.5, 0.42)  # of the FLOPs of the blocks
ADAPTIVE, CALIBRATED = "adaptive", "adaptive, calibrated"
FIXED = "measured"
METHODS = (ADAPTIVE, CALIBRATED, TOME, *OTHERS, FIXED)
CALIBRATED_AT = (0.58,)


class WithAdaptive(Candidates):
    """One model, and adaptive plans of it beside the others."""

    @cached_property
    def metric(self) -> TokenMetric:
        return pmvit.measure(self.model, loader(self.model, "train", shuffle=True), method="adaptive")

    def make(self, method: str, share: float) -> nn.Module:
        if method not in (ADAPTIVE, CALIBRATED):
            return super().make(method, share)
        budget = self.cost.outside + share * (self.cost.macs - self.cost.outside)
        small = pmvit.compress(self.model, pmvit.plan(self.metric, gflops=budget / 1e9))
        if method == CALIBRATED:
            pmvit.calibrate(small, DATA / "imagenet" / "train", teacher=self.model, workers=0)
        return small


def known(rows: list[Row], key: list[Any]) -> bool:
    return any(row["key"] == key for row in rows)


def measure(rows: list[Row], count: int) -> None:
    """Measure the rows that are not there yet and write them one by one."""
    everything = {name: WithAdaptive(name, count) for name in MODELS}
    for method in (ADAPTIVE, TOME, CALIBRATED, FIXED, *OTHERS):
        for name, candidates in everything.items():
            for share in CALIBRATED_AT if method == CALIBRATED else SHARES:
                key = [name, share, method, count]
                if not known(rows, key) and not known(beside(count), key):
                    row = candidates.row(method, share)
                    rows.append({"key": key, **row})
                    write_text(RESULTS, json.dumps(rows) + "\n")
                    print(key, f"KL {numbers(rows[-1], 'kl').mean():.4f}", flush=True)


def beside(count: int) -> list[Row]:
    """Rows of `measured_planner` for the same images."""
    rows: list[Row] = json.loads(measured_planner.RESULTS.read_text())
    return [row for row in rows if row["key"][2] in (TOME, FIXED) and row["key"][3] == count]


def markdown(rows: list[Row]) -> str:
    """The tables, from the measured rows alone."""
    lines = [
        "# Plans that adapt to the image, without fine-tuning",
        "",
        "`python -m experiments.adaptive` made this page. Shares are of the FLOPs of the blocks, comparing and merging "
        "included. Points lost and KL are to the original on the same images; in brackets 95 % intervals, from 2,000 "
        "resamplings of the images. *Measured* are fixed plans of the cheapest merges.",
    ]
    if any(row["key"][2] == CALIBRATED for row in rows):
        lines[-1] += " *Calibrated* are biases and weights, by distillation on 1,000 training images without labels."
    if any(row["key"][2] == EVIT for row in rows):
        lines[-1] += " EViT is trained in its paper, which does not report what it is before that."
    count = rows[0]["key"][3] if rows else 0
    return "\n".join([*lines, *tables([*rows, *beside(count)], MODELS, SHARES, METHODS, ".4f")]) + "\n"


if __name__ == "__main__":
    run(__doc__, RESULTS, measure, markdown)
