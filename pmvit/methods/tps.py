"""eTPS (Joint Token Pruning and Squeezing; Wei et al., CVPR 2023, arXiv:2304.10716), written from the paper.

The tokens are parted as in EViT, by class attention. Each pruned token then looks for its most similar kept one, by
cosine (matching), and is squeezed into it (fusing): a kept token becomes the mean of itself and all that chose it,
weighted by the exponential of their similarity to it, which for itself is e.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from pmvit.methods.staged import ClassAttention, parted


def squeeze(kept: Tensor, pruned: Tensor) -> Tensor:
    """Bring (batch, pruned, width) tokens into the most similar of (batch, kept, width) ones."""
    similarity, hosts = (F.normalize(pruned, dim=-1) @ F.normalize(kept, dim=-1).transpose(1, 2)).max(-1)
    weights = similarity.exp()[..., None]
    own = kept.new_ones(*kept.shape[:2], 1).exp()
    totals = own.scatter_add(1, hosts[..., None], weights)
    sums = (own * kept).scatter_add(1, hosts[..., None].expand_as(pruned), weights * pruned)
    return sums / totals


@dataclass(frozen=True)
class Tps(ClassAttention):
    """Joint token pruning and squeezing: keep the attentive tokens and squeeze the others into them."""

    name = "tps"
    title = "eTPS"

    @staticmethod
    def reduce(patches: Tensor, scores: Tensor, number: int) -> Tensor:
        attentive, inattentive, _ = parted(patches, scores, number)
        return squeeze(attentive, inattentive)
