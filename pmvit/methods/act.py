"""ACT (Adaptive Clustering Transformer; Zheng et al., BMVC 2021, arXiv:2011.09315), written from the paper.

All tokens stay, and all are keys; it is the queries that become fewer. In every head, queries that are near each other
share a bucket of a locality sensitive hash, h(q) = floor(a q / width) for a few random directions a (E2LSH); the mean
of a bucket is its *prototype*. Prototypes attend to all keys, and what one finds is handed to every query of its
bucket: O(N K) in place of O(N^2), without training. Here buckets get, for each image and head, the least width at
which there are no more than a given number of them, so that the cost is the same for every image.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pmvit.data.seeding import seed_for
from pmvit.errors import PmvitError
from pmvit.methods.attention import finish, fused, mlp_update, queries_keys_values
from pmvit.methods.base import Encoder, Method, MethodBlock, Site

STEPS = 7  # halvings of the range of widths
FINEST = 6.0  # of that range: the smallest width, as a power of two below the largest


def buckets_of(projected: Tensor, cells: Tensor, mixers: Tensor) -> tuple[Tensor, Tensor]:
    """The bucket of each of (..., queries, directions) with so many cells (..., 1, 1) to the widest direction, numbered
    from 0; and how many there are."""
    low, high = projected.amin(-2, keepdim=True), projected.amax(-2, keepdim=True)
    widest = (high - low).amax(-1, keepdim=True).clamp_min(1e-12)
    places = ((projected - low) / widest * (1 - 1e-6) * cells).floor().long()
    codes, order = (places * mixers).sum(-1).sort(dim=-1)  # queries of a bucket are next to each other now
    numbers = F.pad((codes[..., 1:] != codes[..., :-1]).long().cumsum(-1), (1, 0))
    return torch.zeros_like(numbers).scatter(-1, order, numbers), numbers[..., -1] + 1


def cluster(queries: Tensor, directions: Tensor, mixers: Tensor, most: int) -> Tensor:
    """The bucket of each of (batch, heads, queries, width), fewer than `most`, at the least width that allows it."""
    projected = queries @ directions
    low = projected.new_zeros(*projected.shape[:2], 1, 1)  # one cell: a single bucket
    high = low + FINEST
    found = torch.zeros_like(projected[..., 0], dtype=torch.long)
    for _ in range(STEPS):
        middle = (low + high) / 2
        buckets, count = buckets_of(projected, middle.exp2(), mixers)
        fits = (count <= most)[..., None]
        found = torch.where(fits, buckets, found)
        low, high = torch.where(fits[..., None], middle, low), torch.where(fits[..., None], high, middle)
    return found


def prototypes_of(queries: Tensor, buckets: Tensor, number: int) -> Tensor:
    """The mean of the queries of each bucket, (batch, heads, number, width); 0 where there is none."""
    counted = F.pad(queries, (0, 1), value=1.0)
    sums = counted.new_zeros(*counted.shape[:2], number, counted.shape[-1])
    sums = sums.scatter_add(2, buckets[..., None].expand_as(counted), counted)
    return sums[..., :-1] / sums[..., -1:].clamp_min(1)


class ActBlock(MethodBlock["Act"]):
    """A block whose patches attend as prototypes; prefix tokens attend for themselves."""

    directions: Tensor
    mixers: Tensor

    def __init__(self, block: Any, site: Site, method: "Act") -> None:
        super().__init__(block, site, method)
        generator = torch.Generator().manual_seed(seed_for(method.seed, site.number))
        directions = torch.randn(block.attn.head_dim, method.hashes, generator=generator)
        mixers = torch.randint(1, 2**31, (method.hashes,), generator=generator)  # tell buckets apart by one number
        self.register_buffer("directions", directions, persistent=False)
        self.register_buffer("mixers", mixers, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = queries_keys_values(self.block, tokens)
        prefix, patches = query.tensor_split([self.num_prefix], dim=2)
        most = self.method.prototypes
        with torch.no_grad():
            buckets = cluster(patches, self.directions.to(patches), self.mixers, most)
        asked = torch.cat([prefix, prototypes_of(patches, buckets, most)], dim=2)
        own, shared = fused(self.block, asked, key, value).tensor_split([self.num_prefix], dim=2)
        back = shared.gather(2, buckets[..., None].expand(-1, -1, -1, shared.shape[-1]))
        tokens = tokens + finish(self.block, torch.cat([own, back], dim=2))
        return tokens + mlp_update(self.block, tokens)


@dataclass(frozen=True)
class Act(Method):
    """Attention of clustered queries.

    Attributes:
        prototypes: How many queries may stand for the patches in each head.
        hashes: Random directions that the buckets are made by.
        seed: Of the directions.
    """

    name = "act"
    title = "ACT"
    block_class = ActBlock
    gives_all_tokens = True

    prototypes: int
    hashes: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if self.prototypes < 1 or self.hashes < 1:
            raise PmvitError(f"expected prototypes and hashes of 1 and more; got {self.prototypes} and {self.hashes}")

    @classmethod
    def options_at(cls, strength: float, encoder: Encoder, options: dict[str, Any]) -> dict[str, Any]:
        return {"prototypes": max(round((1 - strength) * encoder.patch_embed.num_patches), 1)}

    def wraps(self, site: Site) -> bool:
        return self.prototypes < site.num_patches
