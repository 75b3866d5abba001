"""The ranking of scored tokens: which are kept, merged and pruned (Algorithm 2, and lines 1-5 of Algorithm 1)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pmvit.windows import Budget, Windows

LEAST_DECAY_FACTOR = 0.1


def comparable(
    values: Tensor, layers: Sequence[int], normalize: bool, decay: float, counts: Sequence[int] = ()
) -> Tensor:
    """Make the scores of different layers comparable: each row over its L2 norm, times `1 - decay * layer`.

    Where layers have different numbers of tokens (`counts`), the norm is that of the average token.
    """
    if normalize:
        values = values / values.norm(dim=1, keepdim=True)
        if len(set(counts)) > 1:
            values = values * torch.tensor(counts, dtype=values.dtype).sqrt()[:, None]
    factors = 1 - decay * torch.tensor(layers, dtype=values.dtype)
    return values * factors.clamp(min=LEAST_DECAY_FACTOR)[:, None]  # deep models would reach zero and turn around


def partition(values: Tensor, keep: float, prune: float, counts: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """Split (layers, tokens) scores by two global thresholds (Algorithm 2, Algorithm 1 lines 1-5); return two masks.

    The counts are exact. Equal scores are ranked by position, first layer and first token foremost. A layer that would
    keep nothing keeps its best token, in place of the weakest kept token of a layer that has more than one.

    Where layers have different numbers of tokens (`counts`, the first of each row), the shares are those of a layer on
    average: a token counts for as much as its part of its layer. So a stage of few tokens that are costly is not
    outvoted by one of many.
    """
    num_layers, num_tokens = values.shape
    counts = counts or [num_tokens] * num_layers
    order = torch.argsort(values.flatten(), descending=True, stable=True)
    order = order[order % num_tokens < torch.tensor(counts)[order // num_tokens]]
    parts = (max(counts) / torch.tensor(counts, dtype=torch.float64))[order // num_tokens]
    num_kept = max(_how_many(parts, keep), num_layers)
    kept = torch.zeros(values.numel(), dtype=torch.bool)
    kept[order[:num_kept]] = True
    kept = kept.view(num_layers, num_tokens)
    for layer in torch.nonzero(~kept.any(1)).flatten().tolist():
        best = torch.argsort(values[layer, : counts[layer]], descending=True, stable=True)[0]
        for candidate in reversed(order[:num_kept].tolist()):
            other = kept[candidate // num_tokens]
            if other[candidate % num_tokens] and other.sum() > 1:
                other[candidate % num_tokens] = False
                break
        kept[layer, best] = True
    is_left = ~kept.view(-1)[order]
    weakest = order[is_left].flip(0)
    num_pruned = min(_how_many(parts[is_left].flip(0), prune, float(parts.sum())), len(weakest))
    pruned = torch.zeros(values.numel(), dtype=torch.bool)
    pruned[weakest[:num_pruned]] = True
    return kept, pruned.view(num_layers, num_tokens)


def _how_many(parts: Tensor, share: float, total: float | None = None) -> int:
    """How many of the first parts come nearest to a share of the total, that of all parts if not given."""
    target = share * (float(parts.sum()) if total is None else total)
    if (parts == 1).all():
        return round(target)
    return int((parts.cumsum(0) - parts / 2 < target).sum())


def fit_to_windows(
    values: Tensor, num_kept: int, num_pruned: int, windows: Windows, grid: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Split the tokens of a layer anew, so that all its windows keep as many; return two masks.

    Every window keeps the same number of tokens, the largest with which the layer keeps no more than `num_kept`: first
    the best token of each region, as long as there is room, then the best of the rest. A token in a region of which
    none is kept has nothing to join, and is pruned.
    """
    places = windows.places(grid)
    of_window, of_region = places // windows.area, windows.regions(grid).flatten()[places]
    order = torch.argsort(values, descending=True, stable=True)
    first = torch.full((int(of_region.max()) + 1,), len(values))
    first.scatter_reduce_(0, of_region[order], torch.arange(len(order)), "amin")
    is_best = torch.zeros(len(values), dtype=torch.bool)
    is_best[order[first[first < len(values)]]] = True
    order = order[torch.argsort((2 * of_window + ~is_best)[order], stable=True)]
    budget = Budget.of(windows, grid)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order)) - (budget.tokens.cumsum(0) - budget.tokens)[of_window[order]]
    kept = rank < budget.kept(budget.at_most(num_kept))[of_window]
    has_centre = torch.zeros(len(first), dtype=torch.bool)
    has_centre[of_region[kept]] = True
    pruned = ~has_centre[of_region]
    weakest = torch.argsort(values, descending=True, stable=True).flip(0)
    weakest = weakest[~(kept | pruned)[weakest]]
    pruned[weakest[: max(num_pruned - int(pruned.sum()), 0)]] = True
    return kept, pruned
