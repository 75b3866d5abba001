"""Groups of one layer (Algorithm 1): which kept token a medium token joins, and with what weight."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from pmvit.config.planning import Grouping, Weights
from pmvit.planning.plan import LayerPlan
from pmvit.prune_merge import PRUNED


def group_layer(
    scores: Tensor,
    kept: Tensor,
    pruned: Tensor,
    grid: tuple[int, ...],
    grouping: Grouping,
    weights: Weights,
    regions: Tensor | None = None,
    windows: Tensor | None = None,
) -> LayerPlan:
    """Let every medium token join a kept one and weigh the members (Algorithm 1, lines 6-16).

    Args:
        scores: Of each token.
        kept: Which tokens are centres.
        pruned: Which are in no group.
        grid: Where the tokens lie.
        grouping: Which centre a medium token joins.
        weights: How members are weighed.
        regions: Of each token; a token joins none of another region, and each region with a medium token has a centre.
        windows: Of each token; groups are numbered window by window, as a block that runs on windows wants them.
    """
    centres = torch.nonzero(kept).flatten()
    medium = torch.nonzero(~kept & ~pruned).flatten()
    if windows is not None and len(centres) < len(kept):
        centres = centres[torch.argsort(windows[centres], stable=True)]
    groups = torch.full_like(kept, PRUNED, dtype=torch.long)
    groups[centres] = torch.arange(centres.numel())
    if regions is None:
        groups[medium] = JOIN[grouping](medium, centres, grid)
    else:
        for region in regions[medium].unique():
            tokens, nearby = (some[regions[some] == region] for some in (medium, centres))
            groups[tokens] = groups[nearby[JOIN[grouping](tokens, nearby, grid)]]
    rounded = (float(f"{weight:.8g}") for weight in weigh(scores, groups, grid, weights).tolist())
    return LayerPlan(tuple(groups.tolist()), tuple(centres.tolist()), tuple(rounded))


def join_segment(tokens: Tensor, centres: Tensor, grid: tuple[int, ...]) -> Tensor:
    """The next kept token of the sequence; what follows the last one joins it (Algorithm 1)."""
    return torch.searchsorted(centres, tokens).clamp(max=centres.numel() - 1)


def join_grid(tokens: Tensor, centres: Tensor, grid: tuple[int, ...]) -> Tensor:
    """The nearest kept token in the grid; of several, the first."""
    return _first_nearest(_squared_distance(tokens, centres, grid))


def join_row(tokens: Tensor, centres: Tensor, grid: tuple[int, ...]) -> Tensor:
    """The nearest kept token in the same row, a line of the last axis; from a row without one, the nearest of all.

    The boundary between two is at the midpoint.
    """
    width, distance = grid[-1], _squared_distance(tokens, centres, grid)
    other_row = tokens[:, None] // width != centres[None] // width
    farther_than_any_in_the_row = width**2
    return _first_nearest(distance + farther_than_any_in_the_row * other_row)


JOIN: dict[Grouping, Callable[[Tensor, Tensor, tuple[int, ...]], Tensor]] = {
    "segment": join_segment,
    "grid": join_grid,
    "row": join_row,
}


def _squared_distance(tokens: Tensor, centres: Tensor, grid: tuple[int, ...]) -> Tensor:
    first, second = (torch.stack(torch.unravel_index(some, grid), dim=-1) for some in (tokens, centres))
    return (first[:, None] - second).square().sum(-1)


def _first_nearest(distance: Tensor) -> Tensor:
    """The column of the least distance in each row; of several, the first."""
    return torch.argsort(distance, dim=1, stable=True)[:, 0]


def weigh(scores: Tensor, groups: Tensor, grid: tuple[int, ...], rule: Weights) -> Tensor:
    """Weights of the tokens in their groups (Table VI); a group whose scores are all zero is weighed evenly."""
    is_member = groups != PRUNED
    index = groups[is_member]
    num_groups = int(index.max()) + 1
    if rule in ("ones", "average"):
        scores = torch.ones_like(scores)
    elif rule == "gaussian":
        scores = smooth(scores, grid)
    s = scores[is_member]

    def total(values: Tensor) -> Tensor:
        return values.new_zeros(num_groups).index_add(0, index, values)[index]

    s = torch.where(total(s) == 0, 1.0, s)
    if rule == "max":
        divisor = s.new_zeros(num_groups).scatter_reduce(0, index, s, "amax")[index]
    elif rule == "mean":
        divisor = total(s) / total(torch.ones_like(s))
    elif rule in ("sum", "average"):
        divisor = total(s)
    elif rule == "ones":
        divisor = torch.ones_like(s)
    else:
        divisor = total(s**2).sqrt()
    weights = torch.zeros_like(scores)
    weights[is_member] = s / divisor
    return weights


def smooth(scores: Tensor, grid: tuple[int, ...]) -> Tensor:
    """Filter the scores along each axis of the grid with three values of a Gaussian of unit variance.

    The border is repeated.
    """
    line = torch.exp(-(torch.tensor([-1.0, 0.0, 1.0], dtype=scores.dtype) ** 2) / 2)
    scores = scores.view(grid)
    for axis in range(len(grid)):
        lines = F.pad(scores.movedim(axis, -1).flatten(0, -2)[:, None], (1, 1), mode="replicate")
        smoothed = F.conv1d(lines, line[None, None] / line.sum())
        scores = smoothed.view(scores.movedim(axis, -1).shape).movedim(-1, axis)
    return scores.flatten()
