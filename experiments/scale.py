"""What adaptive plans save in models that are too large to try here: ViT-B, L and H at 224 and 518 pixels, on paper.

    python -m experiments.scale

FLOPs are counted on models without memory. Speed-ups are predicted from costs that are measured one operation at a time
with random weights: a block on so many tokens, a merge step, the patch embedding. The whole ViT-B at 224 pixels is
measured as well, to see what such a prediction is worth. Nothing else should run meanwhile. About two minutes on two
cores. Rows go to `scale.json`, tables to `scale.md`.
"""

import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import pmvit
from experiments.common import ORIGINAL, Row, Rows, Settings, page, run
from pmvit.adaptive import MergeStep
from pmvit.config import MetricConfig
from pmvit.hosts import host_of
from pmvit.hosts.adaptive import spares_last_mlp
from pmvit.measuring import TokenMetric
from pmvit.measuring.flops import model_cost
from pmvit.numbers.tables import format_number, markdown_table
from pmvit.planning.adaptive import AdaptivePlan

import timm  # isort: skip  # after pmvit, which lets torchvision import

NAME = Path(__file__).stem
MODELS = {
    "ViT-B/16": ("vit_base_patch16_224", 224),
    "ViT-L/16": ("vit_large_patch16_224", 224),
    "ViT-H/14": ("vit_huge_patch14_224", 224),
    "ViT-B/14": ("vit_base_patch14_dinov2", 518),
    "ViT-L/14": ("vit_large_patch14_dinov2", 518),
    "ViT-H/14 at 518": ("vit_huge_patch14_224", 518),
}
SHARES = (0.79, 0.6)  # of the FLOPs of the blocks
CHECKED = "ViT-B/16"
ROUNDS = 7
EPOCHS, IMAGES, BYTES = 60, 1_281_167, 147_897_477_120  # the paper's epochs; ImageNet's training images, and their file
GPUS, PEAK, USED = 8, 312e12, 0.4  # NVIDIA's figure for an A100 in bfloat16, and what part of it one may hope for
SAVED = 16  # activations a token and channel that the backward pass of a block needs


def original_of(name: str, size: int) -> nn.Module:
    return timm.create_model(name, img_size=size).eval()


def plan_of(model: nn.Module, share: float) -> AdaptivePlan:
    """The plan for a share of the work of the blocks: how many tokens merge where does not depend on the weights."""
    cost, host, config = model_cost(model), host_of(model), MetricConfig()
    width = cost.blocks[0].width
    grid: Any = host.layout.grid
    projections = torch.randn(len(cost.blocks), width, config.rank, generator=torch.Generator().manual_seed(0))
    prefix = host.layout.num_prefix
    metric = TokenMetric(projections, grid, prefix, cost, spares_last_mlp(host), config, 0, "none", "none")
    return pmvit.plan(metric, gflops=(cost.outside + share * (cost.macs - cost.outside)) / 1e9)


def count(name: str, size: int, share: float) -> Row:
    """FLOPs and tokens, on a model without memory."""
    with torch.device("meta"):
        model = original_of(name, size)
    plan = plan_of(model, share)
    metric = plan.metric
    return {
        "width": metric.cost.blocks[0].width,
        "prefix": metric.num_prefix,
        "patches": metric.num_patches,
        "merges": list(plan.merges),
        "tokens": list(plan.tokens),
        "macs": [metric.cost.macs, metric.macs(plan.merges)],
    }


def time_operations(name: str, size: int, shares: dict[float, Row]) -> Row:
    """Seconds of every operation that the original and the plans are made of, all in turns: medians."""
    one_block: Any = timm.create_model(name, img_size=size, depth=1).eval()
    found = next(iter(shares.values()))
    width, prefix, patches = found["width"], found["prefix"], found["patches"]
    image, block = torch.randn(1, 3, size, size), one_block.blocks[0]
    work: dict[str, Callable[[], Any]] = {"embedding": lambda: one_block.patch_embed(image)}

    def add_block(tokens: int) -> None:
        x = torch.randn(1, prefix + tokens, width)
        work[f"block {tokens}"] = lambda: block(x)

    def add_step(before: int, merges: int) -> None:
        x, config = torch.randn(1, prefix + before, width), MetricConfig()
        step = MergeStep(torch.randn(width, config.rank), before, merges, prefix)
        sizes = torch.ones(1, prefix + before, 1)
        work[f"step {before} {merges}"] = lambda: step(x, sizes, before)

    add_block(patches)
    for row in shares.values():
        for merges, left in zip(row["merges"], row["tokens"], strict=True):
            add_block(left)
            if merges:
                add_step(left + merges, merges)
    with torch.inference_mode():
        turns = [{name: seconds(each) for name, each in work.items()} for _ in range(ROUNDS + 1)][1:]
    return {"seconds": {name: statistics.median(turn[name] for turn in turns) for name in work}}


def seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def check(share: float) -> Row:
    """Times as fast as the original, of the whole model."""
    model = original_of(*MODELS[CHECKED])
    small = pmvit.optimize_for_inference(pmvit.compress(model, plan_of(model, share)))
    models = {ORIGINAL: model, "plan": small}
    found = pmvit.benchmark(model, against=models, batches=[1], rounds=ROUNDS * 2, progress=False)
    (row,) = (row for row in found.rows if row.variant == "plan")
    return {"speedup": list(row.speedup or ())}


def measure(rows: Rows, settings: Settings) -> None:
    for title, (name, size) in MODELS.items():
        for share in SHARES:
            rows.add({"model": title, "share": share}, lambda: count(name, size, share))  # noqa: B023
        known = {
            row["key"]["share"]: row for row in rows.rows if row["key"].get("model") == title and "share" in row["key"]
        }
        rows.add({"model": title, "timed": "operations"}, lambda: time_operations(name, size, known))  # noqa: B023
        gc.collect()
    for share in SHARES:
        rows.add({"checked": CHECKED, "at": share}, lambda: check(share))  # noqa: B023


def predicted(row: Row, timed: dict[str, float]) -> float:
    """Times as fast as the original: the sum of what it is made of, to the sum of what is left."""
    plain: float = timed[f"block {row['patches']}"]
    before = timed["embedding"] + len(row["tokens"]) * plain
    after = timed["embedding"]
    for merges, left in zip(row["merges"], row["tokens"], strict=True):
        after += timed[f"block {left}"] + (timed[f"step {left + merges} {merges}"] if merges else 0.0)
    return before / after


def saved_bytes(row: Row, tokens: list[int]) -> float:
    """Of an image in training, in bfloat16."""
    elements: int = SAVED * row["width"] * sum(row["prefix"] + left for left in tokens)
    return 2.0 * elements


def gpu_hours(row: Row) -> float:
    """Of a fine-tuning with the original as the teacher."""
    teacher, student = map(float, row["macs"])
    return IMAGES * EPOCHS * 2 * (3 * student + teacher) / (PEAK * USED) / 3600


def markdown(rows: list[Row]) -> str:
    counted = [row for row in rows if "share" in row["key"]]
    timed = {row["key"]["model"]: row["seconds"] for row in rows if "timed" in row["key"]}
    checked = {row["key"]["at"]: row["speedup"] for row in rows if "checked" in row["key"]}
    lines, tokens = [], []
    for row in counted:
        model, share = row["key"]["model"], row["key"]["share"]
        whole = [row["patches"]] * len(row["tokens"])
        memory = [saved_bytes(row, each) / 2**20 for each in (whole, row["tokens"])]
        speed = predicted(row, timed[model]) if model in timed else None
        hours = gpu_hours(row)
        cells = [" -> ".join(format_number(macs / 1e9, ".1f") for macs in row["macs"])]
        cells += [" -> ".join(format_number(each, ",.0f") for each in memory)]
        cells += [f"{format_number(row['macs'][0] / row['macs'][1], '.2f')}x"]
        cells += ["-" if speed is None else f"{format_number(speed, '.2f')}x"]
        cells += [format_number(hours, ",.0f"), format_number(hours / GPUS / 24, ".1f")]
        lines.append((model, str(share), *cells))
        tokens.append((model, str(share), ", ".join(map(str, row["tokens"]))))
    titles = ("", "share", "GFLOPs", "MiB an image", "FLOPs", "predicted, CPU", "GPU-hours", "days on 8 GPUs")
    text = "Adaptive plans at a share of the FLOPs of the blocks; nothing of this size was trained or run on a GPU."
    formulas = [
        "Each column and its formula:",
        "- *GFLOPs*: multiply-accumulates of the original and with the plan, counted on the graph, steps included.",
        f"- *MiB an image*: activations that the backward pass of all blocks needs, 2 bytes x {SAVED} x width x "
        "tokens, summed over the blocks, with an attention that keeps no matrix of all pairs. What residual "
        "un-merging keeps is not in it; a classifier that reads the class token needs none.",
        "- *Predicted, CPU*: (embedding + blocks x block(all)) / (embedding + sum of block(tokens) + step), each "
        "operation measured alone, in turns, batch 1, eager, two threads. "
        + "; ".join(
            f"the whole {CHECKED} at {share} was measured at {format_number(speed[0], '.2f')}x, optimised"
            for share, speed in checked.items()
        )
        + ".",
        f"- *GPU-hours*: images x epochs x 2 x (3 x GFLOPs of the plan + those of the teacher) / (peak x used): "
        f"{IMAGES:,} images, {EPOCHS} epochs as in the paper, {PEAK / 1e12:.0f} TFLOPS (an A100 in bfloat16, by its "
        f"maker), of which {USED:.0%} are used. That share is an assumption: measure yours, and divide.",
        f"- Read from disk: {EPOCHS} x {BYTES / 1e9:.1f} GB = {EPOCHS * BYTES / 1e12:.1f} TB "
        f"({BYTES / IMAGES / 1e3:.0f} kB an image), whatever the model.",
    ]
    merged = markdown_table(("", "share", "patch tokens of each block"), tokens)
    table = markdown_table(titles, lines)
    return page(NAME, "Larger models, on paper", rows, text, table, "\n".join(formulas), f"## Tokens\n\n{merged}")


if __name__ == "__main__":
    run(NAME, measure, markdown)
