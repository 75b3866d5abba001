"""Adaptive plans of a metric that was measured on other images than the model's own, or on none.

    python -m experiments.without_images [--images 1000]

Beside the metric of `imagenet/train`, whose rows `adaptive.json` has for the same images of `imagenet/val`: that of
images that pmvit generates, of photographs of another kind (Oxford Pets), of the other tiny model on its own images,
and directions at random. What is generated was chosen on 500 images of `imagenet/train`. Rows are kept in
`without_images.json` as they are measured, so that a stopped run goes on; the tables go to `without_images.md`.
Takes about an hour on two cores.
"""

import json
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

import pmvit
from experiments import adaptive
from experiments.common import Row
from experiments.measured_planner import Candidates
from experiments.paired import numbers, run, tables
from experiments.without_tuning import BATCH_SIZE, DATA, MODELS, loader
from pmvit.data.loaders import create_loader
from pmvit.data.sources import open_source
from pmvit.files import write_text
from pmvit.hosts import host_of
from pmvit.measuring import TokenMetric

RESULTS = Path(__file__).with_suffix(".json")
SHARES = (0.79, 0.68, 0.58)  # of the FLOPs of the blocks
OWN, GENERATED, PETS = "training images", "generated images", "Oxford Pets"
TRANSFER, RANDOM = "training images, the other model's", "none: random directions"
METHODS = (OWN, GENERATED, TRANSFER, RANDOM, PETS)
LIMIT = 256  # images to measure on, as many as are generated
SEED = 0


class WithoutImages(Candidates):
    """One model, and adaptive plans by a metric from elsewhere."""

    other: "WithoutImages"

    @cached_property
    def metrics(self) -> dict[str, TokenMetric]:
        return {}

    def metric(self, source: str) -> TokenMetric:
        if source not in self.metrics:
            self.metrics[source] = self._measured(source)
        return self.metrics[source]

    def _measured(self, source: str) -> TokenMetric:
        if source == GENERATED:
            return pmvit.measure(self.model, method="adaptive")
        if source == PETS:
            config = host_of(self.model).data_config()
            pets = create_loader(open_source(DATA / "pets/images/train"), config, batch_size=BATCH_SIZE, shuffle=True)
            return pmvit.measure(self.model, pets, method="adaptive", limit=LIMIT)
        if source == OWN:
            images = loader(self.model, "train", shuffle=True)
            return pmvit.measure(self.model, images, method="adaptive", limit=LIMIT)
        own = self.metric(GENERATED)  # for its shape
        if source == TRANSFER:
            return replace(own, projections=self.other.metric(OWN).projections)
        generator = torch.Generator().manual_seed(SEED)
        depth, width, rank = own.projections.shape
        bases = [torch.linalg.qr(torch.randn(width, rank, generator=generator))[0] for _ in range(depth)]
        return replace(own, projections=torch.stack(bases))

    def make(self, method: str, share: float) -> nn.Module:
        budget = self.cost.outside + share * (self.cost.macs - self.cost.outside)
        return pmvit.compress(self.model, pmvit.plan(self.metric(method), gflops=budget / 1e9))


def measure(rows: list[Row], count: int) -> None:
    """Measure the rows that are not there yet and write them one by one."""
    everything = {name: WithoutImages(name, count) for name in MODELS}
    first, second = everything.values()
    first.other, second.other = second, first
    for share in sorted(SHARES):
        for method in METHODS[1:]:
            for name, candidates in everything.items():
                key = [name, share, method, count]
                if all(row["key"] != key for row in rows):
                    rows.append({"key": key, **candidates.row(method, share)})
                    write_text(RESULTS, json.dumps(rows) + "\n")
                    print(key, f"KL {numbers(rows[-1], 'kl').mean():.4f}", flush=True)


def beside(count: int) -> list[Row]:
    """Rows of `adaptive` for the same images, which are the first of its own."""
    rows: list[Row] = json.loads(adaptive.RESULTS.read_text())
    found = [row for row in rows if row["key"][2] == adaptive.ADAPTIVE and row["key"][3] >= count]
    of_images = ("original", "correct", "agrees", "kl")
    return [
        {**row, **{name: row[name][:count] for name in of_images}, "key": [*row["key"][:2], OWN, count]}
        for row in found
    ]


def markdown(rows: list[Row]) -> str:
    """The tables, from the measured rows alone."""
    count = rows[0]["key"][3] if rows else 0
    generated = tables([*beside(count), *rows], MODELS, SHARES, METHODS, ".4f", against=OWN)
    lines = [
        "# Plans without images",
        "",
        "`python -m experiments.without_images` made this page. Adaptive plans at equal FLOPs, nothing tuned; they "
        "differ in what the metric was measured on, which stands for the plan. *Training images* are 1,000 of the "
        "model's own ([rows](adaptive.md)); *generated images* are the 256 that pmvit makes itself where it gets none; "
        "*Oxford Pets* are 256 photographs of cats and dogs. *The other model's* is the metric of the other of these "
        "two models, which have the same shape, on 256 training images. *Random directions* are 32 orthogonal ones. "
        "The last column is the difference of the KL from that of training images, image by image: below zero is "
        "better. In brackets 95 % intervals, from 2,000 resamplings of the images.",
    ]
    return "\n".join([*lines, *generated]) + "\n"


if __name__ == "__main__":
    run(__doc__, RESULTS, measure, markdown)
