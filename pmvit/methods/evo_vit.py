"""Evo-ViT (Xu et al., AAAI 2022, arXiv:2108.01390), written from the paper for comparison.

No token is ever dropped. Over the blocks a *global class attention* evolves: in each block, half of what it was and
half of the attention of the class token there. From some block on it parts the patch tokens: the best share of them are
informative and updated slowly, by the block; the others are placeholders, for which their mean, weighted by global
class attention, runs through the block as one representative token. What the block adds to it is added to every
placeholder (fast update).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pmvit.methods.attention import attend, best, class_attention, mlp_update, take
from pmvit.methods.base import MethodBlock, Site, numbers_of_blocks
from pmvit.methods.staged import Keeping, kept


class Evolving(NamedTuple):
    """All tokens, and the global class attention of the patches."""

    tokens: Tensor
    attention: Tensor


def put(tokens: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """(batch, tokens, width) with other values at (batch, places)."""
    return tokens.scatter(1, places[..., None].expand_as(values), values)


class EvoBlock(MethodBlock):
    """A block with slow and fast updates, or with slow ones alone if it keeps every token."""

    def __init__(self, block: nn.Module, site: Site, keep: float, mix: float) -> None:
        super().__init__(block, site)
        self.keep = keep
        self.mix = mix

    def forward(self, state: Tensor | Evolving) -> Tensor | Evolving:
        tokens, attention = state if isinstance(state, tuple) else (state, None)
        count = tokens.shape[1] - self.num_prefix
        number = kept(self.keep, count)
        if attention is None or number == count:
            tokens, attention = self._update(tokens, attention)
        else:
            tokens, attention = self._slow_fast(tokens, attention, number)
        return tokens if self.is_last else Evolving(tokens, attention)

    def _update(self, tokens: Tensor, attention: Tensor | None) -> tuple[Tensor, Tensor]:
        """The block as it is, and the global class attention after it."""
        attended = attend(self.block, tokens)
        tokens = tokens + attended.update
        found = class_attention(self.block, attended)[:, self.num_prefix :]
        attention = found if attention is None else self.mix * attention + (1 - self.mix) * found
        return tokens + mlp_update(self.block, tokens), attention

    def _slow_fast(self, tokens: Tensor, attention: Tensor, number: int) -> tuple[Tensor, Tensor]:
        informative, placeholders = best(attention, number)
        prefix, patches = tokens.tensor_split([self.num_prefix], dim=1)
        weights = attention.gather(1, placeholders)
        waiting = take(patches, placeholders)
        representative = (weights / weights.sum(1, keepdim=True))[:, None] @ waiting
        slow = torch.cat([prefix, take(patches, informative), representative], dim=1)
        updated, evolved = self._update(slow, None)
        fast = waiting + (updated - slow)[:, -1:]
        prefix, chosen, _ = updated.tensor_split([self.num_prefix, self.num_prefix + number], dim=1)
        tokens = torch.cat([prefix, put(put(patches, informative, chosen), placeholders, fast)], dim=1)
        mixed = self.mix * attention.gather(1, informative) + (1 - self.mix) * evolved[:, :number]
        return tokens, attention.scatter(1, informative, mixed)


@dataclass(frozen=True)
class EvoVit(Keeping):
    """Slow-fast token evolution.

    Attributes:
        keep: The share that is informative.
        start: The first block with placeholders; if not given, after a third of the model: 4 of 12.
        mix: How much of the global class attention stays in a block.
    """

    name = "evo-vit"
    title = "Evo-ViT"
    gives_all_tokens = True
    needs_class_token = True

    start: int | None = None
    mix: float = 0.5

    def block_for(self, block: nn.Module, site: Site) -> EvoBlock:
        start = max(site.depth // 3, 1)
        if self.start is not None:
            (start,) = numbers_of_blocks((self.start,), site.depth, "start")
        return EvoBlock(block, site, self.keep if site.number >= start else 1.0, self.mix)
