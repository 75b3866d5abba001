"""Methods that keep the tokens the class token attends to most, in a few blocks, between attention and MLP.

EViT (Liang et al., ICLR 2022, arXiv:2202.07800): patch tokens are ranked by the attention of the class token to them,
the mean over the heads (Section 3.2). The best share of them stays; the others, the inattentive ones, become one more
token, the sum of them weighted by that attention (Section 3.3).

eTPS (Joint Token Pruning and Squeezing; Wei et al., CVPR 2023, arXiv:2304.10716): parted as in EViT. Each pruned token
then looks for its most similar kept one, by cosine (matching), and is squeezed into it (fusing): a kept token becomes
the mean of itself and all that chose it, weighted by the exponential of their similarity to it, which for itself is e.

Top-K, a floor that every method should be above, drops the others. All are written from the papers, for comparison.
"""

from abc import abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pmvit.methods.attention import Attended, Block, best, class_attention, take
from pmvit.methods.staged import Halfway


@dataclass(frozen=True)
class ClassAttention(Halfway):
    """A method that parts the tokens by class attention."""

    needs_class_token = True

    def reduce(self, patches: Tensor, block: Block, attended: Attended, number: int) -> Tensor:
        scores = class_attention(block, attended)[:, -patches.shape[1] :]
        chosen, others = best(scores, number)
        return self.fuse(take(patches, chosen), take(patches, others), scores.gather(1, others))

    @staticmethod
    @abstractmethod
    def fuse(attentive: Tensor, inattentive: Tensor, weights: Tensor) -> Tensor:
        """What is left of both kinds of tokens, of which the second have (batch, tokens) class attention."""


@dataclass(frozen=True)
class Evit(ClassAttention):
    """Token reorganization: keep the attentive tokens and fuse the others."""

    name = "evit"
    title = "EViT"

    @staticmethod
    def fuse(attentive: Tensor, inattentive: Tensor, weights: Tensor) -> Tensor:
        return torch.cat([attentive, weights[:, None] @ inattentive], dim=1)


@dataclass(frozen=True)
class Tps(ClassAttention):
    """Joint token pruning and squeezing: keep the attentive tokens and squeeze the others into them."""

    name = "tps"
    title = "eTPS"

    @staticmethod
    def fuse(attentive: Tensor, inattentive: Tensor, weights: Tensor) -> Tensor:
        return squeeze(attentive, inattentive)


@dataclass(frozen=True)
class TopK(ClassAttention):
    """Keep the tokens with the most class attention; nothing is left of the others."""

    name = "top-k"
    title = "Top-K"

    @staticmethod
    def fuse(attentive: Tensor, inattentive: Tensor, weights: Tensor) -> Tensor:
        return attentive


def squeeze(kept: Tensor, pruned: Tensor) -> Tensor:
    """Bring (batch, pruned, width) tokens into the most similar of (batch, kept, width) ones."""
    similarity, hosts = (F.normalize(pruned, dim=-1) @ F.normalize(kept, dim=-1).transpose(1, 2)).max(-1)
    weights = similarity.exp()[..., None]
    own = kept.new_ones(*kept.shape[:2], 1).exp()
    totals = own.scatter_add(1, hosts[..., None], weights)
    sums = (own * kept).scatter_add(1, hosts[..., None].expand_as(pruned), weights * pruned)
    return sums / totals
