"""DiffRate (Chen et al., ICCV 2023, arXiv:2305.17997), written from the paper for comparison.

In every block, between attention and MLP, patch tokens are sorted by the attention of the class token to them. The tail
is pruned. Of the others, the less important ones are merged, each into its most similar important one, by the cosine of
the tokens; what becomes one is their plain mean. Attention to a token counts for its size, which grows by that of a
merged token times the similarity of the two. How many tokens are left after either step was learned, block by block.

The counts are those that the authors found for DeiT-Tiny at five budgets (compression_rate.json of their repository
OpenGVLab/DiffRate). Between two of them, counts are interpolated; for other models they are scaled to the number of
patches, and to the depth.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from pmvit.errors import PmvitError
from pmvit.methods.attention import Attended, best, class_attention, take
from pmvit.methods.base import Encoder, Method, Site
from pmvit.methods.tome import Matched, MergingBlock, matched, size_bias

# Tokens left of DeiT-Tiny's 197 in each block, at what the authors call 1.0, 0.9, 0.8, 0.7 and 0.6 GFLOPs.
PRUNED = (  # after pruning
    (197, 197, 196, 194, 188, 184, 178, 164, 156, 137, 129, 21),
    (197, 197, 196, 190, 182, 166, 141, 125, 113, 105, 99, 3),
    (197, 197, 196, 186, 166, 147, 117, 103, 92, 80, 74, 3),
    (197, 196, 194, 180, 150, 123, 98, 82, 68, 60, 52, 3),
    (197, 196, 180, 157, 130, 107, 86, 73, 63, 51, 40, 3),
)
MERGED = (  # after merging
    (197, 197, 196, 190, 186, 154, 148, 156, 145, 135, 125, 21),
    (197, 196, 194, 188, 172, 147, 129, 115, 107, 103, 96, 3),
    (197, 196, 190, 172, 154, 125, 107, 96, 84, 78, 70, 3),
    (197, 196, 192, 158, 133, 103, 88, 72, 64, 58, 49, 3),
    (197, 187, 167, 139, 114, 90, 76, 66, 57, 45, 37, 3),
)


def counts_at(strength: float, num_patches: int, depth: int) -> Tensor:
    """Patches left after pruning and after merging, (2, blocks): from all at 0 over what was published to one at 1."""
    published = torch.tensor([PRUNED, MERGED], dtype=torch.float64).transpose(0, 1) - 1  # without the class token
    known = torch.cat([torch.full_like(published[:1], 196), published, torch.ones_like(published[:1])]) / 196
    known = F.interpolate(known, size=depth, mode="linear", align_corners=True)
    place = strength * (len(known) - 1)
    below = min(int(place), len(known) - 2)
    shares = torch.lerp(known[below], known[below + 1], place - below)
    return (shares * num_patches).round().clamp_min(1).long().cummin(1).values


class DiffRateBlock(MergingBlock):
    """A block that prunes and merges the tokens of least class attention."""

    def find(self, attended: Attended, tokens: Tensor, sizes: Tensor | None) -> Matched | None:
        number, count = self.site.number, tokens.shape[1] - self.num_prefix
        pruned, merged = (min(left[number], count) for left in (self.method.pruned, self.method.merged))
        if min(pruned, merged) == count:
            return None
        scores = class_attention(self.block, attended, size_bias(sizes))[:, self.num_prefix :]
        important, others = best(scores, min(pruned, merged))
        others = others[:, : max(pruned - merged, 0)]
        unit = F.normalize(tokens[:, self.num_prefix :], dim=-1)
        partners = (take(unit, others) @ take(unit, important).transpose(1, 2)).argmax(-1)
        return matched(self.num_prefix, important[:, :0], important, others, partners)

    def merge(self, tokens: Tensor, sizes: Tensor | None, found: Matched) -> tuple[Tensor, Tensor]:
        ones = torch.ones_like(tokens[..., :1])
        sizes = ones if sizes is None else sizes
        hosts = take(take(tokens, found.stays), found.into)
        similarity = F.cosine_similarity(take(tokens, found.merged), hosts, dim=-1).clamp_min(0)[..., None]
        grown = take(sizes, found.stays).scatter_add(1, found.into[..., None], take(sizes, found.merged) * similarity)
        return found.merge(tokens, ones)[0], grown


@dataclass(frozen=True)
class DiffRate(Method):
    """Pruning and merging at learned rates.

    Attributes:
        pruned: How many patches are left after pruning, in each block.
        merged: How many are left after merging.
    """

    name = "diffrate"
    title = "DiffRate"
    block_class = DiffRateBlock
    needs_class_token = True
    unmerge: ClassVar[bool] = False

    pruned: tuple[int, ...]
    merged: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.pruned) != len(self.merged) or min(*self.pruned, *self.merged) < 1:
            raise PmvitError(
                f"pruned, merged: expected as many numbers, 1 or more; got {self.pruned} and {self.merged}"
            )

    @classmethod
    def options_at(cls, strength: float, encoder: Encoder, options: dict[str, Any]) -> dict[str, Any]:
        pruned, merged = counts_at(strength, encoder.patch_embed.num_patches, len(encoder.blocks)).tolist()
        return {"pruned": tuple(pruned), "merged": tuple(merged)}

    def wraps(self, site: Site) -> bool:
        if len(self.pruned) != site.depth:
            raise PmvitError(f"pruned: expected a number for each of the {site.depth} blocks; got {len(self.pruned)}")
        return True
