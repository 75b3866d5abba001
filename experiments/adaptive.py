"""Plans that adapt to the image beside fixed ones and ToMe, at equal FLOPs, nothing tuned.

    python -m experiments.adaptive [--images 2000]

The metric and its schedules come from `imagenet/train`, accuracy from the same images of `imagenet/val` as in
`measured_planner`, whose rows of fixed plans and ToMe stand beside. Rows are kept in `adaptive.json` as they are
measured, so that a stopped run goes on; the tables go to `adaptive.md`. Takes about half an hour on two cores.
"""

import argparse
import json
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

import pmvit
from experiments import measured_planner
from experiments.common import Row, percent
from experiments.measured_planner import TOME, Candidates
from experiments.paired import lost, numbers, with_interval
from experiments.without_tuning import MODELS, loader
from pmvit.files import write_text
from pmvit.measuring import TokenMetric
from pmvit.numbers.tables import format_number

RESULTS = Path(__file__).with_suffix(".json")
SHARES = (0.79, 0.68, 0.58, 0.5)  # of the FLOPs of the blocks
ADAPTIVE = "adaptive"
FIXED = "measured"
METHODS = (ADAPTIVE, TOME, FIXED)


class WithAdaptive(Candidates):
    """One model, and adaptive plans of it beside the others."""

    @cached_property
    def metric(self) -> TokenMetric:
        return pmvit.measure(self.model, loader(self.model, "train", shuffle=True), method="adaptive")

    def make(self, method: str, share: float) -> nn.Module:
        if method != ADAPTIVE:
            return super().make(method, share)
        budget = self.cost.outside + share * (self.cost.macs - self.cost.outside)
        return pmvit.compress(self.model, pmvit.plan(self.metric, gflops=budget / 1e9))


def known(rows: list[Row], key: list[Any]) -> bool:
    return any(row["key"] == key for row in rows)


def measure(rows: list[Row], count: int) -> None:
    """Measure the rows that are not there yet and write them one by one."""
    everything = {name: WithAdaptive(name, count) for name in MODELS}
    for method in (ADAPTIVE, TOME):
        for name, candidates in everything.items():
            for share in SHARES:
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
    for name in MODELS:
        own = [row for row in rows if row["key"][0] == name]
        if own:
            original = numbers(own[0], "original").mean()
            lines += ["", f"## {name}: original {percent(original)} on {own[0]['key'][3]:,} images", ""]
            lines += ["| budget | plan | GFLOPs | share | top-1 | points lost | agreement | KL |", "|---|" + "---|" * 7]
            for share in SHARES:
                lines += [_line(row) for method in METHODS for row in own if row["key"][1:3] == [share, method]]
    return "\n".join(lines) + "\n"


def _line(row: Row) -> str:
    _, share, method, _ = row["key"]
    cost = f"{format_number(row['gflops'], '.3f')} | {format_number(row['share'], '.3f')}"
    return (
        f"| {share} | {method} | {cost} | {percent(numbers(row, 'correct').mean())} | "
        f"{with_interval(lost(row), '.1f')} | {percent(numbers(row, 'agrees').mean())} | "
        f"{with_interval(numbers(row, 'kl'), '.4f')} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--images", type=int, default=2000, help="validation images, a multiple of the batch size")
    count = parser.parse_args().images
    torch.manual_seed(0)
    rows: list[Row] = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    rows = [row for row in rows if row["key"][3] == count]
    measure(rows, count)
    write_text(RESULTS.with_suffix(".md"), markdown([*rows, *beside(count)]))


if __name__ == "__main__":
    main()
