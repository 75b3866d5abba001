"""Floors, which every method should be above: drop the least attended tokens, or merge at random."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pmvit.data.seeding import seed_for
from pmvit.methods.base import Site, check_size
from pmvit.methods.merging import Matched, Merging, MergingBlock, most_merged
from pmvit.methods.staged import ClassAttention, parted


@dataclass(frozen=True)
class TopK(ClassAttention):
    """Keep the tokens with the most class attention; nothing is left of the others."""

    name = "top-k"
    title = "Top-K"

    @staticmethod
    def reduce(patches: Tensor, scores: Tensor, number: int) -> Tensor:
        return parted(patches, scores, number)[0]


class RandomBlock(MergingBlock):
    """A block in which tokens are merged that were drawn once and for all."""

    stays: Tensor
    merged: Tensor
    into: Tensor

    def __init__(self, block: nn.Module, site: Site, method: "RandomMerging", r: int, unmerges: bool) -> None:
        super().__init__(block, site, method, r, unmerges)
        self.num_tokens = site.num_prefix + site.num_patches
        for before in method.schedule(site.depth)[: site.number]:
            self.num_tokens -= most_merged(before, self.num_tokens, site.num_prefix)
        r = most_merged(r, self.num_tokens, site.num_prefix)
        drawn = draw(self.num_tokens, r, site.num_prefix, seed_for(method.seed, site.number))
        for name, places in drawn._asdict().items():
            self.register_buffer(name, places, persistent=False)

    def find(self, keys: Tensor, r: int) -> Matched:
        check_size(keys, self.num_tokens)
        return Matched(*(places.expand(keys.shape[0], -1) for places in (self.stays, self.merged, self.into)))


def draw(num_tokens: int, r: int, num_protected: int, seed: int) -> Matched:
    """Random pairs for one image."""
    generator = torch.Generator().manual_seed(seed)
    first, second = (num_protected + 1) // 2, num_protected // 2
    num_odd = num_tokens // 2
    order = first + torch.randperm(num_tokens - num_odd - first, generator=generator)
    stays = torch.cat([torch.arange(first), order[r:].sort().values])
    into = second + torch.randint(num_odd - second, (r,), generator=generator)
    return Matched(stays[None], order[None, :r], into[None])


@dataclass(frozen=True)
class RandomMerging(Merging):
    """Merge random tokens, the same for every image.

    Attributes:
        seed: Of the draw.
    """

    name = "random"
    title = "random merging"
    block_class = RandomBlock

    seed: int = 0
