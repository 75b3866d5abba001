"""Token Merging and methods that find or treat its pairs in another way, from the papers; what merging methods share.

ToMe (Bolya et al., ICLR 2023, arXiv:2210.09461): in every block, between attention and MLP, the r most similar pairs of
tokens become one. Which ones they are is found anew for every image, by *bipartite soft matching* (Section 3): tokens
are split alternately into two sets; each token of the first points at its most similar one of the second, by the cosine
of their keys (mean over heads); the r strongest of these edges are merged. Attention to a merged token counts for all
patches in it (Eq. 1).

Token Fusion (ToFu; Kim et al., WACV 2024, arXiv:2312.01026): what happens to ToMe's pairs depends on the depth. In the
first blocks, which answer far from linearly to a mixture of two tokens, the token that found a partner is pruned; in
the later ones, which are closer to linear, the pair is merged. Merging is MLERP: the direction is that of the mean, the
length that of the longest token, so that the lengths of tokens stay distributed as the model knows them.

PiToMe (Tran et al., NeurIPS 2024, arXiv:2405.16148): tokens that are like many others are redundant, and those that are
like few are informative and protected. The *energy* of a token is the mean over all tokens of ELU(cosine of keys -
margin) (Eq. 4); the margin falls with the depth, so that only the nearest count in the first blocks. The 2r tokens of
highest energy are parted alternately, in the order of their energy, and every one of the first r is merged into its
most similar one of the other r. Each block keeps the same share of its tokens, so that the first blocks merge more.

What reads every token afterwards, such as the decoder of a Segmenter, gets them back after the last block: each patch
has the value of the token that it was merged into.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pmvit.errors import PmvitError
from pmvit.methods.attention import Attended, attend, mlp_update, take
from pmvit.methods.base import Encoder, Method, MethodBlock, Site, numbers_of_blocks


class Matched(NamedTuple):
    """For each image: the places of the tokens that stay, in their new order; of those that are merged; and for the
    latter, the new places of the tokens that they are merged into."""

    stays: Tensor
    merged: Tensor
    into: Tensor

    def sums(self, values: Tensor) -> Tensor:
        """Of (batch, tokens, width) those that stay, each with what is merged into it added."""
        into = self.into[..., None].expand(-1, -1, values.shape[-1])
        return take(values, self.stays).scatter_add(1, into, take(values, self.merged))

    def merge(self, tokens: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Average what becomes one, weighted by how many patches each token stands for; and the new sizes."""
        new_sizes = self.sums(sizes)
        return self.sums(tokens * sizes) / new_sizes, new_sizes

    def places(self) -> Tensor:
        """Where each of (batch, tokens) is found afterwards."""
        stays, merged, into = self
        places = stays.new_empty(stays.shape[0], stays.shape[1] + merged.shape[1])
        ranks = torch.arange(stays.shape[1], device=stays.device)
        return places.scatter(1, stays, ranks.expand_as(stays)).scatter(1, merged, into)


def matched(num_prefix: int, alone: Tensor, hosts: Tensor, merged: Tensor, partners: Tensor) -> Matched:
    """What becomes of (batch, ...) patches, numbered from 0: the prefix and those `alone` stay as they are, `merged`
    ones go into those `hosts` that are at the places `partners`."""
    prefix = torch.arange(num_prefix, device=alone.device).expand(alone.shape[0], -1)
    stays = torch.cat([prefix, num_prefix + alone, num_prefix + hosts], dim=1)
    return Matched(stays, num_prefix + merged, num_prefix + alone.shape[1] + partners)


def match(keys: Tensor, r: int, num_prefix: int) -> Matched:
    """Bipartite soft matching of (batch, tokens, width) keys."""
    unit = F.normalize(keys[:, num_prefix:], dim=-1)
    even, odd = num_prefix % 2, 1 - num_prefix % 2  # the first patches at such places among all tokens
    strength, partner = (unit[:, even::2] @ unit[:, odd::2].transpose(1, 2)).max(-1)
    by_strength = strength.argsort(dim=-1, descending=True)
    merged, alone = by_strength[:, :r], by_strength[:, r:].sort(dim=1).values
    hosts = torch.arange(odd, unit.shape[1], 2, device=keys.device).expand(unit.shape[0], -1)
    return matched(num_prefix, even + 2 * alone, hosts, even + 2 * merged, partner.gather(1, merged))


def size_bias(sizes: Tensor | None) -> Tensor | None:
    """What lets attention to a token count for all patches in it, added to the scores of every query."""
    return None if sizes is None else sizes.log().transpose(1, 2)[:, None]


class MergingBlock(MethodBlock[Any]):
    """A block with tokens merged between attention and MLP; attention to a token counts for all patches in it.

    It hands on how many patches each token stands for (`None` while each is one), and where each original token is, if
    they are wanted back.
    """

    @abstractmethod
    def find(self, attended: Attended, tokens: Tensor, sizes: Tensor | None) -> Matched | None:
        """What to merge of the tokens after attention, without a gradient; `None` for nothing."""

    def merge(self, tokens: Tensor, sizes: Tensor | None, found: Matched) -> tuple[Tensor, Tensor | None]:
        return found.merge(tokens, torch.ones_like(tokens[..., :1]) if sizes is None else sizes)

    def run(self, tokens: Tensor, sizes: Tensor | None = None, places: Tensor | None = None) -> tuple[Any, ...]:
        attended = attend(self.block, tokens, size_bias(sizes))
        tokens = tokens + attended.update
        with torch.no_grad():
            found = self.find(attended, tokens, sizes)
        if found is not None:
            tokens, sizes = self.merge(tokens, sizes, found)
        return self.finished(tokens + mlp_update(self.block, tokens), sizes, places, found)

    def finished(
        self, tokens: Tensor, sizes: Tensor | None, places: Tensor | None, found: Matched | None
    ) -> tuple[Any, ...]:
        """What the block hands on; after the last one, every token, if they are wanted back."""
        if found is not None and (self.site.dense if self.method.unmerge is None else self.method.unmerge):
            places = found.places() if places is None else found.places().gather(1, places)
        return take(tokens, places) if self.is_last and places is not None else tokens, sizes, places


class TomeBlock(MergingBlock):
    """A block with the r most similar pairs merged."""

    def __init__(self, block: Any, site: Site, method: "Tome") -> None:
        super().__init__(block, site, method)
        self.r = method.schedule(site.depth)[site.number]

    def find(self, attended: Attended, tokens: Tensor, sizes: Tensor | None) -> Matched | None:
        r = most_merged(self.r, attended.keys.shape[2], self.num_prefix)
        return self.pair(attended, r) if r or self.method.always_match else None

    def pair(self, attended: Attended, r: int) -> Matched:
        return match(attended.keys.mean(1), r, self.num_prefix)


def most_merged(r: int, num_tokens: int, num_prefix: int) -> int:
    """How many of so many tokens can be merged if r should be: at most every other patch."""
    return min(r, (num_tokens - num_prefix) // 2)


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

    r: int | tuple[int, ...]
    unmerge: bool | None = None
    skip: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if any(r < 0 for r in ((self.r,) if isinstance(self.r, int) else self.r)):
            raise PmvitError(f"r: expected the tokens to merge a block, 0 or more; got {self.r}")

    @classmethod
    def options_at(cls, strength: float, encoder: Encoder, options: dict[str, Any]) -> dict[str, Any]:
        depth = len(encoder.blocks)
        skipped = numbers_of_blocks(options.get("skip", cls.skip), depth, "skip")
        merging = [block for block in range(depth) if block not in skipped]
        total = round(strength * len(merging) * (encoder.patch_embed.num_patches // 2))
        rs = [0] * depth
        for rank, block in enumerate(merging):  # as evenly as it goes
            rs[block] = (total - rank + len(merging) - 1) // len(merging)
        return {"r": tuple(rs)}

    def schedule(self, depth: int) -> list[int]:
        """The tokens to merge in each block."""
        rs = [self.r] * depth if isinstance(self.r, int) else list(self.r)
        if len(rs) != depth:
            raise PmvitError(f"r: expected one number, or one for each of the {depth} blocks; got {len(rs)}")
        skipped = numbers_of_blocks(self.skip, depth, "skip")
        return [0 if block in skipped else r for block, r in enumerate(rs)]


@dataclass(frozen=True)
class Tome(Merging):
    """Token Merging.

    Attributes:
        always_match: Look for pairs even where none is merged.
    """

    name = "tome"
    title = "ToMe"
    block_class = TomeBlock

    always_match: bool = False


def with_length_of_longest(merged: Tensor, tokens: Tensor, found: Matched) -> Tensor:
    """Merged tokens, each as long as the longest of the tokens that became it."""
    lengths = tokens.norm(dim=-1, keepdim=True)
    longest = take(lengths, found.stays)
    longest = longest.scatter_reduce(1, found.into[..., None], take(lengths, found.merged), "amax")
    tiny = torch.finfo(merged.dtype).tiny
    scaled: Tensor = merged * (longest / merged.norm(dim=-1, keepdim=True).clamp_min(tiny))
    return scaled


class TofuBlock(TomeBlock):
    """A block that prunes or merges the r tokens that have the most similar partners."""

    def merge(self, tokens: Tensor, sizes: Tensor | None, found: Matched) -> tuple[Tensor, Tensor | None]:
        first = self.site.depth // 2 if self.method.prune_blocks is None else self.method.prune_blocks
        if self.site.number < first:
            return take(tokens, found.stays), None if sizes is None else take(sizes, found.stays)
        merged, sizes = super().merge(tokens, sizes, found)
        return with_length_of_longest(merged, tokens, found), sizes


@dataclass(frozen=True)
class Tofu(Tome):
    """Token Fusion.

    Attributes:
        prune_blocks: How many of the first blocks prune instead of merging; if not given, the first half of them.
    """

    name = "tofu"
    title = "ToFu"
    block_class = TofuBlock

    prune_blocks: int | None = None


def match_redundant(keys: Tensor, r: int, num_prefix: int, margin: float) -> Matched:
    """Pair the 2r patches of highest energy, by (batch, tokens, width) keys."""
    unit = F.normalize(keys[:, num_prefix:], dim=-1)
    similarity = unit @ unit.transpose(1, 2)
    order = F.elu(similarity - margin).mean(-1).argsort(dim=-1, descending=True)
    merged, hosts, protected = order[:, : 2 * r : 2], order[:, 1 : 2 * r : 2], order[:, 2 * r :].sort(dim=1).values
    between = take(take(similarity, merged).transpose(1, 2), hosts)  # (batch, hosts, merged)
    best = between.topk(min(r, 1), dim=1).indices.flatten(1)  # one for each, if there are any
    return matched(num_prefix, protected, hosts, merged, best)


class PitomeBlock(TomeBlock):
    """A block with the r most redundant tokens merged."""

    def pair(self, attended: Attended, r: int) -> Matched:
        margin = self.method.margin * (1 - self.site.number / self.site.depth)
        return match_redundant(attended.keys.mean(1), r, self.num_prefix, margin)


@dataclass(frozen=True)
class Pitome(Tome):
    """Merging that protects informative tokens.

    Attributes:
        margin: The cosine that counts as near in the first block; it falls to 0 behind the last.
    """

    name = "pitome"
    title = "PiToMe"
    block_class = PitomeBlock

    margin: float = 0.75

    @classmethod
    def options_at(cls, strength: float, encoder: Encoder, options: dict[str, Any]) -> dict[str, Any]:
        left, rs = encoder.patch_embed.num_patches, []
        skipped = numbers_of_blocks(options.get("skip", cls.skip), len(encoder.blocks), "skip")
        for block in range(len(encoder.blocks)):
            rs.append(0 if block in skipped else int(strength / 2 * left))
            left -= rs[-1]
        return {"r": tuple(rs)}
