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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pmvit
from pmvit.data.folder import FolderLoader, image_folder
from pmvit.files import write_text
from pmvit.loading import create_model
from pmvit.models import adapter_for
from pmvit.planning import PAPER

DATA = Path(os.environ.get("PMVIT_DATA", "../shared/data"))
RESULTS = Path(__file__).with_suffix(".json")
MODELS = ("vit_tiny_patch16_224", "deit_tiny_patch16_224")
BATCH_SIZE = 50

Row = dict[str, Any]


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


def loader(model: nn.Module, half: str, **options: Any) -> FolderLoader:
    config = adapter_for(model).data_config(model)
    return image_folder(DATA / "imagenet" / half, config, num_classes=1000, batch_size=BATCH_SIZE, **options)


class Original(nn.Module):
    """The original's logits, computed once: `evaluate` asks for them batch by batch, in the same order."""

    def __init__(self, model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        with torch.inference_mode():
            self.logits = {images.data_ptr(): model(images) for images, _ in batches}

    def forward(self, images: Tensor) -> Tensor:
        return self.logits[images.data_ptr()]


def measure(rows: list[Row]) -> None:
    """Measure the rows that are not there yet and write them one by one."""
    for name in MODELS:
        model = create_model(name, DATA / "weights" / f"{name}.safetensors")
        batches = list(loader(model, "val"))
        reference = Original(model, batches)
        cost = pmvit.flops(model).macs
        scores: dict[str, pmvit.Scores] = {}
        for table, what, score_options, plan_options in configurations():
            key = [name, table, what, plan_options["keep"], plan_options["prune"]]
            if any(row["key"] == key for row in rows):
                continue
            recipe = json.dumps(score_options)
            if recipe not in scores:
                scores[recipe] = pmvit.score(model, loader(model, "train", shuffle=True), **score_options)
            small = pmvit.compress(model, pmvit.plan(scores[recipe], **plan_options))
            result = pmvit.evaluate(small, batches, reference=reference)
            macs = pmvit.flops(small).macs
            made = {"score": score_options, "plan": plan_options, "gflops": macs / 1e9, "flops_share": macs / cost}
            rows.append({"key": key, **made, **asdict(result)})
            write_text(RESULTS, json.dumps(rows, indent=1) + "\n")
            print(key, f"top-1 {result.top1:.2%}, KL {result.kl:.3f}", flush=True)


def markdown(rows: list[Row]) -> str:
    """Both tables, from the measured rows alone."""
    images = rows[0]["images"]
    lines = [
        "# Compression without fine-tuning",
        "",
        "`python -m experiments.without_tuning` made this page: scores on 1,000 ImageNet training images, measured on "
        f"{images:,} validation images. Agreement and KL are with the uncompressed model on the same images. The "
        "standard error of a top-1 is about 1 point, but all rows see the same images: compare by agreement and KL.",
    ]
    for name in MODELS:
        own = [row for row in rows if row["key"][0] == name]
        if not own:
            continue
        lines += ["", f"## {name}: original {own[0]['reference_top1']:.1%}", ""]
        lines += [
            "| keep | prune | plan | GFLOPs | share | top-1 | agreement | KL |",
            "|---|---|---|---|---|---|---|---|",
        ]
        lines += [_line(row, f"{row['key'][3]} | {row['key'][4]} | {row['key'][2]}") for row in _of(own, "main")]
        lines += ["", "One choice changed at a time, keep 0.6 and prune 0.1:", ""]
        lines += ["| changed | GFLOPs | share | top-1 | agreement | KL |", "|---|---|---|---|---|---|"]
        lines += [_line(row, row["key"][2]) for row in _of(own, "ablation")]
    return "\n".join(lines) + "\n"


def _of(rows: list[Row], table: str) -> list[Row]:
    return [row for row in rows if row["key"][1] == table]


def _line(row: Row, start: str) -> str:
    numbers = f"{row['gflops']:.3f} | {row['flops_share']:.1%} | {row['top1']:.1%} | {row['agreement']:.1%}"
    return f"| {start} | {numbers} | {row['kl']:.3f} |"


def main() -> None:
    torch.manual_seed(0)
    rows: list[Row] = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    measure(rows)
    write_text(RESULTS.with_suffix(".md"), markdown(rows))


if __name__ == "__main__":
    main()
