"""Ratios measured side by side, interleaved, in one run: `make bench`. Absolute times mean nothing here.

Prints a table and writes `benchmarks/results.json` and `benchmarks/results.md`. Takes about ten minutes on two cores.
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
from pmvit.data.folder import image_folder
from pmvit.files import write_text
from pmvit.loading import create_model
from pmvit.models import adapter_for
from pmvit.planning import PAPER
from pmvit.runtime.timing import compare, interleave, speedup
from scripts.sweep import permuted_plan

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


def scores_of(model: nn.Module) -> pmvit.Scores:
    """Scores of 256 real images, or random ones where there are none."""
    folder = DATA / "imagenet" / "train"
    if not folder.is_dir():
        return pmvit.score(model, [], scorer="random")
    loader = image_folder(folder, adapter_for(model).data_config(model), num_classes=1000, batch_size=32, shuffle=True)
    return pmvit.score(model, loader, iterations=8, progress=False)


def training_step(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> None:
    """A plain forward and backward pass with fused attention."""
    F.cross_entropy(model(images), labels).backward()
    model.zero_grad()


def scoring_step(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> None:
    pmvit.score(model, [(images, labels)], progress=False)


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
    contenders = {name: partial(step, model, images, labels) for name, step in STEPS.items()}
    times = interleave(contenders, rounds)
    ratio = speedup(times, "train", "score")  # how many times longer the scoring step takes
    memory = {name: peak_memory(name) for name in STEPS}
    share = memory["score"] / memory["train"]
    return [
        row("scoring step / training step, time, DeiT-Tiny", "at most 1.10", ratio.median, ratio.low, ratio.high),
        row("scoring step / training step, peak memory", "at most 1.05", share, share, share),
    ]


def peak_memory(step: str) -> float:
    """Peak memory that three steps add to what is there before, in a process of their own; megabytes."""
    command = [sys.executable, "-m", "benchmarks", "--memory-of", step]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def print_peak_memory(step: str) -> None:
    model, images, labels = scoring_batch()
    before = high_water_mark()
    for _ in range(3):
        STEPS[step](model, images, labels)
    print(high_water_mark() - before)


def high_water_mark() -> float:
    """Most memory this process ever had, in megabytes; Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def bench_speed(name: str, model: nn.Module, targets: dict[str, str], rounds: int) -> list[Row]:
    """Compressed models against the original; `targets` names the plans."""
    scores = pmvit.Scores.load(SCORES)  # of DeiT-Tiny: a plan fits every model of the same shape
    plans = {f"keep {keep}": pmvit.plan(scores, keep=keep, prune=0.1) for keep in (0.8, 0.7, 0.6)}
    plans["keep 0.6, the paper's pinv"] = pmvit.plan(scores, keep=0.6, prune=0.1, **PAPER)
    plans["all-kept plan"] = pmvit.Plan.keep_all((14, 14), 12)
    plans["all kept, operations in place"] = permuted_plan((14, 14), 12)
    models = {plan: pmvit.compress(model, plans[plan]) for plan in targets}
    times = compare({"original": model, **models}, torch.randn(BATCH, 3, 224, 224), rounds)
    original = pmvit.flops(model).macs
    rows = []
    for plan, target in targets.items():
        ratio = speedup(times, plan, "original")
        flops_ratio = original / pmvit.flops(models[plan]).macs
        what = f"{name}, batch {BATCH}, {plan}: speed (FLOPs ratio {flops_ratio:.2f})"
        rows.append(row(what, target, ratio.median, ratio.low, ratio.high))
    return rows


def bench_tiny(rounds: int) -> list[Row]:
    targets = {"keep 0.8": "", "keep 0.7": "", "keep 0.6": "at least 1.65", "keep 0.6, the paper's pinv": ""}
    return bench_speed("DeiT-Tiny", deit_tiny().eval(), targets, rounds)


def bench_tiny_after_work(rounds: int) -> list[Row]:
    """The same after other work in the process: the memory allocator then keeps what it has, which helps the original."""
    scores_of(deit_tiny())
    return bench_speed("DeiT-Tiny, after other work", deit_tiny().eval(), {"keep 0.6": ""}, rounds)


def bench_overhead(rounds: int) -> list[Row]:
    targets = {"all-kept plan": "at least 0.98", "all kept, operations in place": ""}
    return bench_speed("DeiT-Tiny", deit_tiny().eval(), targets, rounds)


def bench_small(rounds: int) -> list[Row]:
    small = timm.create_model("deit_small_patch16_224").eval()
    return bench_speed("DeiT-Small", small, {"keep 0.7": "", "keep 0.6": "at least 1.50"}, rounds)


# Each part runs in a process of its own, as inference does: what one leaves behind in the memory allocator changes the
# speed of the next.
PARTS: dict[str, Callable[[int], list[Row]]] = {
    "scoring": bench_scoring,
    "overhead": bench_overhead,
    "tiny": bench_tiny,
    "tiny-after-work": bench_tiny_after_work,
    "small": bench_small,
}


def row(what: str, target: str, value: float, low: float, high: float) -> Row:
    bound = float(target.split()[-1]) if target else None
    met = None if bound is None else (value <= bound if "most" in target else value >= bound)
    return {"what": what, "target": target, "value": value, "low": low, "high": high, "met": met}


def markdown(rows: list[Row]) -> str:
    lines = [
        "# Benchmarks",
        "",
        f"`make bench`, eager PyTorch {torch.__version__.partition('+')[0]}, {torch.get_num_threads()} CPU threads, "
        f"{platform.machine()}. Medians of paired ratios with 95 % bootstrap intervals, contenders interleaved in one "
        "run.",
        "",
        "| what | measured | interval | target | met |",
        "|---|---|---|---|---|",
    ]
    for r in rows:
        met = {True: "yes", False: "**no**", None: "-"}[r["met"]]
        lines.append(
            f"| {r['what']} | {r['value']:.3f} | {r['low']:.3f} ... {r['high']:.3f} | {r['target'] or '-'} | {met} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--memory-of", choices=tuple(STEPS), help="internal: print the peak memory of a step")
    parser.add_argument("--part", choices=tuple(PARTS), help="internal: print the rows of one part as JSON")
    arguments = parser.parse_args()
    if arguments.memory_of:
        print_peak_memory(arguments.memory_of)
    elif arguments.part:
        print(json.dumps(PARTS[arguments.part](arguments.rounds)))
    else:
        rows = []
        for part in PARTS:
            command = [sys.executable, "-m", "benchmarks", "--part", part, "--rounds", str(arguments.rounds)]
            rows += json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
        SCORES.unlink()
        write_text(OUTPUT, json.dumps(rows, indent=1) + "\n")
        write_text(OUTPUT.with_suffix(".md"), markdown(rows))
        print(markdown(rows))


if __name__ == "__main__":
    main()
