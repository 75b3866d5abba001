"""Token Merging (ToMe; Bolya et al., ICLR 2023, arXiv:2210.09461), written from the paper for comparison.

In every block, between attention and MLP, the r most similar pairs of tokens become one. Which ones they are is found
anew for every image, by *bipartite soft matching* (Section 3): tokens are split alternately into two sets; each token
of the first points at its most similar one of the second, by the cosine of their keys (mean over heads); the r
strongest of these edges are merged. Attention to a merged token counts for all patches in it (Eq. 1).

What reads every token afterwards, such as the decoder of a Segmenter, gets them back after the last block: each patch
has the value of the token that it was merged into.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pmvit.errors import PmvitError
from pmvit.methods.attention import attend, mlp
from pmvit.methods.base import Host, Method, MethodBlock, apply, numbers_of_blocks, register

Model = TypeVar("Model", bound=nn.Module)


class Matched(NamedTuple):
    """For each image: places in the first set (even tokens) that stay, and that are merged, and for the latter the
    places in the second set (odd tokens) that they are merged into."""

    stays: Tensor
    merged: Tensor
    into: Tensor


class State(NamedTuple):
    """Tokens between blocks, how many patches each stands for, and the token that each original one is in now."""

    tokens: Tensor
    sizes: Tensor | None
    places: Tensor | None


def match(keys: Tensor, r: int, num_protected: int) -> Matched:
    """Bipartite soft matching of (batch, tokens, width) keys."""
    unit = F.normalize(keys, dim=-1)
    similarity = unit[:, ::2] @ unit[:, 1::2].transpose(1, 2)
    if num_protected:
        first, second = (num_protected + 1) // 2, num_protected // 2
        similarity[:, :first] = -torch.inf
        similarity[:, :, :second] = -torch.inf
    strength, partner = similarity.max(-1)
    by_strength = strength.argsort(dim=-1, descending=True)
    merged, stays = by_strength[:, :r], by_strength[:, r:].sort(dim=1).values
    return Matched(stays, merged, partner.gather(1, merged))


def merge_matched(tokens: Tensor, sizes: Tensor, matched: Matched, num_protected: int) -> tuple[Tensor, Tensor]:
    """Average the matched tokens, weighted by how many patches each stands for; return them and the new sizes.

    The protected tokens stay in front, as they were; then come even ones, then odd ones.
    """

    def summed(values: Tensor) -> Tensor:
        stays, merged, into = (index[..., None].expand(-1, -1, values.shape[-1]) for index in matched)
        even, odd = values[:, ::2], values[:, 1::2]
        sets = even.gather(1, stays), odd.scatter_add(1, into, even.gather(1, merged))
        front = [sets[place % 2][:, place // 2, None] for place in range(num_protected)]
        return torch.cat([*front, sets[0][:, (num_protected + 1) // 2 :], sets[1][:, num_protected // 2 :]], dim=1)

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
    places = stays.new_empty(stays.shape[0], num_tokens)
    even = torch.zeros_like(places[:, ::2])
    even = even.scatter(1, stays, of_even.expand_as(stays)).scatter(1, merged, of_odd[into])
    places[:, ::2], places[:, 1::2] = even, of_odd
    return places


def unmerge(tokens: Tensor, places: Tensor) -> Tensor:
    """Give every original token, in its place, the value of the token that it is in."""
    return tokens.gather(1, places[..., None].expand(-1, -1, tokens.shape[-1]))


class TomeBlock(MethodBlock):
    """A block with r tokens merged between attention and MLP."""

    def __init__(
        self, block: nn.Module, r: int, num_prefix: int, *, is_last: bool, unmerges: bool, always_match: bool
    ) -> None:
        super().__init__(block)
        self.r = r
        self.num_prefix = num_prefix
        self.is_last = is_last
        self.unmerges = unmerges
        self.always_match = always_match

    def forward(self, state: Tensor | State) -> Tensor | State:
        tokens, sizes, places = state if isinstance(state, tuple) else State(state, None, None)
        bias = None if sizes is None else sizes.log().transpose(1, 2)[:, None]  # the same for every query
        tokens, keys = attend(self.block, tokens, bias)
        count = tokens.shape[1]
        r = min(self.r, (count - self.num_prefix) // 2)
        if r > 0 or self.always_match:
            with torch.no_grad():
                matched = match(keys.mean(1), r, self.num_prefix)
                if self.unmerges:
                    after = places_after(matched, count, self.num_prefix)
                    places = after if places is None else after.gather(1, places)
            sizes = tokens.new_ones(*tokens.shape[:2], 1) if sizes is None else sizes
            tokens, sizes = merge_matched(tokens, sizes, matched, self.num_prefix)
        tokens = mlp(self.block, tokens)
        if not self.is_last:
            return State(tokens, sizes, places)
        return tokens if places is None else unmerge(tokens, places)


@register
@dataclass(frozen=True)
class Tome(Method):
    """Token Merging.

    Attributes:
        r: Tokens to merge in each block, or a number for every block.
        unmerge: Give every token back after the last block; if not said, where the model reads all of them.
        skip: Blocks that merge nothing, whatever r says; negative numbers count from the last.
        always_match: Look for pairs even where none is merged.
    """

    name = "tome"

    r: int | tuple[int, ...]
    unmerge: bool | None = None
    skip: tuple[int, ...] = ()
    always_match: bool = False

    def __post_init__(self) -> None:
        if any(r < 0 for r in ((self.r,) if isinstance(self.r, int) else self.r)):
            raise PmvitError(f"r: expected the tokens to merge a block, 0 or more; got {self.r}")

    def schedule(self, depth: int) -> list[int]:
        """The tokens to merge in each block."""
        rs = [self.r] * depth if isinstance(self.r, int) else list(self.r)
        if len(rs) != depth:
            raise PmvitError(f"r: expected one number, or one for each of the {depth} blocks; got {len(rs)}")
        skipped = numbers_of_blocks(self.skip, depth, "skip")
        return [0 if block in skipped else r for block, r in enumerate(rs)]

    def wrap(self, encoder: Host, *, dense: bool) -> None:
        schedule = self.schedule(len(encoder.blocks))
        for number, block in enumerate(encoder.blocks):
            encoder.blocks[number] = TomeBlock(
                block,
                schedule[number],
                encoder.num_prefix_tokens,
                is_last=number == len(schedule) - 1,
                unmerges=dense if self.unmerge is None else self.unmerge,
                always_match=self.always_match,
            ).train(block.training)


def tome(
    model: Model,
    r: int | Sequence[int],
    *,
    unmerge: bool | None = None,
    skip: Sequence[int] = (),
    always_match: bool = False,
) -> Model:
    """A copy of a timm ViT, or of a Segmenter on one, that merges tokens; see `Tome` for the options.

    Raises:
        PmvitError: If the model is not built of plain pre-norm blocks, or r does not fit it.
    """
    return apply(model, Tome(r if isinstance(r, int) else tuple(r), unmerge, tuple(skip), always_match))
