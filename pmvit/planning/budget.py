"""Budgets: what a plan will cost, the plan that a budget allows, and what it reached where that was measured."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from pmvit.errors import PmvitError
from pmvit.measuring import MergeCosts, Scores
from pmvit.measuring.flops import elementwise_macs
from pmvit.numbers.estimates import Estimate
from pmvit.numbers.measures import MEASURES
from pmvit.planning.plan import LayerPlan, Plan
from pmvit.windows import Budget, Windows

Made = TypeVar("Made")
BISECTIONS = 40
REACHED = "reached"  # in `made_by`: what was measured of a plan, for a budget in `speedup` or `max_drop`


def predicted_macs(source: Scores | MergeCosts, plan: Plan) -> float:
    """Multiply-accumulates of the model compressed by this plan: what `flops` will count on it."""
    total = float(source.cost.outside)
    for index, block in enumerate(source.cost.blocks):
        layer, windows = plan.layers.get(index), source.windows[index]
        if layer is None:
            total += block.macs(1.0)
            continue
        num_tokens, num_groups = (source.num_prefix + count for count in (layer.num_tokens, layer.num_kept))
        if not layer.is_identity:
            total += 2 * (source.num_prefix + layer.num_entries) * block.width
            total += elementwise_macs(num_tokens, num_groups, block.width)
        share = num_groups / num_tokens
        if layer.mlp is None:
            total += block.macs(share, None if windows is None else share_of_places(layer, windows, plan.grids[index]))
            continue
        attention, mlp = block.halves()
        total += attention.macs(share) + mlp.macs((source.num_prefix + layer.mlp.num_kept) / num_tokens)
        total += 2 * num_groups * block.width
    return total


def share_of_places(layer: LayerPlan, windows: Windows, grid: tuple[int, ...]) -> float | None:
    """How much of its windows a layer keeps, padding included; `None` if they do not all keep as much."""
    budget = Budget.of(windows, grid)
    of_window = windows.places(grid)[list(layer.centres)] // windows.area
    places = budget.places(torch.bincount(of_window, minlength=len(budget.tokens)))
    return None if places is None else places / windows.area


def solve(make: Callable[[float], Made], gflops: Callable[[Made], float], target: float) -> Made:
    """Find by bisection the plan that keeps most and costs no more than the target."""
    best = make(1e-9)
    least = gflops(best)
    if least > target:
        raise PmvitError(
            f"expected a budget of at least {least:.3f} GFLOPs, what one token a block costs; got {target:.3f}"
        )
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        candidate = make(middle)
        if gflops(candidate) <= target:
            best, low = candidate, middle
        else:
            high = middle
    return best


def reached_text(made_by: Mapping[str, Any]) -> str | None:
    """What was measured of a plan, in words; `None` if its budget was counted."""
    try:
        reached = made_by[REACHED]
        if "speedup" in reached:
            ratio = Estimate(reached["speedup"], *reached["interval"])
            where = f"{reached['runtime']}, batch {reached['batch']}, {reached['threads']} threads, {reached['device']}"
            return f"{ratio} as fast as the original ({where})"
        lost = Estimate(reached["drop"], *reached["interval"]).text(".2f")
        return f"{lost} points of {MEASURES[reached['measure']].title} lost on {reached['images']} images"
    except (ArithmeticError, KeyError, TypeError, ValueError):  # there is none, or somebody else wrote it
        return None
