"""What methods share that merge tokens in every block: pairs by halves, sizes, and the way back to every token."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from pmvit.errors import PmvitError
from pmvit.methods.attention import attend, mlp_update, take
from pmvit.methods.base import Encoder, Method, MethodBlock, Site, numbers_of_blocks


class Matched(NamedTuple):
    """For each image: places in the first set (even tokens) that stay, and that are merged, and for the latter the
    places in the second set (odd tokens) that they are merged into."""

    stays: Tensor
    merged: Tensor
    into: Tensor


class MergedTokens(NamedTuple):
    """Tokens between blocks, how many patches each stands for, and the token that each original one is in now."""

    tokens: Tensor
    sizes: Tensor | None
    places: Tensor | None


def in_order(even: Tensor, odd: Tensor, num_protected: int) -> Tensor:
    """Put the two sets together: the protected tokens in front, as they were; then the even ones, then the odd ones."""
    sets = even, odd
    front = [sets[place % 2][:, place // 2, None] for place in range(num_protected)]
    return torch.cat([*front, even[:, (num_protected + 1) // 2 :], odd[:, num_protected // 2 :]], dim=1)


def merge_matched(tokens: Tensor, sizes: Tensor, matched: Matched, num_protected: int) -> tuple[Tensor, Tensor]:
    """Average the matched tokens, weighted by how many patches each stands for; return them and the new sizes."""

    def summed(values: Tensor) -> Tensor:
        even, odd = values[:, ::2], values[:, 1::2]
        into = matched.into[..., None].expand(-1, -1, values.shape[-1])
        return in_order(take(even, matched.stays), odd.scatter_add(1, into, take(even, matched.merged)), num_protected)

    new_sizes = summed(sizes)
    return summed(tokens * sizes) / new_sizes, new_sizes


def places_after(matched: Matched, num_tokens: int, num_protected: int) -> Tensor:
    """Where each of (batch, tokens) is found after `merge_matched`."""
    stays, merged, into = matched
    first, second = (num_protected + 1) // 2, num_protected // 2
    ranks = torch.arange(stays.shape[1], device=stays.device)
    of_even = torch.where(ranks < first, 2 * ranks, ranks - first + num_protected)
    ranks = torch.arange(num_tokens // 2, device=stays.device)
    of_odd = torch.where(ranks < second, 2 * ranks + 1, ranks - second + num_protected + stays.shape[1] - first)
    even = stays.new_zeros(stays.shape[0], num_tokens - num_tokens // 2)
    even = even.scatter(1, stays, of_even.expand_as(stays)).scatter(1, merged, of_odd[into])
    places = stays.new_empty(stays.shape[0], num_tokens)
    places[:, ::2], places[:, 1::2] = even, of_odd
    return places


def most_merged(r: int, num_tokens: int, num_protected: int) -> int:
    """How many of so many tokens can be merged if r should be: at most every other one."""
    return min(r, (num_tokens - num_protected) // 2)


class MergingBlock(MethodBlock):
    """A block with r tokens merged between attention and MLP; attention to a token counts for all patches in it."""

    def __init__(self, block: nn.Module, site: Site, method: Any, r: int, unmerges: bool) -> None:
        super().__init__(block, site)
        self.method = method
        self.r = r
        self.unmerges = unmerges

    @abstractmethod
    def find(self, keys: Tensor, r: int) -> Any:
        """What to merge, by (batch, tokens, width) keys; without a gradient."""

    def merge(self, tokens: Tensor, sizes: Tensor | None, found: Any) -> tuple[Tensor, Tensor | None]:
        """Merge what was found; sizes are `None` where every token is one patch."""
        sizes = tokens.new_ones(*tokens.shape[:2], 1) if sizes is None else sizes
        return merge_matched(tokens, sizes, found, self.num_prefix)

    def places(self, found: Any, num_tokens: int) -> Tensor:
        """Where each token is found after `merge`."""
        return places_after(found, num_tokens, self.num_prefix)

    def number(self, num_tokens: int) -> int | None:
        """How many of so many tokens to merge; `None` not to look for any."""
        return most_merged(self.r, num_tokens, self.num_prefix) or None

    def forward(self, state: Tensor | MergedTokens) -> Tensor | MergedTokens:
        tokens, sizes, places = state if isinstance(state, tuple) else MergedTokens(state, None, None)
        bias = None if sizes is None else sizes.log().transpose(1, 2)[:, None]  # the same for every query
        attended = attend(self.block, tokens, bias)
        tokens = tokens + attended.update
        r = self.number(tokens.shape[1])
        if r is not None:
            with torch.no_grad():
                found = self.find(attended.keys.mean(1), r)
                if self.unmerges:
                    after = self.places(found, tokens.shape[1])
                    places = after if places is None else after.gather(1, places)
            tokens, sizes = self.merge(tokens, sizes, found)
        tokens = tokens + mlp_update(self.block, tokens)
        if not self.is_last:
            return MergedTokens(tokens, sizes, places)
        return tokens if places is None else take(tokens, places)


@dataclass(frozen=True)
class Merging(Method):
    """A method that merges tokens in every block.

    Attributes:
        r: Tokens to merge in each block, or a number for every block.
        unmerge: Give every token back after the last block, each the value of the token it was merged into; if not
            said, where the model reads all of them.
        skip: Blocks that merge nothing, whatever r says; negative numbers count from the last.
    """

    gives_all_tokens = True
    block_class: ClassVar[type[MergingBlock]]

    r: int | tuple[int, ...]
    unmerge: bool | None = None
    skip: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if any(r < 0 for r in ((self.r,) if isinstance(self.r, int) else self.r)):
            raise PmvitError(f"r: expected the tokens to merge a block, 0 or more; got {self.r}")

    @classmethod
    def options_at(cls, strength: float, encoder: Encoder, options: dict[str, Any]) -> dict[str, Any]:
        depth = len(encoder.blocks)
        skipped = numbers_of_blocks(options.get("skip", ()), depth, "skip")
        merging = [block for block in range(depth) if block not in skipped]
        total = round(strength * len(merging) * (encoder.patch_embed.num_patches // 2))
        rs = [0] * depth
        for rank, block in enumerate(merging):  # as evenly as it goes
            rs[block] = (total - rank + len(merging) - 1) // len(merging)
        return {"r": tuple(rs)}

    def block_for(self, block: nn.Module, site: Site) -> MergingBlock:
        unmerges = site.dense if self.unmerge is None else self.unmerge
        return self.block_class(block, site, self, self.schedule(site.depth)[site.number], unmerges)

    def schedule(self, depth: int) -> list[int]:
        """The tokens to merge in each block."""
        rs = [self.r] * depth if isinstance(self.r, int) else list(self.r)
        if len(rs) != depth:
            raise PmvitError(f"r: expected one number, or one for each of the {depth} blocks; got {len(rs)}")
        skipped = numbers_of_blocks(self.skip, depth, "skip")
        return [0 if block in skipped else r for block, r in enumerate(rs)]
