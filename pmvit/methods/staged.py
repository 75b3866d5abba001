"""What methods share that keep a share of the tokens at a few blocks."""

from abc import abstractmethod
from dataclasses import dataclass
from math import ceil
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pmvit.errors import PmvitError
from pmvit.methods.attention import attend, best, class_attention, mlp_update, take
from pmvit.methods.base import Encoder, Method, MethodBlock, Site, numbers_of_blocks


@dataclass(frozen=True)
class Keeping(Method):
    """A method that keeps a share of the patch tokens.

    Attributes:
        keep: The share.
    """

    keep: float

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise PmvitError(f"keep: expected a share of the tokens, above 0 and at most 1; got {self.keep}")

    @classmethod
    def options_at(cls, strength: float, encoder: Encoder, options: dict[str, Any]) -> dict[str, Any]:
        return {"keep": max(1 - strength, 1e-6)}


@dataclass(frozen=True)
class Staged(Keeping):
    """A method that keeps a share of the patch tokens it gets at each of some blocks.

    Attributes:
        blocks: Their numbers; if not given, those at the `depths` of the method: 3, 6 and 9 of 12, mostly.
    """

    depths: ClassVar[tuple[float, ...]] = (0.25, 0.5, 0.75)  # of those blocks, as parts of that of the model

    blocks: tuple[int, ...] | None = None

    def stages(self, depth: int) -> list[int]:
        """The numbers of the blocks, first to last."""
        if self.blocks is None:
            return sorted({min(round(part * depth), depth - 1) for part in self.depths})
        return sorted(numbers_of_blocks(self.blocks, depth, "blocks"))


@dataclass(frozen=True)
class ClassAttention(Staged):
    """A method that keeps, between attention and MLP, the tokens that the class token attends to most."""

    needs_class_token = True

    @staticmethod
    @abstractmethod
    def reduce(patches: Tensor, scores: Tensor, number: int) -> Tensor:
        """Make (batch, tokens, width) patch tokens fewer, by their (batch, tokens) class attention."""

    def block_for(self, block: nn.Module, site: Site) -> MethodBlock | None:
        return ClassAttentionBlock(block, site, self) if site.number in self.stages(site.depth) else None


class ClassAttentionBlock(MethodBlock):
    """A block that reduces the tokens by class attention."""

    def __init__(self, block: nn.Module, site: Site, method: ClassAttention) -> None:
        super().__init__(block, site)
        self.method = method

    def forward(self, tokens: Tensor) -> Tensor:
        attended = attend(self.block, tokens)
        tokens = tokens + attended.update
        number = kept(self.method.keep, tokens.shape[1] - self.num_prefix)
        if number < tokens.shape[1] - self.num_prefix:
            scores = class_attention(self.block, attended)[:, self.num_prefix :]
            prefix, patches = tokens.tensor_split([self.num_prefix], dim=1)
            tokens = torch.cat([prefix, self.method.reduce(patches, scores, number)], dim=1)
        return tokens + mlp_update(self.block, tokens)


def kept(share: float, count: int) -> int:
    """How many of `count` tokens are kept: rounded up, and one at least."""
    return max(ceil(share * count - 1e-9), 1)  # 0.7 * 10 is a little more than 7


def parted(tokens: Tensor, scores: Tensor, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens with the highest scores; the others; and the scores of the latter."""
    chosen, rest = best(scores, number)
    return take(tokens, chosen), take(tokens, rest), scores.gather(1, rest)
