"""IA-RED2 (Interpretability-Aware Redundancy Reduction; Pan et al., NeurIPS 2021, arXiv:2106.12620), from the paper.

The blocks form groups, and before each group a *multi-head interpreter* says how informative each patch token x is, by
its products with a learned policy token p: the mean over heads of sigmoid(F_q(x) F_k(p)). Tokens below one half are
dropped. Decisions are learned as a policy by REINFORCE: for each image they are drawn, u ~ Bernoulli(I); the reward is
1 - (kept / all)^2 if the prediction is right, and -penalty if not; and what counts is how much more it is than the
reward of the sure decisions, I >= 1/2 (self-critical baseline). While training, dropped tokens are masked in attention.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pmvit.hosts.outputs import predict
from pmvit.methods.attention import best, run, take
from pmvit.methods.base import MethodBlock, Site
from pmvit.methods.dynamic_vit import Decided, attention_mask
from pmvit.methods.staged import Staged, kept
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


class InterpretedBlock(MethodBlock):
    """A block on what is kept; the first one of a group asks its interpreter."""

    def __init__(self, block: Any, site: Site, method: "IaRed2", is_first: bool) -> None:
        super().__init__(block, site)
        self.method = method
        self.interpreter = Interpreter(block.norm1.weight.shape[0], block.attn.num_heads) if is_first else None
        self.is_sure = False
        self.drawn: Drawn | None = None

    def forward(self, state: Tensor | Decided) -> Tensor | Decided:
        tokens, is_kept = state if isinstance(state, tuple) else (state, None)
        if self.training:
            is_kept = tokens.new_ones(*tokens[:, self.num_prefix :, :1].shape) if is_kept is None else is_kept
            is_kept = is_kept if self.interpreter is None else self._decide(self.interpreter, tokens, is_kept)
        elif self.interpreter is not None:
            tokens, is_kept = self._drop(self.interpreter, tokens, is_kept)
        mask = None if is_kept is None else attention_mask(is_kept, self.num_prefix)
        tokens = run(self.block, tokens, mask)
        return tokens if self.is_last or is_kept is None else Decided(tokens, is_kept)

    def _decide(self, interpreter: Interpreter, tokens: Tensor, is_kept: Tensor) -> Tensor:
        """Draw what is kept of what is there, (batch, patches, 1)."""
        scores = interpreter(tokens[:, self.num_prefix :].detach()).clamp(1e-4, 1 - 1e-4)
        decisions = (scores >= SURE if self.is_sure else torch.rand_like(scores) < scores).to(tokens.dtype)
        there = is_kept.squeeze(-1)
        logs = torch.where(decisions > 0, scores.log(), (1 - scores).log())
        left: Tensor = there * decisions
        self.drawn = Drawn(left.mean(1).detach(), (logs * there).sum(1) / there.sum(1).clamp_min(1))
        return left[..., None]

    def _drop(self, interpreter: Interpreter, tokens: Tensor, is_kept: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The tokens without those that are dropped; with a threshold, and which of them count in each image."""
        prefix, patches = tokens.tensor_split([self.num_prefix], dim=1)
        scores = interpreter(patches)
        if is_kept is not None:
            scores = scores.masked_fill(is_kept.squeeze(-1) == 0, -1.0)
        number = kept(self.method.keep, patches.shape[1])
        threshold = self.method.threshold
        if threshold is not None:
            number = min(number, max(int((scores >= threshold).sum(1).max()), 1))
        chosen, _ = best(scores, number)
        tokens = torch.cat([prefix, take(patches, chosen)], dim=1)
        if threshold is None:
            return tokens, None
        return tokens, (scores.gather(1, chosen) >= threshold).to(tokens.dtype)[..., None]

    def extra_loss(self, model: nn.Module, last: TrainingPass | None) -> Tensor | None:
        """The policy's loss, for all blocks together: the first that has drawn anything asks for it."""
        return None if last is None or self.drawn is None else policy_loss(model, last, self.method)


@contextmanager
def sure_decisions(blocks: list[InterpretedBlock]) -> Iterator[None]:
    """Let interpreters decide by their scores alone, without chance."""
    for block in blocks:
        block.is_sure = True
    try:
        yield
    finally:
        for block in blocks:
            block.is_sure = False


def reward(share: Tensor, is_right: Tensor, penalty: float) -> Tensor:
    """Of keeping a share of the patches: the fewer, the more, but a loss if the prediction is wrong."""
    return torch.where(is_right, 1 - share.square(), torch.full_like(share, -penalty))


def policy_loss(model: nn.Module, last: TrainingPass, method: "IaRed2") -> Tensor:
    """Minus the log-probability of what was drawn, weighted by its advantage over the sure decisions."""
    blocks = [block for block in model.modules() if isinstance(block, InterpretedBlock) and block.drawn is not None]
    drawn = [block.drawn for block in blocks]
    with torch.no_grad(), sure_decisions(blocks):
        sure_logits = predict(model, last.images)
    rights = [logits.argmax(-1) == last.wanted for logits in (last.logits, sure_logits)]
    losses = []
    for block, taken in zip(blocks, drawn, strict=True):
        baseline, block.drawn = block.drawn, None
        if taken is not None and baseline is not None:
            rewards = [reward(d.share, r, method.penalty) for d, r in zip((taken, baseline), rights, strict=True)]
            losses.append(-((rewards[0] - rewards[1]) * taken.log_probability).mean())
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
    needs_class_token = True
    needs_class_pooling = True  # dropped tokens stay while training
    needs_training = True
    depths = (0.0, 1 / 3, 2 / 3)

    threshold: float | None = None
    penalty: float = 0.5
    policy_weight: float = 1.0

    def block_for(self, block: nn.Module, site: Site) -> InterpretedBlock | None:
        stages = self.stages(site.depth)
        if site.number < stages[0] or (self.keep == 1 and self.threshold is None):
            return None
        return InterpretedBlock(block, site, self, is_first=site.number in stages)
