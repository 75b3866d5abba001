"""Methods with networks of their own that learn which tokens are kept, written from the papers for comparison.

While training no token leaves: one that was dropped is masked in the attention of all others (DynamicViT's Eq. 11), so
that gradients reach the decision. In inference the best share of the tokens is kept and the others are gone.

DynamicViT (Rao et al., NeurIPS 2021, arXiv:2106.02034): before a few blocks, a small network predicts for each patch
token, from itself and the mean of those that are left, whether it is kept. While training, a decision is drawn by
Gumbel-softmax, straight through; a loss holds the kept share at its target (Eq. 14).

IA-RED2 (Interpretability-Aware Redundancy Reduction; Pan et al., NeurIPS 2021, arXiv:2106.12620): the blocks form
groups, and before each group a *multi-head interpreter* says how informative each patch token x is, by its products
with a learned policy token p: the mean over heads of sigmoid(F_q(x) F_k(p)). Tokens below one half are dropped.
Decisions are learned as a policy by REINFORCE: for each image they are drawn, u ~ Bernoulli(I); the reward is
1 - (kept / all)^2 if the prediction is right, and -penalty if not; and what counts is how much more it is than the
reward of the sure decisions, I >= 1/2 (self-critical baseline).
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pmvit.hosts.outputs import predict
from pmvit.methods.attention import attend, best, mlp_update, take
from pmvit.methods.base import MethodBlock, Site
from pmvit.methods.staged import Staged
from pmvit.wrapping import TrainingPass

SURE = 0.5  # the score from which on IA-RED2 keeps a token by its sure decisions


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


@dataclass(frozen=True)
class Learned(Staged):
    """A method that keeps what its networks choose at some blocks."""

    needs_class_token = True
    needs_class_pooling = True  # dropped tokens stay while training
    needs_training = True


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
class DynamicVit(Learned):
    """Pruning by small networks that learn which tokens matter.

    Attributes:
        ratio_weight: Of the loss that holds the kept share at its target, over all stages.
    """

    name = "dynamic-vit"
    title = "DynamicViT"
    block_class = DynamicBlock

    ratio_weight: float = 2.0

    def wraps(self, site: Site) -> bool:
        return self.keep < 1 and site.number >= self.stages(site.depth)[0]


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
class IaRed2(Learned):
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
    depths = (0.0, 1 / 3, 2 / 3)

    threshold: float | None = None
    penalty: float = 0.5
    policy_weight: float = 1.0

    def wraps(self, site: Site) -> bool:
        return site.number >= self.stages(site.depth)[0] and (self.keep < 1 or self.threshold is not None)
