"""What methods share that keep a share of the tokens at a few blocks."""

from dataclasses import dataclass
from math import ceil
from typing import Any, ClassVar

from pmvit.errors import PmvitError
from pmvit.methods.base import Encoder, Method, numbers_of_blocks


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
