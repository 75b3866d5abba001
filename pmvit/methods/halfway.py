"""Methods that make patch tokens fewer in a few blocks, between attention and MLP, by that attention; from the papers.

EViT (Liang et al., ICLR 2022, arXiv:2202.07800): patch tokens are ranked by the attention of the class token to them,
the mean over the heads (Section 3.2). The best share of them stays; the others, the inattentive ones, become one more
token, the sum of them weighted by that attention (Section 3.3).

eTPS (Joint Token Pruning and Squeezing; Wei et al., CVPR 2023, arXiv:2304.10716): parted as in EViT. Each pruned token
then looks for its most similar kept one, by cosine (matching), and is squeezed into it (fusing): a kept token becomes
the mean of itself and all that chose it, weighted by the exponential of their similarity to it, which for itself is e.

Top-K, a floor that every method should be above, drops the others.

Zero-TPrune (Wang et al., CVPR 2024, arXiv:2305.17328): the attention of a block is a graph: each token passes its
importance on to those it attends to. *Weighted PageRank* repeats this until it settles. Heads whose importance varies
too little or too much over the tokens do not count (variance-based head filter); the root of the mean square over the
others is the importance of a token (emphasizing informative region). With it tokens are pruned twice: the less
important half is compared with the other half, and the few that are most similar to one there go (S-stage); then the
least important ones go (I-stage).
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from pmvit.methods.attention import Attended, Block, attend, best, class_attention, mlp_update, take
from pmvit.methods.base import MethodBlock, Site
from pmvit.methods.staged import Staged


class HalfwayBlock(MethodBlock["Halfway"]):
    """A block whose patch tokens become fewer between attention and MLP."""

    def forward(self, tokens: Tensor) -> Tensor:
        count = tokens.shape[1] - self.num_prefix
        number = self.method.number(count)
        attended = attend(self.block, tokens, maps=self.method.reads_maps and number < count)
        prefix, patches = (tokens + attended.update).tensor_split([self.num_prefix], dim=1)
        if number < count:
            patches = self.method.reduce(patches, self.block, attended, number)
        tokens = torch.cat([prefix, patches], dim=1)
        return tokens + mlp_update(self.block, tokens)


@dataclass(frozen=True)
class Halfway(Staged):
    """A method that makes patch tokens fewer between the attention and the MLP of a block, by that attention."""

    block_class = HalfwayBlock
    reads_maps: ClassVar[bool] = False  # whether it reads the whole maps

    @abstractmethod
    def reduce(self, patches: Tensor, block: Block, attended: Attended, number: int) -> Tensor:
        """Make (batch, tokens, width) patch tokens fewer: so many stay."""

    def wraps(self, site: Site) -> bool:
        return site.number in self.stages(site.depth)


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


def weighted_page_rank(maps: Tensor, rounds: int) -> Tensor:
    """Importance of each token, (..., tokens), in graphs of attention (..., queries, keys); it sums to one."""
    scores = torch.full_like(maps[..., :1, :], 1 / maps.shape[-1])
    for _ in range(rounds):
        scores = scores @ maps
    return scores.squeeze(-2)


def importance(scores: Tensor, variance: tuple[float, float]) -> Tensor:
    """One (batch, tokens) importance of (batch, heads, tokens), from those heads whose variance is in a range.

    Variance is that of scores with a mean of one. An image without such a head has all of them count.
    """
    spread = (scores / scores.mean(-1, keepdim=True)).var(-1, keepdim=True)
    counts = ((spread >= variance[0]) & (spread <= variance[1])).to(scores.dtype)
    counts = torch.where(counts.sum(1, keepdim=True) > 0, counts, torch.ones_like(counts))
    return ((scores.square() * counts).sum(1) / counts.sum(1)).sqrt()


def without_similar(scores: Tensor, keys: Tensor, number: int) -> Tensor:
    """The places of (batch, tokens) without those of the less important half that are most like one of the other."""
    upper, lower = best(scores, scores.shape[1] // 2)
    unit = F.normalize(keys, dim=-1)
    likeness = (take(unit, lower) @ take(unit, upper).transpose(1, 2)).amax(-1)
    _, unlike = best(likeness, min(number, lower.shape[1]))
    return torch.cat([upper, lower.gather(1, unlike)], dim=1)


@dataclass(frozen=True)
class ZeroTPrune(Halfway):
    """Pruning by PageRank on attention and by similarity, without training.

    Attributes:
        similar: How many tokens go for their similarity, of those that go at a block.
        rounds: Of PageRank.
        variance: The least and the largest variance of a head that counts.
    """

    name = "zero-tprune"
    title = "Zero-TPrune"
    depths = (1 / 12, 3 / 12, 6 / 12, 9 / 12, 11 / 12)
    reads_maps = True

    similar: int = 10
    rounds: int = 30
    variance: tuple[float, float] = (0.01, 0.7)

    def reduce(self, patches: Tensor, block: Block, attended: Attended, number: int) -> Tensor:
        count = patches.shape[1]
        with torch.no_grad():
            scores = importance(weighted_page_rank(attended.maps, self.rounds)[..., -count:], self.variance)
            keys = attended.keys.transpose(1, 2).flatten(2)[:, -count:]
            left = without_similar(scores, keys, min(self.similar, count - number))
            places = left.gather(1, best(scores.gather(1, left), number)[0])
        return take(patches, places)
