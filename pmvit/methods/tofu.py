"""Token Fusion (ToFu; Kim et al., WACV 2024, arXiv:2312.01026), written from the paper for comparison.

Pairs are found as ToMe finds them. What happens to them depends on the depth: in the first blocks, which answer far
from linearly to a mixture of two tokens, the token that found a partner is pruned; in the later ones, which are closer
to linear, the pair is merged. Merging is MLERP: the direction is that of the mean, the length that of the longest
token, so that the lengths of tokens stay distributed as the model knows them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pmvit.methods.attention import take
from pmvit.methods.base import Site
from pmvit.methods.merging import Matched, Merging, MergingBlock, in_order, merge_matched
from pmvit.methods.tome import match


def mlerp_matched(tokens: Tensor, sizes: Tensor, matched: Matched, num_protected: int) -> tuple[Tensor, Tensor]:
    """`merge_matched` with the length of the longest of the tokens that become one."""
    merged, new_sizes = merge_matched(tokens, sizes, matched, num_protected)
    lengths = tokens.norm(dim=-1, keepdim=True)
    even, odd = lengths[:, ::2], lengths[:, 1::2]
    longest = odd.scatter_reduce(1, matched.into[..., None], take(even, matched.merged), "amax")
    lengths = in_order(take(even, matched.stays), longest, num_protected)
    return merged * (lengths / merged.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(merged.dtype).tiny)), new_sizes


def prune_matched(tokens: Tensor, matched: Matched, num_protected: int) -> Tensor:
    """Leave out the tokens that would be merged; the others are in the order that `merge_matched` leaves."""
    return in_order(take(tokens[:, ::2], matched.stays), tokens[:, 1::2], num_protected)


class TofuBlock(MergingBlock):
    """A block that prunes or merges the r tokens that have the most similar partners."""

    def __init__(self, block: nn.Module, site: Site, method: "Tofu", r: int, unmerges: bool) -> None:
        super().__init__(block, site, method, r, unmerges)
        self.prunes = site.number < (site.depth // 2 if method.prune_blocks is None else method.prune_blocks)

    def find(self, keys: Tensor, r: int) -> Matched:
        return match(keys, r, self.num_prefix)

    def merge(self, tokens: Tensor, sizes: Tensor | None, found: Matched) -> tuple[Tensor, Tensor | None]:
        if self.prunes:
            left = None if sizes is None else prune_matched(sizes, found, self.num_prefix)
            return prune_matched(tokens, found, self.num_prefix), left
        sizes = tokens.new_ones(*tokens.shape[:2], 1) if sizes is None else sizes
        return mlerp_matched(tokens, sizes, found, self.num_prefix)


@dataclass(frozen=True)
class Tofu(Merging):
    """Token Fusion.

    Attributes:
        prune_blocks: How many of the first blocks prune instead of merging; if not given, the first half of them.
    """

    name = "tofu"
    title = "ToFu"
    block_class = TofuBlock

    prune_blocks: int | None = None
