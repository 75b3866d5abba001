"""DynamicViT (Rao et al., NeurIPS 2021, arXiv:2106.02034), written from the paper for comparison.

Before a few blocks, a small network predicts for each patch token, from itself and the mean of those that are left,
whether it is kept. While training no token leaves: a decision is drawn by Gumbel-softmax, straight through, and a token
that was dropped is masked in the attention of all others (Eq. 11), so that gradients reach the decision; a loss holds
the kept share at its target (Eq. 14). In inference the best share of the tokens is kept and the others are gone.
"""

from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pmvit.methods.attention import best, run, take
from pmvit.methods.base import MethodBlock, Site
from pmvit.methods.staged import Staged, kept
from pmvit.wrapping import TrainingPass


class Decided(NamedTuple):
    """While training: all tokens, and whether each patch is still kept, (batch, patches, 1)."""

    tokens: Tensor
    kept: Tensor


class TokenPredictor(nn.Module):
    """The logarithm of the probabilities that tokens are kept and dropped, (batch, tokens, 2)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
        self.decide = nn.Sequential(
            nn.Linear(width, width // 2),
            nn.GELU(),
            nn.Linear(width // 2, width // 4),
            nn.GELU(),
            nn.Linear(width // 4, 2),
        )

    def forward(self, patches: Tensor, is_kept: Tensor) -> Tensor:
        """Of (batch, tokens, width) patches, of which only those count for the mean that are kept."""
        local, whole = self.embed(patches).chunk(2, dim=-1)
        whole = (whole * is_kept).sum(1, keepdim=True) / is_kept.sum(1, keepdim=True).clamp_min(1e-6)
        scores: Tensor = self.decide(torch.cat([local, whole.expand_as(local)], dim=-1))
        return scores.log_softmax(-1)


def attention_mask(is_kept: Tensor, num_prefix: int) -> Tensor:
    """How much keys count, (batch, 1, queries, keys): those that are kept, and each token for itself (Eq. 11)."""
    counts = torch.cat([is_kept.new_ones(is_kept.shape[0], num_prefix), is_kept.squeeze(-1)], dim=1)[:, None, None]
    own = torch.eye(counts.shape[-1], dtype=counts.dtype, device=counts.device)
    return counts + (1 - counts) * own


class DynamicBlock(MethodBlock):
    """A block that runs on what is kept; one with a `keep` below 1 decides first."""

    def __init__(self, block: Any, site: Site, keep: float, target: float, weight: float) -> None:
        super().__init__(block, site)
        self.keep = keep
        self.target = target
        self.weight = weight
        self.predictor = TokenPredictor(block.norm1.weight.shape[0]) if keep < 1 else None
        self._kept_share: Tensor | None = None

    def forward(self, state: Tensor | Decided) -> Tensor | Decided:
        if self.training:
            return self._masked(state)
        tokens = state[0] if isinstance(state, tuple) else state
        if self.predictor is not None:
            prefix, patches = tokens.tensor_split([self.num_prefix], dim=1)
            scores = self.predictor(patches, torch.ones_like(patches[..., :1]))[..., 0]
            chosen, _ = best(scores, kept(self.keep, patches.shape[1]))
            tokens = torch.cat([prefix, take(patches, chosen)], dim=1)
        return run(self.block, tokens)

    def _masked(self, state: Tensor | Decided) -> Tensor | Decided:
        """The block while training: all tokens stay, and attention does not see those that are dropped."""
        tokens = state[0] if isinstance(state, tuple) else state
        patches = tokens[:, self.num_prefix :]
        is_kept = state[1] if isinstance(state, tuple) else torch.ones_like(patches[..., :1])
        if self.predictor is not None:
            drawn = F.gumbel_softmax(self.predictor(patches, is_kept), hard=True)
            is_kept = is_kept * drawn[..., :1]
            self._kept_share = is_kept.mean((1, 2))
        tokens = run(self.block, tokens, attention_mask(is_kept, self.num_prefix))
        return tokens if self.is_last else Decided(tokens, is_kept)

    def extra_loss(self, model: nn.Module, last: TrainingPass | None) -> Tensor | None:
        """How far the kept share of each image is from its target, squared (Eq. 14)."""
        share, self._kept_share = self._kept_share, None
        return None if share is None else self.weight * (share - self.target).square().mean()


@dataclass(frozen=True)
class DynamicVit(Staged):
    """Pruning by small networks that learn which tokens matter.

    Attributes:
        ratio_weight: Of the loss that holds the kept share at its target, over all stages.
    """

    name = "dynamic-vit"
    title = "DynamicViT"
    needs_class_token = True
    needs_class_pooling = True  # dropped tokens stay while training
    needs_training = True

    ratio_weight: float = 2.0

    def block_for(self, block: nn.Module, site: Site) -> DynamicBlock | None:
        stages = self.stages(site.depth)
        if self.keep == 1 or site.number < stages[0]:
            return None
        keep = self.keep if site.number in stages else 1.0
        target = prod(self.keep for stage in stages if stage <= site.number)
        return DynamicBlock(block, site, keep, target, self.ratio_weight / len(stages))
