"""What methods share that keep a share of the tokens at a few blocks."""

from abc import abstractmethod
from dataclasses import dataclass
from math import ceil
from typing import Any, ClassVar

import torch
from torch import Tensor

from pmvit.errors import PmvitError
from pmvit.methods.attention import Attended, Block, attend, mlp_update
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

    def number(self, count: int) -> int:
        """How many of so many tokens are kept: rounded up, and one at least."""
        return max(ceil(self.keep * count - 1e-9), 1)  # 0.7 * 10 is a little more than 7


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


class HalfwayBlock(MethodBlock["Halfway"]):
    """A block whose patch tokens become fewer between attention and MLP."""

    def forward(self, tokens: Tensor) -> Tensor:
        count = tokens.shape[1] - self.num_prefix
        number = self.method.number(count)
        attended = attend(self.block, tokens, maps=self.method.reads_maps and number < count)
        prefix, patches = (tokens + attended.update).tensor_split([self.num_prefix], dim=1)
        if number < count:
            patches = self.method.reduce(patches, self.block, attended, number)
        tokens = torch.cat([prefix, patches], dim=1)
        return tokens + mlp_update(self.block, tokens)


@dataclass(frozen=True)
class Halfway(Staged):
    """A method that makes patch tokens fewer between the attention and the MLP of a block, by that attention."""

    block_class = HalfwayBlock
    reads_maps: ClassVar[bool] = False  # whether it reads the whole maps

    @abstractmethod
    def reduce(self, patches: Tensor, block: Block, attended: Attended, number: int) -> Tensor:
        """Make (batch, tokens, width) patch tokens fewer: so many stay."""

    def wraps(self, site: Site) -> bool:
        return site.number in self.stages(site.depth)
