"""The greedy order of merges: always the cheapest one next, over all blocks."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pmvit.measuring.flops import BlockCost
from pmvit.measuring.merge_costs import Merge, Part, before_each

Numbers = NDArray[Any]


class Clusters:
    """The groups of a block or half a block, each named by its first token, and the cost of merging any two of them.

    It takes thousands of small steps, for which NumPy's arrays are quicker than tensors.

    Args:
        effects: `E` of `EffectRecorder`, (rows, tokens, tokens); each row is a random combination of images. The error
            of a merge is a sum of entries of `E`, and its cost half the sum of the squares of this over all rows.
        near: Which tokens may be merged: (tokens, tokens), symmetric.
    """

    def __init__(self, effects: Tensor, near: Tensor) -> None:
        self.left = len(near)
        effects = effects.permute(1, 2, 0)  # rows last: what is read together then lies together
        self.own = effects.diagonal(dim1=0, dim2=1).T.contiguous().numpy()  # the sum of E[i, i] of each group
        self.within = self.own.copy()  # the sum of E inside each group
        # Sums of E from one group to another and back.
        self.between = (effects + effects.transpose(0, 1)).contiguous().numpy()
        self.sizes = np.ones(self.left, dtype=np.float32)
        self.spent = np.zeros(self.left, dtype=np.float32)  # what the error of each group costs
        self.near = near.clone().fill_diagonal_(False).numpy()
        self.groups = np.arange(self.left)  # the group of each token
        self.inside = np.zeros(self.left, dtype=np.int64)  # only groups with the same number may be merged
        self.merge_costs = np.stack([self._row(group) for group in range(self.left)])
        self._cheapest: tuple[float, int, int] | None = None

    def _row(self, group: int) -> Numbers:
        """The cost of merging a group with every other; infinite where they are not near."""
        merge_costs = np.full_like(self.sizes, np.inf)
        others = np.flatnonzero(self.near[group])
        sums = self.within[group] + self.within[others] + self.between[group, others]
        errors = sums / (self.sizes[group] + self.sizes[others])[:, None] - self.own[group] - self.own[others]
        merge_costs[others] = np.square(errors).sum(1) / 2 - self.spent[group] - self.spent[others]
        return merge_costs

    def stay_inside(self, groups: Numbers) -> None:
        """Let groups be merged only if they lie in one of these groups, given for each token."""
        self.inside = groups.copy()
        self._cheapest = None

    def cheapest(self) -> tuple[float, int, int]:
        """What it costs to merge the two groups for which it costs least, and which; infinite if none may be merged."""
        if self._cheapest is None:
            allowed = np.where(self.inside[:, None] == self.inside, self.merge_costs, np.inf)
            first, second = sorted(divmod(int(allowed.argmin()), len(allowed)))
            self._cheapest = float(allowed[first, second]), first, second
        return self._cheapest

    def merge_cheapest(self) -> tuple[int, int, float]:
        """Merge these two; return them and the cost."""
        cost, first, second = self.cheapest()
        self.spent[first] += self.spent[second] + cost
        self.within[first] += self.within[second] + self.between[first, second]
        self.own[first] += self.own[second]
        self.sizes[first] += self.sizes[second]
        self.between[first] += self.between[second]
        self.between[:, first] += self.between[:, second]
        self.near[first] |= self.near[second]
        self.near[first, [first, second]] = False
        self.near[:, first] = self.near[first]
        self.near[second] = self.near[:, second] = False
        self.merge_costs[second] = self.merge_costs[:, second] = np.inf
        self.merge_costs[first] = self.merge_costs[:, first] = self._row(first)
        self.left -= 1
        self._cheapest = None
        self.groups[self.groups == second] = first
        return first, second, cost


class BlockMerges(NamedTuple):
    """What is merged of a block or of half a block, and what running it costs."""

    block: int
    part: Part
    clusters: Clusters
    cost: BlockCost


def order_merges(parts: Sequence[BlockMerges], num_prefix: int, *, early: float, nested: bool) -> Iterator[Merge]:
    """Merge two groups of some part after the other, lowest cost per multiply-accumulate saved first.

    Args:
        parts: Blocks or halves of them, with clusters of single tokens; merged on return.
        num_prefix: Tokens before the patch tokens.
        early: By how much merge costs of the first part are raised; less and less up to the last.
        nested: Whether what is together in a part has to stay together in those after it (see `before_each`).
    """
    blocks = [part.clusters for part in parts]
    names = [(part.block, part.part) for part in parts]
    has_mlps_alone = any(part == "mlp" and (block, "attention") not in names for block, part in names)
    stays = [nested and before is not None for before in before_each(names, has_mlps_alone)]

    def slope(number: int) -> float:
        block, cost = blocks[number], parts[number].cost
        whole = num_prefix + len(block.groups)
        saved = cost.macs((num_prefix + block.left) / whole) - cost.macs((num_prefix + block.left - 1) / whole)
        raised: float = early ** (1 - number / max(len(blocks) - 1, 1))
        return raised * block.cheapest()[0] / saved

    for (block, after), is_nested in zip(pairwise(blocks), stays[1:], strict=True):
        if is_nested:
            block.stay_inside(after.groups)
    slopes = [slope(number) for number in range(len(blocks))]
    while (lowest := min(slopes)) < np.inf:
        number = slopes.index(lowest)
        yield Merge(parts[number].block, parts[number].part, *blocks[number].merge_cheapest())
        slopes[number] = slope(number)
        if stays[number]:
            blocks[number - 1].stay_inside(blocks[number].groups)
            slopes[number - 1] = slope(number - 1)


def neighbours(grid: tuple[int, ...]) -> Tensor:
    """Which tokens of a grid lie next to each other along one of its axes."""
    places = torch.cartesian_prod(*map(torch.arange, grid)).view(-1, len(grid))
    return (places[:, None] - places).abs().sum(-1) == 1


def mirrored(effects: Tensor, grid: tuple[int, ...]) -> Tensor:
    """What the effects would be if left and right of every image, the ends of its last axis, changed places."""
    order = torch.arange(math.prod(grid)).view(grid).flip(-1).flatten()
    return effects[..., order, :][..., order]
