"""Expedite (Liang et al., NeurIPS 2022, arXiv:2210.01035), written from the paper for comparison.

For dense prediction without fine-tuning. After some block, a *token clustering layer* makes a coarser grid of clusters
out of the grid of patches: they begin as the averages of its cells, then a few times each patch is parted among the
clusters around it, by exp(-distance^2 / temperature), and each cluster becomes the mean of its patches. The following
blocks run on the clusters. At the end, a *token reconstruction layer* gives every patch the mean of the refined
clusters that it was nearest to before, weighted by the same measure.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pmvit.errors import PmvitError
from pmvit.methods.base import Encoder, Method, MethodBlock, Site, check_size, numbers_of_blocks


def affinity(patches: Tensor, clusters: Tensor, temperature: float) -> Tensor:
    """Minus the squared distance of every (batch, patch, width) from every cluster, over the temperature."""
    squares = patches.square().sum(-1)[..., None] + clusters.square().sum(-1)[:, None]
    return (2 * patches @ clusters.transpose(1, 2) - squares) / temperature


def neighbours(grid: tuple[int, int], clusters: tuple[int, int], window: int) -> Tensor:
    """Whether a patch may belong to a cluster, (patches, clusters): it is in the window around the patch's own."""
    near = []
    for side, number in zip(grid, clusters, strict=True):
        own = (torch.arange(side) + 0.5) * number / side - 0.5
        near.append((own[:, None] - torch.arange(number)).abs() <= window / 2)
    return (near[0][:, None, :, None] & near[1][None, :, None, :]).flatten(0, 1).flatten(1)


def cluster(
    patches: Tensor, grid: tuple[int, int], size: tuple[int, int], near: Tensor, rounds: int, temperature: float
) -> Tensor:
    """The token clustering layer: (batch, patches, width) to (batch, clusters, width)."""
    image = patches.transpose(1, 2).unflatten(2, grid)
    clusters = F.adaptive_avg_pool2d(image, size).flatten(2).transpose(1, 2)
    for _ in range(rounds):
        shares = affinity(patches, clusters, temperature).masked_fill(~near, -torch.inf).softmax(-1)
        totals = shares.sum(1)[..., None]
        moved = shares.transpose(1, 2) @ patches / totals.clamp_min(1e-6)
        clusters = torch.where(totals > 1e-6, moved, clusters)  # one without patches stays where it is
    return clusters


def reconstruct(patches: Tensor, clusters: Tensor, refined: Tensor, number: int, temperature: float) -> Tensor:
    """The token reconstruction layer: each patch as the mean of the refined clusters that it was nearest to."""
    nearness = affinity(patches, clusters, temperature)
    least = nearness.topk(min(number, clusters.shape[1]), dim=-1).values[..., -1:]
    return nearness.masked_fill(nearness < least, -torch.inf).softmax(-1) @ refined


class ExpediteBlock(MethodBlock["Expedite"]):
    """A block on clusters; the first one makes them, the last one gives the patches back.

    It hands on what the way back needs: patches and clusters as they were before.
    """

    near: Tensor

    def __init__(self, block: Any, site: Site, method: "Expedite") -> None:
        super().__init__(block, site, method)
        self.register_buffer("near", neighbours(site.grid, method.clusters, method.window), persistent=False)

    def run(self, tokens: Tensor, patches: Tensor | None = None, clusters: Tensor | None = None) -> tuple[Tensor, ...]:
        method = self.method
        prefix, rest = tokens.tensor_split([self.num_prefix], dim=1)
        if patches is None or clusters is None:
            check_size(rest, len(self.near))
            patches = rest
            clusters = cluster(rest, self.site.grid, method.clusters, self.near, method.rounds, method.temperature)
            tokens = torch.cat([prefix, clusters], dim=1)
        tokens = self.block(tokens)
        if self.is_last:
            prefix, refined = tokens.tensor_split([self.num_prefix], dim=1)
            back = reconstruct(patches, clusters, refined, method.neighbours, method.temperature)
            tokens = torch.cat([prefix, back], dim=1)
        return tokens, patches, clusters


@dataclass(frozen=True)
class Expedite(Method):
    """Token clustering and reconstruction.

    Attributes:
        clusters: Rows and columns of clusters.
        start: The first block that runs on clusters; if not given, after five twelfths of the model: 10 of 24.
        rounds: How often clusters are formed anew.
        window: Side of the square of clusters around a patch that it may belong to.
        neighbours: How many clusters a patch is reconstructed from.
        temperature: Of the weights, in squared distances between tokens, whose scale differs from model to model. The
            default is that of the authors' code for ImageNet classifiers; for a Segmenter ViT-L/16 it has 50. Far below
            the distances, a patch goes to its nearest cluster; at their size, clusters blur into each other.
    """

    name = "expedite"
    title = "Expedite"
    block_class = ExpediteBlock
    gives_all_tokens = True

    clusters: tuple[int, int]
    start: int | None = None
    rounds: int = 5
    window: int = 5
    neighbours: int = 20
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if len(self.clusters) != 2 or min(self.clusters) < 1:
            raise PmvitError(f"clusters: expected rows and columns, 1 or more; got {self.clusters}")

    @classmethod
    def options_at(cls, strength: float, encoder: Encoder, options: dict[str, Any]) -> dict[str, Any]:
        grid = tuple(encoder.patch_embed.grid_size)
        sizes = [grid]
        while max(sizes[-1]) > 1:  # take one from the side that has the larger part of its patches left
            rows, columns = sizes[-1]
            shorten_rows = columns == 1 or (rows > 1 and rows * grid[1] >= columns * grid[0])
            sizes.append((rows - 1, columns) if shorten_rows else (rows, columns - 1))
        return {"clusters": sizes[round(strength * (len(sizes) - 1))]}

    def wraps(self, site: Site) -> bool:
        rows, columns = site.grid
        if self.clusters[0] > rows or self.clusters[1] > columns:
            raise PmvitError(f"clusters: expected no more than the {rows} x {columns} patches; got {self.clusters}")
        start = site.depth * 5 // 12 if self.start is None else self.start
        return self.clusters != site.grid and site.number >= min(numbers_of_blocks((start,), site.depth, "start"))
