"""Floors, which every method should be above: drop the least attended tokens, or merge at random."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pmvit.data.seeding import seed_for
from pmvit.methods.base import Host, MethodBlock, register
from pmvit.methods.merging import Matched, Merging, MergingBlock
from pmvit.methods.staged import ClassAttentionBlock, Staged, parted


class TopKBlock(ClassAttentionBlock):
    """A block that drops the tokens that the class token attends to least."""

    def reduce(self, patches: Tensor, scores: Tensor, number: int) -> Tensor:
        return parted(patches, scores, number)[0]


@register
@dataclass(frozen=True)
class TopK(Staged):
    """Keep the tokens with the most class attention; nothing is left of the others."""

    name = "top-k"
    title = "Top-K"
    needs_class_token = True

    def stage(self, block: nn.Module, encoder: Host) -> MethodBlock:
        return TopKBlock(block, self.keep, encoder.num_prefix_tokens)


class RandomBlock(MergingBlock):
    """A block in which tokens are merged that were drawn once and for all."""

    stays: Tensor
    merged: Tensor
    into: Tensor

    def draw(self, num_tokens: int, seed: int) -> int:
        """Choose what is merged of so many tokens; return how many are left."""
        self.num_tokens = num_tokens
        r = self.number(num_tokens) or 0
        for name, places in draw(num_tokens, r, self.num_prefix, seed)._asdict().items():
            self.register_buffer(name, places, persistent=False)
        return num_tokens - r

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

    def block_maker(self, number: int, depth: int) -> Callable[..., RandomBlock]:
        return RandomBlock

    def wrap(self, encoder: Host, *, dense: bool) -> None:
        super().wrap(encoder, dense=dense)
        num_tokens = encoder.num_prefix_tokens + encoder.patch_embed.num_patches
        for number, block in enumerate(encoder.blocks):
            num_tokens = block.draw(num_tokens, seed_for(self.seed, number))
