"""Plans in which the MLP of a block has groups of its own, as measured plans have."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from pmvit.planning import LayerPlan, Plan
from pmvit.prune_merge import TokenMatrices

# Groups of attention and MLP in each of five blocks of 6 x 6 patches; the last MLP matters for prefix tokens alone.
COUNTS = ((36, 33), (30, 30), (24, 20), (36, 17), (9, 4))


def split_plan(
    grid: tuple[int, ...] = (6, 6), counts: Sequence[tuple[int, int]] = COUNTS, *, nested: bool = True, **options: Any
) -> Plan:
    """Neighbours merged at random into means until as many groups are left as `counts` has for a half.

    Args:
        grid: Rows and columns of patches, of videos with time before them.
        counts: Groups of attention and of the MLP, for each block.
        nested: A block begins with the groups of the one before, where that leaves it enough; otherwise with tokens.
        options: Fields of `Plan`.
    """
    chance = torch.Generator().manual_seed(0)
    everything = [{token} for token in range(math.prod(grid))]
    layers = {}
    groups = everything
    for block, (attention, mlp) in enumerate(counts):
        groups = merged(groups if nested and len(groups) >= attention else everything, attention, grid[-1], chance)
        layer = layer_of(groups)
        groups = merged(groups, mlp, grid[-1], chance)
        is_split = mlp < attention
        layers[block] = LayerPlan(layer.groups, layer.centres, layer.weights, layer_of(groups) if is_split else None)
    return Plan(grid, len(counts), layers, **options)


def merged(groups: list[set[int]], count: int, width: int, chance: torch.Generator) -> list[set[int]]:
    """Join groups of neighbours, two at a time, until so many are left."""
    groups = [set(group) for group in groups]
    while len(groups) > count:
        first = choice(groups, chance)
        around = {other for token in first for other in neighbours(token, width)}
        touching = [group for group in groups if group is not first and group & around]
        second = choice(touching, chance)
        groups.remove(second)
        first |= second
    return sorted(groups, key=min)


def choice(groups: list[set[int]], chance: torch.Generator) -> set[int]:
    return groups[int(torch.randint(len(groups), (), generator=chance))]


def neighbours(token: int, width: int) -> set[int]:
    column = token % width
    beside = {token - 1} if column else set()
    return beside | ({token + 1} if column < width - 1 else set()) | {token - width, token + width}


def layer_of(groups: list[set[int]]) -> LayerPlan:
    """The mean of each group."""
    where = {token: number for number, group in enumerate(groups) for token in group}
    numbers = tuple(where[token] for token in range(len(where)))
    weights = tuple(1 / len(groups[number]) for number in numbers)
    return LayerPlan(numbers, tuple(min(group) for group in groups), weights)


def perturb(model: nn.Module) -> None:
    """Change M and R of every block and MLP as fine-tuning might."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, TokenMatrices):
                for weights in (module.merge_weights, module.reconstruct_weights):
                    weights.add_(0.1 * torch.randn(weights.shape, generator=generator))
