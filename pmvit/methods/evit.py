"""EViT (Liang et al., ICLR 2022, arXiv:2202.07800), written from the paper for comparison.

At a few blocks, between attention and MLP, the patch tokens are ranked by the attention of the class token to them, the
mean over the heads (Section 3.2). The best share of them stays; the others, the inattentive ones, become one more
token, the sum of them weighted by that attention (Section 3.3).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pmvit.methods.staged import ClassAttention, parted


@dataclass(frozen=True)
class Evit(ClassAttention):
    """Token reorganization: keep the attentive tokens and fuse the others."""

    name = "evit"
    title = "EViT"

    @staticmethod
    def reduce(patches: Tensor, scores: Tensor, number: int) -> Tensor:
        attentive, inattentive, weights = parted(patches, scores, number)
        return torch.cat([attentive, weights[:, None] @ inattentive], dim=1)
