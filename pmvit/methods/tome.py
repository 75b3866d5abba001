"""Token Merging (ToMe; Bolya et al., ICLR 2023, arXiv:2210.09461), written from the paper for comparison.

In every block, between attention and MLP, the r most similar pairs of tokens become one. Which ones they are is found
anew for every image, by *bipartite soft matching* (Section 3): tokens are split alternately into two sets; each token
of the first points at its most similar one of the second, by the cosine of their keys (mean over heads); the r
strongest of these edges are merged. Attention to a merged token counts for all patches in it (Eq. 1).

What reads every token afterwards, such as the decoder of a Segmenter, gets them back after the last block: each patch
has the value of the token that it was merged into.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pmvit.methods.merging import Matched, Merging, MergingBlock


def match(keys: Tensor, r: int, num_protected: int) -> Matched:
    """Bipartite soft matching of (batch, tokens, width) keys."""
    unit = F.normalize(keys, dim=-1)
    similarity = unit[:, ::2] @ unit[:, 1::2].transpose(1, 2)
    if num_protected:
        first, second = (num_protected + 1) // 2, num_protected // 2
        similarity[:, :first] = -torch.inf
        similarity[:, :, :second] = -torch.inf
    strength, partner = similarity.max(-1)
    by_strength = strength.argsort(dim=-1, descending=True)
    merged, stays = by_strength[:, :r], by_strength[:, r:].sort(dim=1).values
    return Matched(stays, merged, partner.gather(1, merged))


class TomeBlock(MergingBlock):
    """A block with the r most similar pairs merged between attention and MLP."""

    def find(self, keys: Tensor, r: int) -> Matched:
        return match(keys, r, self.num_prefix)

    def number(self, num_tokens: int) -> int | None:
        r = super().number(num_tokens)
        return 0 if r is None and self.method.always_match else r


@dataclass(frozen=True)
class Tome(Merging):
    """Token Merging.

    Attributes:
        always_match: Look for pairs even where none is merged.
    """

    name = "tome"
    title = "ToMe"
    block_class = TomeBlock

    always_match: bool = False
