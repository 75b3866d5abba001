"""From prices to a plan: the cheapest merges of all blocks, per multiply-accumulate that they save."""

from collections import Counter
from functools import lru_cache

import torch
from torch import Tensor

from pmvit.cost import BlockCost
from pmvit.planning.plan import LayerPlan
from pmvit.pricing import Merge, Prices


def merged_layers(prices: Prices, layers: list[int], keep: float) -> dict[int, LayerPlan]:
    """Keep this share of the patch tokens of these blocks by the cheapest merges, and at least one in each block."""
    ranked = rank_merges(prices, tuple(layers))
    done = Counter(ranked[: round((1 - keep) * len(layers) * prices.num_patches)])
    return {layer: merged_layer(prices.merges[layer][: done[layer]], prices.grid) for layer in layers}


@lru_cache(maxsize=4)  # a budget is searched for with the same prices
def rank_merges(prices: Prices, layers: tuple[int, ...]) -> list[int]:
    """The blocks in the order in which they do their next merge: cheapest price per multiply-accumulate saved first.

    So the best plan with a number of merges does the first so many of this list.
    """
    slopes, blocks = [], []
    for layer in layers:
        each = torch.tensor([0.0, *(merge.price for merge in prices.merges[layer])], dtype=torch.float64)
        counts = torch.arange(prices.num_patches, prices.num_patches - len(each), -1)
        macs = block_macs(prices.cost.blocks[layer], counts, prices.num_patches, prices.num_prefix)
        rising = rising_slopes(each.cumsum(0), macs[0] - macs)
        slopes.append(rising)
        blocks += [layer] * len(rising)
    order = torch.argsort(torch.cat(slopes), stable=True)
    return [blocks[place] for place in order.tolist()]


def block_macs(block: BlockCost, counts: Tensor, num_patches: int, num_prefix: int) -> Tensor:
    """Multiply-accumulates of a block for each of these numbers of groups, merge and reconstruct included."""
    shares = (num_prefix + counts.double()) / (num_prefix + num_patches)
    macs = block.constant + block.linear * shares + block.quadratic * shares**2
    num_tokens, num_groups = num_prefix + num_patches, num_prefix + counts
    operations = (2 * num_tokens + num_tokens + num_groups) * block.width
    return macs + torch.where(counts < num_patches, operations, 0)


def rising_slopes(price: Tensor, saved: Tensor) -> Tensor:
    """The slope of the lower hull of (saved, price) at each step; both are totals after 0, 1, 2, ... steps.

    A dear step before a cheap one, or one that saves nothing yet, gets the mean of both: it is done for the other's
    sake. A step after which there is nothing to be saved comes last.
    """
    slopes = torch.full((len(price) - 1,), torch.inf, dtype=torch.float64)
    start = 0
    while start < len(slopes):
        rise, run = price[start + 1 :] - price[start], saved[start + 1 :] - saved[start]
        ahead = torch.where(run > 0, rise / run.clamp(min=1e-9), torch.inf)
        step = int(ahead.argmin()) + 1
        if not torch.isfinite(ahead[step - 1]):
            break
        slopes[start : start + step] = ahead[step - 1]
        start += step
    return slopes


def merged_layer(merges: tuple[Merge, ...], grid: tuple[int, int]) -> LayerPlan:
    """The plan of a block after these merges: plain means, each group at the member next to its middle."""
    members = {token: [token] for token in range(grid[0] * grid[1])}
    for merge in merges:
        members[merge.first] += members.pop(merge.second)
    by_centre = sorted((_centre(tokens, grid[1]), tokens) for tokens in members.values())
    groups, weights = [0] * (grid[0] * grid[1]), [0.0] * (grid[0] * grid[1])
    for number, (_, tokens) in enumerate(by_centre):
        for token in tokens:
            groups[token] = number
            weights[token] = float(f"{1 / len(tokens):.8g}")
    return LayerPlan(tuple(groups), tuple(centre for centre, _ in by_centre), tuple(weights))


def _centre(tokens: list[int], width: int) -> int:
    """The token nearest to the mean place of all; of several, the first."""
    row, column = (sum(place) / len(tokens) for place in zip(*(divmod(token, width) for token in tokens), strict=True))
    return min(tokens, key=lambda token: ((token // width - row) ** 2 + (token % width - column) ** 2, token))
