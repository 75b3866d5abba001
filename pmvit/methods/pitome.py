"""PiToMe (Tran et al., NeurIPS 2024, arXiv:2405.16148), written from the paper for comparison.

Tokens that are like many others are redundant, and those that are like few are informative and protected. The *energy*
of a token is the mean over all tokens of ELU(cosine of their keys - margin) (Eq. 4); the margin falls with the depth,
so that only the nearest count in the first blocks. The 2r tokens of highest energy are parted alternately, in the order
of their energy, and every one of the first r is merged into its most similar one of the other r. Each block keeps the
same share of its tokens, so that the first blocks merge more. Sizes and un-merging are those of ToMe.
"""

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from pmvit.methods.attention import Attended, take
from pmvit.methods.base import Encoder, numbers_of_blocks
from pmvit.methods.tome import Matched, Tome, TomeBlock, matched


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
