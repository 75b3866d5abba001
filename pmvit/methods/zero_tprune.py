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
from torch import Tensor

from pmvit.methods.attention import Attended, Block, best, take
from pmvit.methods.staged import Halfway


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
