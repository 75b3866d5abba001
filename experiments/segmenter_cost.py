"""What Segmenter ViT-L/16 costs at 640 x 640, beside the figures the paper has for it: GFLOPs, time and memory.

    python -m experiments.segmenter_cost

Weights and scores are random: the cost depends on the number of tokens alone. FLOPs are counted for plans with the
same number of tokens in every block (`local`) and for plans by score (`global`), and once more under other conventions
of counting, to see which of them the paper may have followed. The time is that of one image in eager PyTorch on one
thread, the models taking turns; the memory is measured in a process a model. Results are kept in `segmenter_cost.json`
as they are measured, the page is `segmenter_cost.md`. Takes about a quarter of an hour on one core, and 8 GB.
"""

import ctypes
import gc
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import pmvit
from experiments.common import percent
from experiments.segmenter_conventions import (
    CLASSES,
    DEPTH,
    ENCODER,
    ONE_CHANGE,
    PAPER,
    PRUNE,
    SIDE,
    TOKENS,
    all_conventions,
)
from pmvit.config import ScoreConfig
from pmvit.config.planning import Scope
from pmvit.files import write_text
from pmvit.hosts import host_of
from pmvit.hosts.segmenter.model import Segmenter, create_segmenter
from pmvit.measuring import Scores
from pmvit.measuring.flops import ModelCost, model_cost
from pmvit.numbers.tables import format_number
from pmvit.planning import Plan
from pmvit.runtime.bench.memory import process_memory
from pmvit.runtime.bench.timing import speedup

RESULTS = Path(__file__).with_suffix(".json")
ROUNDS = 5
ORIGINAL = "original"
MEMORY = ("encoder", "encoder and decoder", "peak")

Results = dict[str, Any]


def segmenter(device: str) -> Segmenter:
    torch.manual_seed(0)
    with torch.device(device):
        return create_segmenter(ENCODER, classes=CLASSES, image_size=SIDE)


def random_scores(model: nn.Module, cost: ModelCost) -> Scores:
    """Scores as `pmvit.measure(..., scorer="random")` gives them, for a model whose weights are not there."""
    host = host_of(model)
    layout = host.layout
    generator = torch.Generator().manual_seed(0)
    return Scores(
        values=torch.rand(DEPTH, TOKENS, generator=generator, dtype=torch.float64),
        grid=layout.grid,
        num_prefix=layout.num_prefix,
        cost=cost,
        config=ScoreConfig(scorer="random"),
        iterations=0,
        images=0,
        model="random",
        data="none",
        skip=host.reading().scored_skip,
    )


def plan_of(scores: Scores, keep: float, scope: Scope) -> Plan:
    return pmvit.plan(scores, keep=keep, prune=PRUNE, scope=scope)


def count() -> Results:
    model = segmenter("meta")
    cost = model_cost(model)
    scores = random_scores(model, cost)
    rows = [{"keep": None, "local": pmvit.flops(model).gflops, "global": None, "paper": None}]
    for keep, printed in PAPER.items():
        counts: dict[str, Any] = {"keep": keep, "paper": printed}
        for scope in ("local", "global"):
            small = pmvit.flops(pmvit.compress(model, plan_of(scores, keep, scope)))
            counts |= {scope: small.gflops, "module_mflops": small.module_macs / 1e6}
        rows.append(counts)
    best = min(all_conventions(), key=lambda convention: convention.deviation(cost))
    conventions = [
        {
            "convention": str(convention),
            "original": convention.gflops(cost, 1.0),
            "range": {keep: [convention.gflops(cost, keep), convention.most(cost, keep)] for keep in PAPER},
            "keep_for": {keep: convention.keep_for(cost, printed) for keep, printed in PAPER.items()},
            "deviation": convention.deviation(cost),
        }
        for convention in dict.fromkeys((*ONE_CHANGE, best))
    ]
    return {"flops": rows, "conventions": conventions, "tried": sum(1 for _ in all_conventions())}


def compressed(model: nn.Module, keep: float | None, *, inplace: bool) -> nn.Module:
    if keep is None:
        return model
    plan = plan_of(random_scores(model, model_cost(segmenter("meta"))), keep, "global")
    return pmvit.compress(model, plan, inplace=inplace)


def measure_time(results: Results) -> None:
    """Add rounds, in which the models take turns, until there are enough of them."""
    torch.set_num_threads(1)
    model = segmenter("cpu")
    models = {ORIGINAL: model, **{str(keep): compressed(model, keep, inplace=False) for keep in PAPER}}
    image = torch.randn(1, 3, SIDE, SIDE)
    times: dict[str, list[float]] = results.setdefault("cpu_seconds", {name: [] for name in models})
    with torch.inference_mode():
        for number in range(ROUNDS):
            for name, variant in models.items():
                if len(times[name]) == number:
                    start = time.process_time()
                    variant(image)
                    times[name].append(time.process_time() - start)
                    write(results)


def _memory(keep: float | None) -> dict[str, float]:
    model: Any = compressed(segmenter("cpu"), keep, inplace=True)
    image = torch.randn(1, 3, SIDE, SIDE)
    with torch.inference_mode():
        encoder = _above(partial(model.encoder.forward_features, image))
        return {"encoder_mb": encoder, "whole_mb": _above(partial(model, image)), "peak_mb": process_memory("VmHWM")}


def _above(run: Callable[[], object]) -> float:
    """Megabytes that a run takes above what is there before it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = process_memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    run()
    return process_memory("VmHWM") - before


def measure_memory(results: Results) -> None:
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # what is freed is given back, so that the peak is what is needed
    found = results.setdefault("memory", {})
    for keep in (None, *PAPER):
        name = ORIGINAL if keep is None else str(keep)
        if name not in found:
            with multiprocessing.get_context("spawn").Pool(1) as process:
                found[name] = process.apply(_memory, (keep,))
            write(results)


def write(results: Results) -> None:
    write_text(RESULTS, json.dumps(results, indent=1) + "\n")


def markdown(results: Results) -> str:
    lines = [PREAMBLE.format(rounds=len(results["cpu_seconds"][ORIGINAL]))]
    titles = ("keep", "GFLOPs, local", "global", "paper", "ours / paper", "CPU seconds", "speed", *MEMORY)
    lines += [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in results["flops"]:
        name = ORIGINAL if row["keep"] is None else str(row["keep"])
        memory = results["memory"][name]
        cells = [
            name,
            format_number(row["local"], ".1f"),
            format_number(row["global"], ".1f"),
            "not given" if row["paper"] is None else str(row["paper"]),
            "-" if row["paper"] is None else format_number(row["global"] / row["paper"], ".3f"),
            format_number(statistics.median(results["cpu_seconds"][name]), ".1f"),
            "1.00x" if name == ORIGINAL else str(speedup(results["cpu_seconds"], name, ORIGINAL)),
            *(f"{format_number(memory[part], ',.0f')} MB" for part in ("encoder_mb", "whole_mb", "peak_mb")),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "## What the paper may have counted", "", CONVENTIONS.format(tried=results["tried"])]
    lines += [f"| counted | original | {' | '.join(f'r {keep} ({PAPER[keep]})' for keep in PAPER)} | off by |"]
    lines += ["|---|---|---|---|---|---|"]
    for row in results["conventions"]:
        ranges = [f"{format_number(low, '.0f')} - {format_number(high, '.0f')}" for low, high in row["range"].values()]
        cells = [row["convention"], format_number(row["original"], ".0f"), *ranges, percent(row["deviation"])]
        closest = row["deviation"] == min(other["deviation"] for other in results["conventions"])
        lines.append(f"| {' | '.join(f'**{cell}**' if closest else cell for cell in cells)} |")
    shares = " / ".join(format_number(share, ".2f") for share in results["conventions"][0]["keep_for"].values())
    return "\n".join([*lines, "", NOTES.format(shares=shares)])


PREAMBLE = """# Segmenter ViT-L/16 at 640 x 640: GFLOPs, time, memory

`python -m experiments.segmenter_cost` made this page. Mask transformer, 150 classes, random weights and scores; the
first two and the last two blocks are left alone, prune 0.1. GFLOPs are multiply-accumulates, merge and reconstruct
included, counted on the graph that runs; `local` plans keep the same number of tokens in every block, `global` ones
decide by score. Time: of one image in eager PyTorch, global plans, as CPU time of one thread, since the machine did
other work beside; {rounds} rounds in turns; the speed is the median of the rounds' ratios with its 95 % interval.
Memory of a process that holds this model alone: what running the encoder takes beside the weights, what the whole model
takes, and the peak with the weights; the allocator gives back at once what is freed (`MALLOC_MMAP_THRESHOLD_=65536`),
else freed blocks of many sizes count as well.
"""
CONVENTIONS = """The least and the most GFLOPs of plans that keep a share r: the least with the same number of tokens in
all blocks, the most with some blocks kept whole and others emptied. "Off by" is how far the paper's figures, in
brackets, lie outside of these at the worst. The closest of {tried} combinations of these changes is bold.
"""
NOTES = """None of these ways of counting meets all three figures, whatever the scores. With everything that runs
counted, the cheapest plans cost more than the paper prints; its figures would take shares of {shares}. With the encoder
alone, even the dearest plan at r 0.8 costs less. Of the readings that leave four blocks alone, as the paper does, and
count all that runs, two come within 2 %: pruned tokens taken off r, and r as the share of the tokens of all 24 blocks,
so that the 20 compressed ones keep fewer than r. With so many combinations for three figures, closeness proves little.
The figures are also more curved in r than attention can explain: from 0.8 to 0.7 they fall by 72, from 0.7 to 0.5 by 46
for each tenth.

Memory does not fall with r: four blocks run on all tokens in any case, and the scores of 150 classes at 640 x 640, of
246 MB, are the most there is beside the weights.
"""


def main() -> None:
    results: Results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results |= count()
    measure_memory(results)
    measure_time(results)
    write_text(RESULTS.with_suffix(".md"), markdown(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
