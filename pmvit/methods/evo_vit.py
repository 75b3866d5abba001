"""Evo-ViT (Xu et al., AAAI 2022, arXiv:2108.01390), written from the paper for comparison.

No token is ever dropped. Over the blocks a *global class attention* evolves: in each block, half of what it was and
half of the attention of the class token there. From some block on it parts the patch tokens: the best share of them are
informative and updated slowly, by the block; the others are placeholders, for which their mean, weighted by global
class attention, runs through the block as one representative token. What the block adds to it is added to every
placeholder (fast update).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pmvit.methods.attention import attend, best, class_attention, mlp_update, take
from pmvit.methods.base import MethodBlock, Site, numbers_of_blocks
from pmvit.methods.staged import Keeping


def put(tokens: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """(batch, tokens, width) with other values at (batch, places)."""
    return tokens.scatter(1, places[..., None].expand_as(values), values)


class EvoBlock(MethodBlock["EvoVit"]):
    """A block with slow and fast updates, or before the first such block with slow ones alone.

    It hands on the global class attention of the patches.
    """

    def __init__(self, block: Any, site: Site, method: "EvoVit") -> None:
        super().__init__(block, site, method)
        start = max(site.depth // 3, 1) if method.start is None else method.start
        self.is_fast = site.number >= min(numbers_of_blocks((start,), site.depth, "start"))

    def run(self, tokens: Tensor, attention: Tensor | None = None) -> tuple[Tensor, Tensor]:
        mix, count = self.method.mix, tokens.shape[1] - self.num_prefix
        number = self.method.number(count) if self.is_fast else count
        if attention is None or number == count:
            tokens, found = self._update(tokens)
            return tokens, found if attention is None else mix * attention + (1 - mix) * found
        informative, placeholders = best(attention, number)
        prefix, patches = tokens.tensor_split([self.num_prefix], dim=1)
        weights = attention.gather(1, placeholders)
        waiting = take(patches, placeholders)
        representative = (weights / weights.sum(1, keepdim=True))[:, None] @ waiting
        slow = torch.cat([prefix, take(patches, informative), representative], dim=1)
        updated, found = self._update(slow)
        fast = waiting + (updated - slow)[:, -1:]
        prefix, chosen, _ = updated.tensor_split([self.num_prefix, self.num_prefix + number], dim=1)
        tokens = torch.cat([prefix, put(put(patches, informative, chosen), placeholders, fast)], dim=1)
        mixed = mix * attention.gather(1, informative) + (1 - mix) * found[:, :number]
        return tokens, attention.scatter(1, informative, mixed)

    def _update(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The block as it is, and its class attention."""
        attended = attend(self.block, tokens)
        tokens = tokens + attended.update
        return tokens + mlp_update(self.block, tokens), class_attention(self.block, attended)[:, self.num_prefix :]


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
    block_class = EvoBlock
    gives_all_tokens = True
    needs_class_token = True

    start: int | None = None
    mix: float = 0.5
