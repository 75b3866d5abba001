"""How fast plans make a model where it will run, and what they take from it."""

import copy
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from pmvit.compression import compress
from pmvit.config import SpeedConfig
from pmvit.errors import PmvitError
from pmvit.evaluation.paired import PairedEvaluation, evaluate_pairs
from pmvit.numbers.estimates import Estimate
from pmvit.numbers.measures import IN_POINTS
from pmvit.planning.planner import AnyPlan
from pmvit.runtime.bench.run import PYTORCH, Maker, benchmark
from pmvit.runtime.bench.variants import variant


class Quality(NamedTuple):
    """What a model is worth on some images.

    Attributes:
        measure: What was measured, by its name in `MEASURES`: of labels, or nearness to the original.
        value: Of the compressed model.
        original: Of the original; 1 where it is compared with itself.
        drop: What compression lost, in points (hundredths); the interval is paired.
        images: How many there were.
    """

    measure: str
    value: Estimate
    original: Estimate
    drop: Estimate
    images: int

    @staticmethod
    def of(pair: PairedEvaluation) -> "Quality":
        """By labels if there are some, else by nearness to the original."""
        found = {one.name: one for one in pair.measures}
        one = next(found[name] for name in IN_POINTS if name in found)
        if one.original is not None and one.difference is not None:
            before, change = one.original, one.difference
        else:
            before = Estimate(1.0, 1.0, 1.0)
            change = Estimate(*(end - 1 for end in one.compressed))
        value, low, high = (-100 * end for end in change)
        return Quality(one.name, one.compressed, before, Estimate(value, high, low), pair.images)


class Speed(NamedTuple):
    """How fast a model is where it will run.

    Attributes:
        speedup: How many times faster than the original.
        milliseconds: A batch: the median of the original's, divided by the speed-up, which noise disturbs least.
        throughput: Images a second.
        gflops: Billions of multiply-accumulates an image, of what runs.
    """

    speedup: Estimate
    milliseconds: float
    throughput: float
    gflops: float


def measure_qualities(
    model: nn.Module, original: nn.Module, plans: Sequence[AnyPlan], data: Iterable[Any], progress: bool
) -> list[Quality]:
    """What is left of the original's quality if plans compress a model, all on the same images."""
    smaller = [sharing(model, plan) for plan in plans]
    return [Quality.of(pair) for pair in evaluate_pairs(smaller, original, data, progress=progress)]


def measure_speeds(
    model: nn.Module, original: nn.Module, plans: Sequence[AnyPlan], config: SpeedConfig, progress: bool
) -> tuple[list[Speed], dict[str, Any]]:
    """How fast the original is and plans make a model, all taking turns, and where that was measured.

    What a plan compressed is optimised for inference, as `export` does it.

    Raises:
        PmvitError: If the runtime is not there, or does not run one of them.
    """
    device = next(model.parameters()).device if config.runtime in PYTORCH else torch.device("cpu")
    model, original = (copy.deepcopy(each).to(device, torch.float32) for each in (model, original))
    makers: dict[str, nn.Module | Maker] = {"original": original}
    for number, plan in enumerate(plans):
        makers[str(number)] = partial(variant, "optimized", sharing(model, plan))
    result = benchmark(
        original,
        against=makers,
        runtimes=[config.runtime],
        batches=[config.batch],
        rounds=config.rounds,
        threads=config.threads,
        device=device,
        progress=progress,
    )
    speeds = []
    for row in result.rows:
        if row.speedup is None or row.p50 is None or row.gflops is None:
            keep = plans[int(row.variant)].keep
            raise PmvitError(f"{config.runtime} does not run the model with {keep:.1%} of its tokens: {row.failure}")
        seconds = (result.rows[0].p50 or row.p50) / row.speedup.value
        speeds.append(Speed(row.speedup, 1e3 * seconds, config.batch / seconds, row.gflops))
    where = {"runtime": config.runtime, "batch": config.batch, "device": str(device)}
    return speeds, {**where, **result.environment}


def sharing(model: nn.Module, plan: AnyPlan) -> nn.Module:
    """A compressed copy that has its parameters in common with the model: as many as are wanted fit into memory."""
    parameters = {id(parameter): parameter for parameter in model.parameters()}
    return compress(copy.deepcopy(model, parameters), plan, inplace=True).eval()
