"""DynamicViT (Rao et al., NeurIPS 2021, arXiv:2106.02034), written from the paper for comparison.

Before a few blocks, a small network predicts for each patch token, from itself and the mean of those that are left,
whether it is kept. While training no token leaves: a decision is drawn by Gumbel-softmax, straight through, and a token
that was dropped is masked in the attention of all others (Eq. 11), so that gradients reach the decision; a loss holds
the kept share at its target (Eq. 14). In inference the best share of the tokens is kept and the others are gone.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pmvit.methods.attention import attend, best, mlp_update, take
from pmvit.methods.base import MethodBlock, Site
from pmvit.methods.staged import Staged
from pmvit.wrapping import TrainingPass


def attention_mask(is_kept: Tensor, num_prefix: int) -> Tensor:
    """How much keys count, (batch, 1, queries, keys): those that are kept, and each token for itself (Eq. 11)."""
    counts = F.pad(is_kept.squeeze(-1), (num_prefix, 0), value=1.0)[:, None, None]
    own = torch.eye(counts.shape[-1], dtype=counts.dtype, device=counts.device)
    return counts + (1 - counts) * own


class DecidingBlock(MethodBlock[Any]):
    """A block on what is kept; some decide first. It hands on whether each patch is kept, (batch, patches, 1), while
    none leaves."""

    @abstractmethod
    def decide(self, patches: Tensor, is_kept: Tensor) -> Tensor:
        """While training: what is kept of what is there."""

    @abstractmethod
    def drop(self, patches: Tensor, is_kept: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """In inference: the patches that go on, and which of them count if not all do."""

    def run(self, tokens: Tensor, is_kept: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        prefix, patches = tokens.tensor_split([self.num_prefix], dim=1)
        if self.training:
            is_kept = self.decide(patches, torch.ones_like(patches[..., :1]) if is_kept is None else is_kept)
        else:
            patches, is_kept = self.drop(patches, is_kept)
            tokens = torch.cat([prefix, patches], dim=1)
        mask = None if is_kept is None else attention_mask(is_kept, self.num_prefix)
        tokens = tokens + attend(self.block, tokens, mask=mask).update
        return tokens + mlp_update(self.block, tokens), is_kept


class TokenPredictor(nn.Module):
    """The logarithm of the probabilities that tokens are kept and dropped, (batch, tokens, 2)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
        half, quarter = nn.Linear(width, width // 2), nn.Linear(width // 2, width // 4)
        self.decide = nn.Sequential(half, nn.GELU(), quarter, nn.GELU(), nn.Linear(width // 4, 2))

    def forward(self, patches: Tensor, is_kept: Tensor) -> Tensor:
        """Of (batch, tokens, width) patches, of which only those count for the mean that are kept."""
        local, whole = self.embed(patches).chunk(2, dim=-1)
        whole = (whole * is_kept).sum(1, keepdim=True) / is_kept.sum(1, keepdim=True).clamp_min(1e-6)
        scores: Tensor = self.decide(torch.cat([local, whole.expand_as(local)], dim=-1))
        return scores.log_softmax(-1)


class DynamicBlock(DecidingBlock):
    """A block on what is kept; those of the stages decide first, by their predictor."""

    def __init__(self, block: Any, site: Site, method: "DynamicVit") -> None:
        super().__init__(block, site, method)
        self.stages = method.stages(site.depth)
        self.predictor = TokenPredictor(block.norm1.weight.shape[0]) if site.number in self.stages else None
        self._kept_share: Tensor | None = None

    def decide(self, patches: Tensor, is_kept: Tensor) -> Tensor:
        if self.predictor is not None:
            is_kept = is_kept * F.gumbel_softmax(self.predictor(patches, is_kept), hard=True)[..., :1]
            self._kept_share = is_kept.mean((1, 2))
        return is_kept

    def drop(self, patches: Tensor, is_kept: Tensor | None) -> tuple[Tensor, None]:
        if self.predictor is not None:
            scores = self.predictor(patches, torch.ones_like(patches[..., :1]))[..., 0]
            patches = take(patches, best(scores, self.method.number(patches.shape[1]))[0])
        return patches, None

    def extra_loss(self, model: nn.Module, last: TrainingPass | None) -> Tensor | None:
        """How far the kept share of each image is from its target, squared (Eq. 14)."""
        share, self._kept_share = self._kept_share, None
        target = self.method.keep ** sum(stage <= self.site.number for stage in self.stages)
        weight = self.method.ratio_weight / len(self.stages)
        return None if share is None else weight * (share - target).square().mean()


@dataclass(frozen=True)
class DynamicVit(Staged):
    """Pruning by small networks that learn which tokens matter.

    Attributes:
        ratio_weight: Of the loss that holds the kept share at its target, over all stages.
    """

    name = "dynamic-vit"
    title = "DynamicViT"
    block_class = DynamicBlock
    needs_class_token = True
    needs_class_pooling = True  # dropped tokens stay while training
    needs_training = True

    ratio_weight: float = 2.0

    def wraps(self, site: Site) -> bool:
        return self.keep < 1 and site.number >= self.stages(site.depth)[0]
