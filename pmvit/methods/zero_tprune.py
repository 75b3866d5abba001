"""Zero-TPrune (Wang et al., CVPR 2024, arXiv:2305.17328), written from the paper for comparison.

The attention of a block is a graph: each token passes its importance on to those it attends to. *Weighted PageRank*
repeats this until it settles. Heads whose importance varies too little or too much over the tokens do not count
(variance-based head filter); the root of the mean square over the others is the importance of a token (emphasizing
informative region). With it tokens are pruned twice: the less important half is compared with the other half, and the
few that are most similar to one there go (S-stage); then the least important ones go (I-stage).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pmvit.methods.attention import attend, best, mlp_update, take
from pmvit.methods.base import MethodBlock, Site
from pmvit.methods.staged import Staged, kept


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


class ZeroTPruneBlock(MethodBlock):
    """A block that prunes similar and unimportant tokens between attention and MLP."""

    def __init__(self, block: nn.Module, site: Site, method: "ZeroTPrune") -> None:
        super().__init__(block, site)
        self.method = method

    def forward(self, tokens: Tensor) -> Tensor:
        count = tokens.shape[1] - self.num_prefix
        number = kept(self.method.keep, count)
        attended = attend(self.block, tokens, maps=number < count)
        tokens = tokens + attended.update
        if attended.maps is not None:
            with torch.no_grad():
                keys = attended.keys.transpose(1, 2).flatten(2)[:, self.num_prefix :]
                places = self._choose(attended.maps, keys, number)
            prefix, patches = tokens.tensor_split([self.num_prefix], dim=1)
            tokens = torch.cat([prefix, take(patches, places)], dim=1)
        return tokens + mlp_update(self.block, tokens)

    def _choose(self, maps: Tensor, keys: Tensor, number: int) -> Tensor:
        ranks = weighted_page_rank(maps, self.method.rounds)[..., self.num_prefix :]
        scores = importance(ranks, self.method.variance)
        left = without_similar(scores, keys, min(self.method.similar, scores.shape[1] - number))
        chosen, _ = best(scores.gather(1, left), number)
        return left.gather(1, chosen)


@dataclass(frozen=True)
class ZeroTPrune(Staged):
    """Pruning by PageRank on attention and by similarity, without training.

    Attributes:
        similar: How many tokens go for their similarity, of those that go at a block.
        rounds: Of PageRank.
        variance: The least and the largest variance of a head that counts.
    """

    name = "zero-tprune"
    title = "Zero-TPrune"
    depths = (1 / 12, 3 / 12, 6 / 12, 9 / 12, 11 / 12)

    similar: int = 10
    rounds: int = 30
    variance: tuple[float, float] = (0.01, 0.7)

    def block_for(self, block: nn.Module, site: Site) -> ZeroTPruneBlock | None:
        return ZeroTPruneBlock(block, site, self) if site.number in self.stages(site.depth) else None
