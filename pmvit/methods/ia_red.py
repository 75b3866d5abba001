"""IA-RED2 (Interpretability-Aware Redundancy Reduction; Pan et al., NeurIPS 2021, arXiv:2106.12620), from the paper.

The blocks form groups, and before each group a *multi-head interpreter* says how informative each patch token x is, by
its products with a learned policy token p: the mean over heads of sigmoid(F_q(x) F_k(p)). Tokens below one half are
dropped. Decisions are learned as a policy by REINFORCE: for each image they are drawn, u ~ Bernoulli(I); the reward is
1 - (kept / all)^2 if the prediction is right, and -penalty if not; and what counts is how much more it is than the
reward of the sure decisions, I >= 1/2 (self-critical baseline). While training, dropped tokens are masked in attention.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pmvit.hosts.outputs import predict
from pmvit.methods.attention import best, take
from pmvit.methods.base import Site
from pmvit.methods.dynamic_vit import DecidingBlock
from pmvit.methods.staged import Staged
from pmvit.wrapping import TrainingPass

SURE = 0.5  # the score from which on a token is kept by the sure decisions


class Interpreter(nn.Module):
    """How informative (batch, tokens, width) patch tokens are, (batch, tokens), from 0 to 1."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.policy = nn.Parameter(0.02 * torch.randn(width))

    def forward(self, patches: Tensor) -> Tensor:
        queries = self.query(self.norm(patches)).unflatten(-1, (self.heads, -1))
        key = self.key(self.policy).unflatten(-1, (self.heads, -1))
        scores: Tensor = (queries * key).sum(-1).sigmoid().mean(-1)
        return scores


class Drawn(NamedTuple):
    """Decisions of a pass while training: the share of all patches that is kept, and the mean log-probability of the
    decisions on those that were there, both (batch,)."""

    share: Tensor
    log_probability: Tensor


class InterpretedBlock(DecidingBlock):
    """A block on what is kept; the first one of a group asks its interpreter."""

    def __init__(self, block: Any, site: Site, method: "IaRed2") -> None:
        super().__init__(block, site, method)
        is_first = site.number in method.stages(site.depth)
        self.interpreter = Interpreter(block.norm1.weight.shape[0], block.attn.num_heads) if is_first else None
        self.is_sure = False
        self.drawn: Drawn | None = None

    def decide(self, patches: Tensor, is_kept: Tensor) -> Tensor:
        if self.interpreter is None:
            return is_kept
        scores = self.interpreter(patches.detach()).clamp(1e-4, 1 - 1e-4)
        decisions = (scores >= SURE if self.is_sure else torch.rand_like(scores) < scores).to(patches.dtype)
        there = is_kept.squeeze(-1)
        logs = torch.where(decisions > 0, scores.log(), (1 - scores).log())
        left: Tensor = there * decisions
        self.drawn = Drawn(left.mean(1).detach(), (logs * there).sum(1) / there.sum(1).clamp_min(1))
        return left[..., None]

    def drop(self, patches: Tensor, is_kept: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if self.interpreter is None:
            return patches, is_kept
        scores = self.interpreter(patches)
        if is_kept is not None:
            scores = scores.masked_fill(is_kept.squeeze(-1) == 0, -1.0)
        number, threshold = self.method.number(patches.shape[1]), self.method.threshold
        if threshold is not None:
            number = min(number, max(int((scores >= threshold).sum(1).max()), 1))
        chosen, _ = best(scores, number)
        counts = None if threshold is None else (scores.gather(1, chosen) >= threshold).to(patches.dtype)[..., None]
        return take(patches, chosen), counts

    def extra_loss(self, model: nn.Module, last: TrainingPass | None) -> Tensor | None:
        """The policy's loss, for all blocks together: the first that has drawn anything asks for it."""
        return None if last is None or self.drawn is None else policy_loss(model, last, self.method)


def reward(share: Tensor, is_right: Tensor, penalty: float) -> Tensor:
    """Of keeping a share of the patches: the fewer, the more, but a loss if the prediction is wrong."""
    return torch.where(is_right, 1 - share.square(), torch.full_like(share, -penalty))


def policy_loss(model: nn.Module, last: TrainingPass, method: "IaRed2") -> Tensor:
    """Minus the log-probability of what was drawn, weighted by its advantage over the sure decisions."""
    blocks: list[Any] = [block for block in model.modules() if isinstance(block, InterpretedBlock) and block.drawn]
    drawn = [block.drawn for block in blocks]
    try:
        for block in blocks:
            block.is_sure = True
        with torch.no_grad():
            is_right = predict(model, last.images).argmax(-1) == last.wanted
        baselines = [reward(block.drawn.share, is_right, method.penalty) for block in blocks]
    finally:
        for block in blocks:
            block.is_sure, block.drawn = False, None
    is_right = last.logits.argmax(-1) == last.wanted
    advantages = [
        reward(one.share, is_right, method.penalty) - base for one, base in zip(drawn, baselines, strict=True)
    ]
    losses = [-(more * one.log_probability).mean() for more, one in zip(advantages, drawn, strict=True)]
    return method.policy_weight * torch.stack(losses).sum()


@dataclass(frozen=True)
class IaRed2(Staged):
    """Pruning by interpreters that learn a policy.

    Attributes:
        threshold: Keep, of the share, tokens with at least this score alone, the paper's 0.5: images differ in what
            they cost then. If not given, every image keeps the share.
        penalty: For a wrong prediction.
        policy_weight: Of the policy's loss.
    """

    name = "ia-red2"
    title = "IA-RED2"
    block_class = InterpretedBlock
    needs_class_token = True
    needs_class_pooling = True  # dropped tokens stay while training
    needs_training = True
    depths = (0.0, 1 / 3, 2 / 3)

    threshold: float | None = None
    penalty: float = 0.5
    policy_weight: float = 1.0

    def wraps(self, site: Site) -> bool:
        return site.number >= self.stages(site.depth)[0] and (self.keep < 1 or self.threshold is not None)
