"""Compression without any fine-tuning: keep 0.8, 0.7, 0.6; `pinv` and `residual`; prune 0 and 0.1; and the defaults.

    python -m experiments.without_tuning

Scores come from `imagenet/train` (1,000 images), accuracy from `imagenet/val` (2,000 images) below the folder that
PMVIT_DATA names. Rows are kept in `without_tuning.json` as they are measured, so that a stopped run goes on; the table
goes to `without_tuning.md`. Takes about half an hour on two cores and 3 GB of memory.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pmvit
from experiments.common import Row, Rows, page, percent
from pmvit.config import PAPER
from pmvit.data.loaders import ImageLoader, create_loader
from pmvit.data.sources import open_source
from pmvit.files import write_text
from pmvit.hosts import host_of
from pmvit.loading import create_model
from pmvit.measuring import Scores
from pmvit.numbers.tables import format_number, markdown_table

DATA = Path(os.environ.get("PMVIT_DATA", "../shared/data"))
RESULTS = Path(__file__).with_suffix(".json")
MODELS = ("vit_tiny_patch16_224", "deit_tiny_patch16_224")
BATCH_SIZE = 50
NUMBERS = ("GFLOPs", "share", "top-1", "agreement", "KL")


def configurations() -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    """(table, what, options of `score`, options of `plan`), row by row."""
    for keep in (0.8, 0.7, 0.6):
        for prune in (0.0, 0.1):
            yield "main", "`pinv` (the paper's plan)", {}, {"keep": keep, "prune": prune, **PAPER}
            yield "main", "`residual` (the defaults)", {}, {"keep": keep, "prune": prune}
    at = {"keep": 0.6, "prune": 0.1}
    yield "ablation", "the defaults", {}, at
    yield "ablation", "absolute value by batch, as the paper's code", {"abs_per_sample": False}, at
    yield "ablation", "`pinv` and L2 weights", {}, {**at, "reconstruct": "pinv", "weights": "normalize"}
    yield "ablation", "weights `average`", {}, {**at, "weights": "average"}
    yield "ablation", "grouping `row`", {}, {**at, "grouping": "row"}
    yield "ablation", "grouping `segment`", {}, {**at, "grouping": "segment"}
    yield "ablation", "no attention bias", {}, {**at, "attention_bias": False}
    yield "ablation", "no layer decay", {}, {**at, "layer_decay": 0.0}
    yield "ablation", "`local` budget", {}, {**at, "scope": "local"}
    yield "ablation", "`random` scores", {"scorer": "random"}, at
    yield "ablation", "the paper's choices throughout", {"abs_per_sample": False}, {**at, **PAPER}


def loader(model: nn.Module, half: str, **options: Any) -> ImageLoader:
    config = host_of(model).data_config()
    return create_loader(open_source(DATA / "imagenet" / half, 1000), config, batch_size=BATCH_SIZE, **options)


class Subject:
    """One model and its validation images; the original's logits are computed once."""

    def __init__(self, name: str) -> None:
        self.model = create_model(name, DATA / "weights" / f"{name}.safetensors")
        self.batches = list(loader(self.model, "val"))
        self.original = Original(self.model, self.batches)
        self.scores: dict[str, Scores] = {}

    def measure(self, score_options: dict[str, Any], plan_options: dict[str, Any]) -> Row:
        recipe = json.dumps(score_options)
        if recipe not in self.scores:
            self.scores[recipe] = pmvit.measure(
                self.model, loader(self.model, "train", shuffle=True), method="scored", **score_options
            )
        small = pmvit.compress(self.model, pmvit.plan(self.scores[recipe], **plan_options))
        result = pmvit.evaluate(small, self.batches, reference=self.original)
        macs = pmvit.flops(small).macs
        cost = {"gflops": macs / 1e9, "flops_share": macs / pmvit.flops(self.model).macs}
        return {"score": score_options, "plan": plan_options, **cost, **asdict(result)}


class Original(nn.Module):
    """The original's logits, computed once: `evaluate` asks for them batch by batch, in the same order."""

    def __init__(self, model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        with torch.inference_mode():
            self.logits: dict[int, Tensor] = {images.data_ptr(): model(images) for images, _ in batches}

    def forward(self, images: Tensor) -> Tensor:
        return self.logits[images.data_ptr()]


def measure(rows: Rows) -> None:
    """Measure the rows that are not there yet."""
    for name in MODELS:
        subject = cache(partial(Subject, name))
        for part, what, score_options, plan_options in configurations():
            at = {"keep": plan_options["keep"], "prune": plan_options["prune"]}
            key = {"model": name, "table": part, "what": what, **at}
            rows.add(key, lambda: subject().measure(score_options, plan_options))  # noqa: B023  # called at once


def markdown(rows: list[Row]) -> str:
    """Both tables, from the measured rows alone."""
    text = (
        f"Scores on 1,000 ImageNet training images, measured on {rows[0]['images']:,} validation images. Agreement and "
        "KL are with the uncompressed model on the same images. The standard error of a top-1 is about 1 point, but "
        "all rows see the same images: compare by agreement and KL."
    )
    parts = []
    for name in MODELS:
        own = [row for row in rows if row["key"]["model"] == name]
        if own:
            plans = [[*_named(row, "keep", "prune", "what"), *_numbers(row)] for row in own if _is_in(row, "main")]
            changes = [[*_named(row, "what"), *_numbers(row)] for row in own if _is_in(row, "ablation")]
            parts += [f"## {name}: original {percent(own[0]['reference_top1'])}"]
            parts += [markdown_table(["keep", "prune", "plan", *NUMBERS], plans)]
            parts += [
                "One choice changed at a time, keep 0.6 and prune 0.1:",
                markdown_table(["changed", *NUMBERS], changes),
            ]
    return page("without_tuning", "Compression without fine-tuning", rows, text, *parts)


def _is_in(row: Row, part: str) -> bool:
    return bool(row["key"]["table"] == part)


def _named(row: Row, *names: str) -> list[str]:
    return [str(row["key"][name]) for name in names]


def _numbers(row: Row) -> list[str]:
    cost = [format_number(row["gflops"], ".3f"), percent(row["flops_share"])]
    return [*cost, percent(row["top1"]), percent(row["agreement"]), format_number(row["kl"], ".3f")]


def main() -> None:
    torch.manual_seed(0)
    rows = Rows(RESULTS)
    measure(rows)
    write_text(RESULTS.with_suffix(".md"), markdown(rows.rows))


if __name__ == "__main__":
    main()
