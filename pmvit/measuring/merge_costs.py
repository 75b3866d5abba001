"""`MergeCosts`: in which order the tokens of every block are merged, and what each merge costs."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from json import dumps
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pmvit.config import MergeCostConfig
from pmvit.errors import PmvitError
from pmvit.files import fields_from, read_document, write_document
from pmvit.measuring.flops import ModelCost

Part = Literal["block", "attention", "mlp"]  # what is merged: a whole block, or one of its halves
BlockPart = tuple[int, Part]  # a block, and what of it

FORMAT, OLD_FORMAT, VERSION = "pmvit-merge-costs", "pmvit-prices", 3
HALVES: tuple[Part, ...] = ("attention", "mlp")
ALONE: tuple[Part, ...] = ("mlp",)  # of a block whose attention runs on all tokens


def before_each(parts: Sequence[BlockPart], has_mlps_alone: bool) -> list[BlockPart | None]:
    """For nested merges: the part before each part, whose groups it may only merge further; `None` for the first.

    In models where attention of some blocks runs on all tokens (SAM), tokens do not stay merged from block to block, so
    that only the MLP of a block is nested in the attention of the same block.
    """
    pairs = (before if before[0] == part[0] or not has_mlps_alone else None for before, part in pairwise(parts))
    return [None, *pairs]


class Merge(NamedTuple):
    """Two groups of a block, or of half a block, become one; each is named by its first token.

    Attributes:
        block: Which one it is.
        part: Whether of the whole block, or of attention or the MLP alone.
        first: The group whose first token comes first, and the name of the new one.
        second: The other group.
        cost: What the merge adds to the expected divergence from the original, in nats.
    """

    block: int
    part: Part
    first: int
    second: int
    cost: float


@dataclass(frozen=True)
class MergeCosts:
    """All merges, from single tokens to one group a block or half a block, and what planning has to know of the model.

    Attributes:
        merges: In the order in which they are done: a plan does the first so many of them.
        grid: Patches along each axis of their grid.
        num_prefix: Tokens before the patch tokens; they are never merged.
        cost: What each block of the model costs.
        config: How the merge costs were measured.
        images: Images that were used.
        model: Fingerprint of the measured weights.
        data: What the images were read from.
        skip: Blocks of the model that a plan leaves alone unless it is told which.
    """

    merges: tuple[Merge, ...]
    grid: tuple[int, ...]
    num_prefix: int
    cost: ModelCost
    config: MergeCostConfig
    images: int
    model: str
    data: str
    skip: tuple[int, ...] = ()

    @property
    def depth(self) -> int:
        """Blocks of the model."""
        return len(self.cost.blocks)

    @property
    def parts(self) -> tuple[tuple[Part, ...], ...]:
        """What is merged of each block: the whole of it, attention and MLP, or the MLP alone."""
        found = {(merge.block, merge.part) for merge in self.merges}
        halves = (tuple(part for part in HALVES if (block, part) in found) for block in range(self.depth))
        return tuple(parts or ("block",) for parts in halves)

    @property
    def num_patches(self) -> int:
        """Patch tokens of a block."""
        return math.prod(self.grid)

    @property
    def windows(self) -> tuple[None, ...]:
        """The windows of each block: attention is over the whole grid."""
        return (None,) * self.depth

    def save(self, path: str | Path) -> None:
        """Write the merge costs as JSON."""
        write_document(Path(path), dumps({"format": FORMAT, "version": VERSION, **asdict(self)}))

    @staticmethod
    def load(path: str | Path) -> "MergeCosts":
        """Read what `save` wrote.

        Raises:
            PmvitError: If the file is not a whole and consistent merge costs file.
        """
        where = str(path)
        document = read_document(Path(path), (FORMAT, OLD_FORMAT), VERSION)
        try:
            document = _upgrade(document)
        except (TypeError, ValueError, KeyError) as error:
            raise PmvitError(f"{where}: the merge costs are malformed ({error!r}): measure the model again") from None
        costs = MergeCosts(**fields_from(MergeCosts, document, where, beside=("format", "version")))
        _check(costs, where)
        return costs


def _upgrade(document: dict[str, Any]) -> dict[str, Any]:
    """A document as today's version has it: the first one knew only merges of whole blocks."""
    config = dict(document["config"])
    if document["version"] < 3:
        config["limit"] = config.pop("images")
    if document["version"] > 1:
        return {**document, "config": config}
    merges = [[block, "block", first, second, cost] for block, first, second, cost in document["merges"]]
    return {**document, "merges": merges, "config": {**config, "parts": "whole"}}


def _check(costs: MergeCosts, where: str) -> None:
    """See that each merge is of two groups that there are."""
    left: dict[BlockPart, set[int]] = {}
    if not costs.grid or min(costs.grid) < 1 or costs.num_patches > len(costs.merges) + 1:
        raise PmvitError(
            f"{where}: expected the merges of {' x '.join(map(str, costs.grid))} tokens, got {len(costs.merges)}: "
            "measure the model again"
        )
    for block, part, first, second, cost in costs.merges:
        if not 0 <= block < costs.depth:
            raise PmvitError(f"{where}: expected merges in blocks 0 to {costs.depth - 1}, got one in block {block}")
        groups = left.setdefault((block, part), set(range(costs.num_patches)))
        if first == second or not {first, second} <= groups or not math.isfinite(cost):
            raise PmvitError(
                f"{where}: block {block}: expected merges of two groups that are left, got {first} and {second}"
            )
        groups.discard(second)
