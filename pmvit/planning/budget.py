"""Budgets: what a plan will cost, and the plan that a budget allows."""

from collections.abc import Callable
from typing import TypeVar

import torch

from pmvit.errors import PmvitError
from pmvit.measuring import MergeCosts, Scores
from pmvit.measuring.flops import elementwise_macs
from pmvit.planning.plan import LayerPlan, Plan
from pmvit.windows import Budget, Windows

Made = TypeVar("Made")


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


def share_of_places(layer: LayerPlan, windows: Windows, grid: tuple[int, int]) -> float | None:
    """How much of its windows a layer keeps, padding included; `None` if they do not all keep as much."""
    budget = Budget.of(windows, grid)
    of_window = windows.places(grid)[list(layer.centres)] // windows.area
    places = budget.places(torch.bincount(of_window, minlength=len(budget.tokens)))
    return None if places is None else places / windows.area


def solve(make: Callable[[float], Made], cost: Callable[[Made], float], target: float, unit: str, steps: int) -> Made:
    """Find by bisection the plan that keeps most and costs no more than the target."""
    best = make(1e-9)
    least = cost(best)
    if least > target:
        raise PmvitError(
            f"expected a budget of at least {least:.3f} {unit}, what one token a block costs; got {target:.3f}"
        )
    low, high = 0.0, 1.0
    for _ in range(steps):
        middle = (low + high) / 2
        candidate = make(middle)
        if cost(candidate) <= target:
            best, low = candidate, middle
        else:
            high = middle
    return best
