"""Ratios measured side by side, interleaved, in one run: `make bench`. Absolute times mean nothing here.

Prints a table and writes `benchmarks/results.json` and `benchmarks/results.md`. About 15 minutes on two cores.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import pmvit
from pmvit.config import PAPER
from pmvit.data.loaders import ImageLoader, create_loader
from pmvit.data.sources import open_source
from pmvit.files import write_text
from pmvit.hosts import host_of
from pmvit.loading import create_model
from pmvit.measuring import MergeCosts, Scores
from pmvit.numbers.tables import format_number
from pmvit.runtime.bench.memory import process_memory
from pmvit.runtime.bench.timing import compare, interleave, speedup
from pmvit.runtime.bench.variants import in_place_plan

import timm  # isort: skip  # after pmvit, which lets torchvision import

DATA = Path(os.environ.get("PMVIT_DATA", "../shared/data"))
SCORES = Path(__file__).with_name("scores.json")  # made by the first part for the others
OUTPUT = Path(__file__).with_name("results.json")
BATCH = 16
SCORING_BATCH = 32

Row = dict[str, Any]


def deit_tiny() -> nn.Module:
    weights = DATA / "weights" / "deit_tiny_patch16_224.safetensors"
    return (
        create_model("deit_tiny_patch16_224", weights)
        if weights.exists()
        else timm.create_model("deit_tiny_patch16_224")
    )


def real_images(model: nn.Module) -> ImageLoader | None:
    """Images to measure on, 32 a batch, if there are any."""
    folder = DATA / "imagenet" / "train"
    if not folder.is_dir():
        return None
    config = host_of(model).data_config()
    return create_loader(open_source(folder, 1000), config, batch_size=32, shuffle=True)


def scores_of(model: nn.Module) -> Scores:
    """Scores of 256 real images, or random ones where there are none."""
    loader = real_images(model)
    if loader is None:
        return pmvit.measure(model, [], method="scored", scorer="random")
    return pmvit.measure(model, loader, method="scored", iterations=8, progress=False)


def noise(model: nn.Module) -> torch.Tensor:
    """32 images of noise, of the size that a model takes."""
    return torch.randn(32, *host_of(model).input_size(), generator=torch.Generator().manual_seed(0))


def merge_costs_of(model: nn.Module) -> MergeCosts:
    """Merge costs on 256 real images, or on noise where there are none."""
    loader = real_images(model) or [noise(model)]
    return pmvit.measure(model, loader, method="measured", limit=256, progress=False)


def training_step(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> None:
    """A plain forward and backward pass with fused attention."""
    F.cross_entropy(model(images), labels).backward()
    model.zero_grad()


def scoring_step(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> None:
    pmvit.measure(model, [(images, labels)], method="scored", progress=False)


def scoring_batch() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = timm.create_model("deit_tiny_patch16_224").eval()
    return model, torch.randn(SCORING_BATCH, 3, 224, 224), torch.randint(0, 1000, (SCORING_BATCH,))


STEPS: dict[str, Callable[[nn.Module, torch.Tensor, torch.Tensor], None]] = {
    "train": training_step,
    "score": scoring_step,
}


def bench_scoring(rounds: int) -> list[Row]:
    scores_of(deit_tiny()).save(SCORES)
    model, images, labels = scoring_batch()
    # Beside the step itself, `score` counts FLOPs and fingerprints the weights once a run: one image's forward pass.
    variants = {name: partial(step, model, images, labels) for name, step in STEPS.items()}
    times = interleave(variants, rounds)
    ratio = speedup(times, "train", "score")  # how many times longer the scoring step takes
    memory = {name: peak_memory(name) for name in STEPS}
    share = memory["score"] / memory["train"]
    return [
        row("scoring step / training step, time, DeiT-Tiny", "at most 1.10", *ratio),
        row("scoring step / training step, peak memory", "at most 1.05", share, share, share),
    ]


def peak_memory(step: str) -> float:
    """Peak memory that three steps add to what is there before, in a process of their own; megabytes."""
    command = [sys.executable, "-m", "benchmarks", "--memory-of", step]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def print_peak_memory(step: str) -> None:
    model, images, labels = scoring_batch()
    before = process_memory("VmHWM")
    for _ in range(3):
        STEPS[step](model, images, labels)
    print(process_memory("VmHWM") - before)


def bench_speed(number: int, rounds: int) -> Row:
    """One compressed model against its original, with the plan of the comparison's name."""
    name, architecture, what, target, work_before = COMPARISONS[number]
    if work_before:
        scores_of(deit_tiny())
    model = deit_tiny() if architecture == "deit_tiny_patch16_224" else timm.create_model(architecture)
    scores = Scores.load(SCORES)  # of DeiT-Tiny: a plan fits every model of the same shape
    keep = float(what.split()[1].rstrip(",")) if what.startswith("keep") else 1.0
    if what == "all kept, operations in place":
        plan = in_place_plan((14, 14), 12)
    else:
        plan = pmvit.plan(scores, keep=keep, **(PAPER if "paper" in what else {}))
    small = pmvit.compress(model.eval(), plan)
    images = torch.randn(BATCH, 3, 224, 224)
    ratio = speedup(compare({"original": model, "compressed": small}, images, rounds), "compressed", "original")
    flops_ratio = pmvit.flops(model).macs / pmvit.flops(small).macs
    label = f"{name}, batch {BATCH}, {what}: speed (FLOPs ratio {format_number(flops_ratio, '.2f')})"
    return row(label, target, *ratio)


TINY, SMALL = "deit_tiny_patch16_224", "deit_small_patch16_224"
# Each comparison runs in a process of its own, as inference does: what other work leaves behind in the memory allocator
# changes speeds by ten percent and more. One row shows it: its process has scored 256 images before.
COMPARISONS = (
    ("DeiT-Tiny", TINY, "all kept", "at least 0.98", False),
    ("DeiT-Tiny", TINY, "all kept, operations in place", "", False),
    ("DeiT-Tiny", TINY, "keep 0.8", "", False),
    ("DeiT-Tiny", TINY, "keep 0.7", "", False),
    ("DeiT-Tiny", TINY, "keep 0.6", "at least 1.65", False),
    ("DeiT-Tiny after other work", TINY, "keep 0.6", "", True),
    ("DeiT-Tiny", TINY, "keep 0.6, the paper's plan", "", False),
    ("DeiT-Small", SMALL, "keep 0.7", "", False),
    ("DeiT-Small", SMALL, "keep 0.6", "at least 1.50", False),
)


def row(what: str, target: str, value: float, low: float, high: float) -> Row:
    return {"what": what, "target": target, "value": value, "low": low, "high": high}


def verdict(row: Row) -> str:
    """Whether the median meets the target, or at least the interval reaches it."""
    if not row["target"]:
        return "-"
    bound = float(row["target"].split()[-1])
    sign = -1 if "most" in row["target"] else 1
    if sign * row["value"] >= sign * bound:
        return "yes"
    return "within the interval" if row["low"] <= bound <= row["high"] else "**no**"


def markdown(rows: list[Row]) -> str:
    lines = [
        "# Benchmarks",
        "",
        f"`make bench`, eager PyTorch {torch.__version__.partition('+')[0]}, {torch.get_num_threads()} CPU threads, "
        f"{platform.machine()}. Medians of paired ratios with 95 % bootstrap intervals, variants interleaved in one "
        "run.",
        "",
        "| what | measured | interval | target | met |",
        "|---|---|---|---|---|",
    ]
    for r in rows:
        value, low, high = (format_number(r[name], ".3f") for name in ("value", "low", "high"))
        lines.append(f"| {r['what']} | {value} | {low} ... {high} | {r['target'] or '-'} | {verdict(r)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--memory-of", choices=tuple(STEPS), help="internal: print the peak memory of a step")
    parser.add_argument("--comparison", type=int, help="internal: print one comparison as JSON")
    arguments = parser.parse_args()
    if arguments.memory_of:
        print_peak_memory(arguments.memory_of)
    elif arguments.comparison is not None:
        print(json.dumps(bench_speed(arguments.comparison, arguments.rounds)))
    else:
        rows = bench_scoring(arguments.rounds)
        for number in range(len(COMPARISONS)):
            command = [sys.executable, "-m", "benchmarks", "--comparison", str(number)]
            command += ["--rounds", str(arguments.rounds)]
            rows.append(json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout))
        SCORES.unlink()
        loop = subprocess.run([sys.executable, "-m", "benchmarks.loop"], stdout=subprocess.PIPE, text=True, check=True)
        ratio = json.loads(loop.stdout.splitlines()[-1])
        what = "training loop (data, logging, checkpoints) / bare steps, time, ViT-Tiny keep 0.6, batch 32"
        rows.append(row(what, "at most 1.05", ratio["value"], ratio["low"], ratio["high"]))
        write_text(OUTPUT, json.dumps(rows, indent=1) + "\n")
        write_text(OUTPUT.with_suffix(".md"), markdown(rows))
        print(markdown(rows))


if __name__ == "__main__":
    main()
