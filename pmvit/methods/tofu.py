"""Token Fusion (ToFu; Kim et al., WACV 2024, arXiv:2312.01026), written from the paper for comparison.

Pairs are found as ToMe finds them. What happens to them depends on the depth: in the first blocks, which answer far
from linearly to a mixture of two tokens, the token that found a partner is pruned; in the later ones, which are closer
to linear, the pair is merged. Merging is MLERP: the direction is that of the mean, the length that of the longest
token, so that the lengths of tokens stay distributed as the model knows them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pmvit.methods.attention import take
from pmvit.methods.tome import Matched, Tome, TomeBlock


def with_length_of_longest(merged: Tensor, tokens: Tensor, found: Matched) -> Tensor:
    """Merged tokens, each as long as the longest of the tokens that became it."""
    lengths = tokens.norm(dim=-1, keepdim=True)
    longest = take(lengths, found.stays)
    longest = longest.scatter_reduce(1, found.into[..., None], take(lengths, found.merged), "amax")
    tiny = torch.finfo(merged.dtype).tiny
    scaled: Tensor = merged * (longest / merged.norm(dim=-1, keepdim=True).clamp_min(tiny))
    return scaled


class TofuBlock(TomeBlock):
    """A block that prunes or merges the r tokens that have the most similar partners."""

    def merge(self, tokens: Tensor, sizes: Tensor | None, found: Matched) -> tuple[Tensor, Tensor | None]:
        first = self.site.depth // 2 if self.method.prune_blocks is None else self.method.prune_blocks
        if self.site.number < first:
            return take(tokens, found.stays), None if sizes is None else take(sizes, found.stays)
        merged, sizes = super().merge(tokens, sizes, found)
        return with_length_of_longest(merged, tokens, found), sizes


@dataclass(frozen=True)
class Tofu(Tome):
    """Token Fusion.

    Attributes:
        prune_blocks: How many of the first blocks prune instead of merging; if not given, the first half of them.
    """

    name = "tofu"
    title = "ToFu"
    block_class = TofuBlock

    prune_blocks: int | None = None
