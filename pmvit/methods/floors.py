"""Floors, which every method should be above: merge tokens that are the same in every image, without looking at it.

Merged as ToMe merges: the mean, of a size that attention knows. `random` draws pairs once and for all. `uniform` makes
one token of each 2 x 2 cell of the grid in one block; a share of the cells, spread evenly over the image, makes it as
cheap as it should be.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pmvit.data.seeding import seed_for
from pmvit.errors import PmvitError
from pmvit.methods.attention import Attended
from pmvit.methods.base import Encoder, Method, Site, check_size, numbers_of_blocks
from pmvit.methods.tome import Matched, Merging, MergingBlock, matched, most_merged


class FixedBlock(MergingBlock):
    """A block in which the same tokens are merged in every image; it knows the sizes of tokens in any case."""

    stays: Tensor
    merged: Tensor
    into: Tensor

    def __init__(self, block: Any, site: Site, method: Any) -> None:
        super().__init__(block, site, method)
        for name, places in method.matched(site)._asdict().items():
            self.register_buffer(name, places, persistent=False)

    def find(self, attended: Attended, tokens: Tensor, sizes: Tensor | None) -> Matched | None:
        if not self.merged.numel():
            return None
        check_size(tokens, self.stays.shape[1] + self.merged.shape[1])
        return Matched(*(places.expand(tokens.shape[0], -1) for places in (self.stays, self.merged, self.into)))


def draw(num_tokens: int, r: int, num_prefix: int, seed: int) -> Matched:
    """Random pairs for one image: patches at even places among all tokens, merged into such at odd ones."""
    generator = torch.Generator().manual_seed(seed)
    even = torch.arange(num_prefix % 2, num_tokens - num_prefix, 2)
    odd = torch.arange(1 - num_prefix % 2, num_tokens - num_prefix, 2)
    order = torch.randperm(len(even), generator=generator)
    partners = torch.randint(len(odd), (r,), generator=generator)
    return matched(num_prefix, even[order[r:].sort().values][None], odd[None], even[order[:r]][None], partners[None])


@dataclass(frozen=True)
class RandomMerging(Merging):
    """Merge random tokens, the same for every image.

    Attributes:
        seed: Of the draw.
    """

    name = "random"
    title = "random merging"
    block_class = FixedBlock

    seed: int = 0

    def matched(self, site: Site) -> Matched:
        num_tokens, rs = site.num_prefix + site.num_patches, self.schedule(site.depth)
        for before in rs[: site.number]:
            num_tokens -= most_merged(before, num_tokens, site.num_prefix)
        r = most_merged(rs[site.number], num_tokens, site.num_prefix)
        return draw(num_tokens, r, site.num_prefix, seed_for(self.seed, site.number))


def merge_cells(grid: tuple[int, int], share: float, num_prefix: int) -> Matched:
    """Merge a share of the 2 x 2 cells of a grid, each into its first patch; a cell at the edge may be cut."""
    rows, columns = torch.arange(grid[0])[:, None], torch.arange(grid[1])
    cells = (rows // 2 * ((grid[1] + 1) // 2) + columns // 2).flatten()
    num_cells = int(cells[-1]) + 1
    before = (torch.arange(num_cells + 1) * round(share * num_cells)).div(num_cells, rounding_mode="floor")
    is_merged = (before.diff() > 0)[cells]
    is_first = ((rows % 2 == 0) & (columns % 2 == 0)).flatten()
    kinds = (~is_merged, is_merged & is_first, is_merged & ~is_first)
    alone, hosts, merged = (kind.nonzero().flatten() for kind in kinds)
    return matched(num_prefix, alone[None], hosts[None], merged[None], before[cells[merged]][None])


@dataclass(frozen=True)
class Uniform(Method):
    """Merge 2 x 2 cells of the grid.

    Attributes:
        share: Of the cells, those that are merged.
        block: The block in which they are.
    """

    name = "uniform"
    title = "uniform 2 x 2"
    block_class = FixedBlock
    gives_all_tokens = True
    unmerge: ClassVar[bool | None] = None  # where the model reads all tokens

    share: float
    block: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise PmvitError(f"share: expected a share of the 2 x 2 cells, 0 to 1; got {self.share}")

    @classmethod
    def options_at(cls, strength: float, encoder: Encoder, options: dict[str, Any]) -> dict[str, Any]:
        return {"share": strength}

    def wraps(self, site: Site) -> bool:
        return site.number >= self.first(site)

    def first(self, site: Site) -> int:
        (first,) = numbers_of_blocks((self.block,), site.depth, "block")
        return first

    def matched(self, site: Site) -> Matched:
        return merge_cells(site.grid, self.share if site.number == self.first(site) else 0.0, site.num_prefix)
