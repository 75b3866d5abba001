"""MCTF (Multi-criteria Token Fusion; Lee et al., CVPR 2024, arXiv:2403.10030), written from the paper for comparison.

What draws two tokens together is a product of three criteria (Section 3.2): their similarity, (cosine + 1) / 2; how
little informative both are, by the attention that each receives, (1 / a_i a_j)^(1/20); and how small both are,
(1 / s_i s_j)^(1/40). Tokens are split alternately into two sets; half of the r merges goes from the first into the
second, then the other half from the second into what is left of the first. A new token is the mean weighted by
attention and size.

It happens before attention, by the attention that the block is about to compute (*one-step-ahead*, Section 3.3). That
is not computed again: its columns are added up, and its rows averaged, as the tokens are.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pmvit.methods.attention import finish, mlp_update, project, take
from pmvit.methods.tome import Matched, Tome, TomeBlock, matched, most_merged, size_bias


def attraction(tokens: Tensor, received: Tensor, sizes: Tensor, tau: tuple[float, float, float], first: int) -> Tensor:
    """How much (batch, tokens, width) patches of the set that begins at place `first` attract those of the other."""
    unit = F.normalize(tokens, dim=-1)
    weights = (received / received.amin(1, keepdim=True)) ** (-1 / tau[1])
    weights = weights * (sizes / sizes.amin(1, keepdim=True)) ** (-1 / tau[2])
    similarity = ((unit[:, first::2] @ unit[:, 1 - first :: 2].transpose(1, 2) + 1) / 2).clamp_min(0) ** (1 / tau[0])
    return similarity * weights[:, first::2] * weights[:, 1 - first :: 2].transpose(1, 2)


def match_both_ways(drawn: Tensor, r: int, num_prefix: int) -> Matched:
    """The r strongest merges of an attraction (batch, first set, second set), half of them in each direction."""
    even, odd, there = num_prefix % 2, 1 - num_prefix % 2, r // 2
    strength, partner = drawn.max(-1)
    order = strength.argsort(dim=-1, descending=True)
    merged, left = order[:, :there], order[:, there:].sort(dim=1).values
    strength, back = take(drawn, left).max(1)  # of the second set, to what is left of the first
    order = strength.argsort(dim=-1, descending=True)
    returned, hosts = order[:, : r - there], order[:, r - there :].sort(dim=1).values
    ranks = torch.arange(hosts.shape[1], device=drawn.device).expand_as(hosts)
    places = torch.empty_like(back).scatter(1, hosts, left.shape[1] + ranks)
    places = places.scatter(1, returned, back.gather(1, returned))  # of the second set, among all that stay
    stays = torch.cat([even + 2 * left, odd + 2 * hosts], dim=1)
    into = torch.cat([places.gather(1, partner.gather(1, merged)), places.gather(1, returned)], dim=1)
    return matched(num_prefix, stays[:, :0], stays, torch.cat([even + 2 * merged, odd + 2 * returned], dim=1), into)


class MctfBlock(TomeBlock):
    """A block with r tokens merged before attention, which is merged with them."""

    def run(self, tokens: Tensor, sizes: Tensor | None = None, places: Tensor | None = None) -> tuple[Any, ...]:
        r = most_merged(self.r, tokens.shape[1], self.num_prefix)
        if not r and not self.method.always_match:
            return super().run(tokens, sizes, places)
        block: Any = self.block
        normed = block.norm1(tokens)
        scores = project(block, normed, 0) * block.attn.scale @ project(block, normed, 1).transpose(-2, -1)
        bias = size_bias(sizes)
        maps = (scores if bias is None else scores + bias).softmax(-1)
        sizes = torch.ones_like(tokens[..., :1]) if sizes is None else sizes
        with torch.no_grad():
            received = maps.mean((1, 2))[..., None]
            patches, others, known = (each[:, self.num_prefix :] for each in (tokens, received, sizes))
            drawn = attraction(patches, others, known, self.method.tau, self.num_prefix % 2)
            found = match_both_ways(drawn, r, self.num_prefix)
        weights = received * sizes
        tokens, totals = found.merge(tokens, weights)
        columns = found.sums(maps.permute(0, 3, 1, 2).flatten(2)).unflatten(2, maps.shape[1:3])  # keys, heads, queries
        rows = found.sums(columns.permute(0, 3, 2, 1).flatten(2) * weights) / totals  # queries, heads and keys
        maps = block.attn.attn_drop(rows.unflatten(2, (maps.shape[1], -1)).transpose(1, 2))
        tokens = tokens + finish(block, maps @ project(block, block.norm1(tokens), 2))
        return self.finished(tokens + mlp_update(block, tokens), found.sums(sizes), places, found)


@dataclass(frozen=True)
class Mctf(Tome):
    """Multi-criteria token fusion; the first block merges nothing, as in the paper.

    Attributes:
        tau: How little similarity, informativeness and size weigh: each criterion is taken to the power 1 / tau.
    """

    name = "mctf"
    title = "MCTF"
    block_class = MctfBlock

    skip: tuple[int, ...] = (0,)
    tau: tuple[float, float, float] = (1.0, 20.0, 40.0)
