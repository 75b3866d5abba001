"""EViT (Liang et al., ICLR 2022, arXiv:2202.07800), written from the paper for comparison.

At a few blocks, between attention and MLP, the patch tokens are ranked by the attention of the class token to them, the
mean over the heads (Section 3.2). The best share of them stays; the others, the inattentive ones, become one more
token, the sum of them weighted by that attention (Section 3.3).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pmvit.methods.base import Host, MethodBlock, register
from pmvit.methods.staged import ClassAttentionBlock, Staged, parted


class EvitBlock(ClassAttentionBlock):
    """A block that keeps the attentive tokens and fuses the others."""

    def reduce(self, patches: Tensor, scores: Tensor, number: int) -> Tensor:
        attentive, inattentive, weights = parted(patches, scores, number)
        return torch.cat([attentive, weights[:, None] @ inattentive], dim=1)


@register
@dataclass(frozen=True)
class Evit(Staged):
    """Token reorganization by class attention."""

    name = "evit"
    title = "EViT"
    needs_class_token = True

    def stage(self, block: nn.Module, encoder: Host) -> MethodBlock:
        return EvitBlock(block, self.keep, encoder.num_prefix_tokens)
