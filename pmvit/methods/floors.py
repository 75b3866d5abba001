"""Floors, which every method should be above: drop the least attended tokens, or merge at random."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pmvit.data.seeding import seed_for
from pmvit.methods.base import Site, register
from pmvit.methods.merging import Matched, Merging, MergingBlock, most_merged
from pmvit.methods.staged import ClassAttention, parted


@register
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

    def __init__(self, block: nn.Module, site: Site, r: int, unmerges: bool, *, num_tokens: int, seed: int) -> None:
        super().__init__(block, site, r, unmerges)
        self.num_tokens = num_tokens
        drawn = draw(num_tokens, self.number(num_tokens) or 0, self.num_prefix, seed)
        for name, places in drawn._asdict().items():
            self.register_buffer(name, places, persistent=False)

    def find(self, keys: Tensor, r: int) -> Matched:
        if keys.shape[1] != self.num_tokens:
            raise ValueError(f"expected {self.num_tokens} tokens, got {keys.shape[1]}: are the images of another size?")
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


@register
@dataclass(frozen=True)
class RandomMerging(Merging):
    """Merge random tokens, the same for every image.

    Attributes:
        seed: Of the draw.
    """

    name = "random"
    title = "random merging"

    seed: int = 0

    def merging_block(self, block: nn.Module, site: Site, r: int, unmerges: bool) -> RandomBlock:
        num_tokens = site.num_prefix + site.num_patches
        for before in self.schedule(site.depth)[: site.number]:
            num_tokens -= most_merged(before, num_tokens, site.num_prefix)
        seed = seed_for(self.seed, site.number)
        return RandomBlock(block, site, r, unmerges, num_tokens=num_tokens, seed=seed)
