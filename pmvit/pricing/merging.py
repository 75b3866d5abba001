"""The greedy order of merges in one block: always the cheapest one next."""

import torch
from torch import Tensor

from pmvit.pricing.prices import Merge


class Clusters:
    """The groups of one block, each named by its first token, and the price of merging any two of them.

    Args:
        effects: `E[i, j]` of every image, (kinds, images, tokens, tokens). The errors of different kinds add up as
            squares: that they cancel on a few images does not mean that they will on others.
        near: Which tokens may be merged: (tokens, tokens), symmetric.
    """

    def __init__(self, effects: Tensor, near: Tensor) -> None:
        num_tokens = effects.shape[-1]
        self.factor = 0.5 / effects.shape[1]
        effects = effects.flatten(0, 1).permute(1, 2, 0)  # images last: what is read together then lies together
        self.between = (effects + effects.transpose(0, 1)).contiguous()  # sums of E from one group to another and back
        self.own = effects.diagonal(dim1=0, dim2=1).T.contiguous()  # the sum of E[i, i] of each group
        self.within = self.own.clone()  # the sum of E inside each group
        self.sizes = torch.ones(num_tokens)
        self.spent = torch.zeros(num_tokens)  # half the mean squared error of each group
        self.near = near.clone().fill_diagonal_(False)
        self.prices = torch.stack([self._row(group) for group in range(num_tokens)])

    def _row(self, group: int) -> Tensor:
        """The price of merging a group with every other; infinite where they may not be merged."""
        prices = torch.full_like(self.sizes, torch.inf)
        others = torch.nonzero(self.near[group]).flatten()
        sums = self.within[group] + self.within[others] + self.between[group, others]
        errors = sums / (self.sizes[group] + self.sizes[others])[:, None] - self.own[group] - self.own[others]
        prices[others] = self.factor * errors.square().sum(1) - self.spent[group] - self.spent[others]
        return prices

    def merge_cheapest(self) -> Merge | None:
        """Merge the two groups for which it is cheapest; `None` if no two may be merged."""
        at = int(self.prices.argmin())
        first, second = sorted(divmod(at, len(self.prices)))
        price = float(self.prices[first, second])
        if price == torch.inf:
            return None
        self.spent[first] += self.spent[second] + price
        self.within[first] += self.within[second] + self.between[first, second]
        self.own[first] += self.own[second]
        self.sizes[first] += self.sizes[second]
        self.between[first] += self.between[second]
        self.between[:, first] += self.between[:, second]
        self.near[first] |= self.near[second]
        self.near[first, [first, second]] = False
        self.near[:, first] = self.near[first]
        self.near[second] = self.near[:, second] = False
        self.prices[second] = self.prices[:, second] = torch.inf
        self.prices[first] = self.prices[:, first] = self._row(first)
        return Merge(first, second, price)


def order_merges(effects: Tensor, near: Tensor) -> tuple[Merge, ...]:
    """Merge the tokens of a block, two groups at a time, until no two may be merged."""
    clusters = Clusters(effects, near)
    merges = []
    while (merge := clusters.merge_cheapest()) is not None:
        merges.append(merge)
    return tuple(merges)


def neighbours(grid: tuple[int, int]) -> Tensor:
    """Which tokens of a grid lie beside or above each other."""
    rows, columns = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    places = torch.stack([rows.flatten(), columns.flatten()], 1)
    return (places[:, None] - places).abs().sum(-1) == 1


def mirrored(effects: Tensor, grid: tuple[int, int]) -> Tensor:
    """What the effects would be if left and right of every image changed places."""
    order = torch.arange(grid[0] * grid[1]).view(grid).flip(1).flatten()
    return effects[..., order, :][..., order]
