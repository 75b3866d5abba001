"""Speed as a ratio: variants take turns in one run, so that a noisy machine disturbs all of them alike."""

import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from pmvit.hosts.outputs import as_module
from pmvit.numbers.bootstrap import bootstrap, median
from pmvit.numbers.estimates import Estimate

T = TypeVar("T")


def interleave(variants: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 2) -> dict[str, list[float]]:
    """Time every variant once a round, in an order that changes from round to round; seconds, by name."""
    for _ in range(warmup):
        for run in variants.values():
            run()
    times: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    shuffler = random.Random(0)  # noqa: S311  # an order, not a secret
    for _ in range(rounds):
        shuffler.shuffle(names)
        for name in names:
            start = time.perf_counter()
            variants[name]()
            times[name].append(time.perf_counter() - start)
    return times


def speedup(times: Mapping[str, list[float]], variant: str, baseline: str) -> Estimate:
    """How many times faster than the baseline: the median of the rounds' ratios, with its bootstrap interval."""
    seconds = (torch.tensor(times[name], dtype=torch.float64) for name in (baseline, variant))
    return bootstrap(torch.div(*seconds), median)


def compare(models: Mapping[str, nn.Module], images: Tensor, rounds: int) -> dict[str, list[float]]:
    """Time the models on the same images, in turns."""

    with torch.inference_mode():
        runs = {name: partial(run_to_end, as_module(model), images) for name, model in models.items()}
        return interleave(runs, rounds)


def run_to_end(run: Callable[[Tensor], T], images: Tensor) -> T:
    """Run on images, and wait until their device is done."""
    result = run(images)
    if images.device.type != "cpu":
        torch.accelerator.synchronize(images.device)  # which may not be the current one
    return result
