"""Patches of a block as pictures: kept, merged and pruned, what comes back, and maps of scores, groups and their sizes.

A map is a picture, bytes of shape (rows, columns, 4), with one pixel or a few for each patch, transparent where there
is nothing to draw; it lies over a photograph or stands alone.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from matplotlib import colormaps
from torch import Tensor

from pmvit.config.planning import Reconstruct
from pmvit.numbers.colours import NEUTRAL, OKABE_ITO, Colour
from pmvit.planning import LayerPlan
from pmvit.prune_merge import PRUNED
from pmvit.reporting.images import Bytes
from pmvit.reporting.pictures.tiles import patch_side

WHITE: Colour = (255, 255, 255)
LINES = (25, 25, 25, 150)
SEQUENTIAL = "viridis"  # from low to high, for all eyes


def merged_map(image: Tensor, layer: LayerPlan, grid: tuple[int, int]) -> Bytes:
    """What lies over an image to show a block's tokens: merged patches in the colour of their group, pruned ones white.

    The colour is the weighted mean of the group's patches. Kept patches are left open.
    """
    colours = F.adaptive_avg_pool2d(image.expand(3, -1, -1), grid)
    means = reconstructed(colours, layer, grid, (1.0,) * layer.num_tokens, "residual").flatten(1).t()
    groups, centres, _ = layer.tensors()
    cells = torch.cat([means, torch.ones(len(means), 1)], dim=1)
    cells[groups == PRUNED] = 1.0
    cells[centres, 3] = 0.0
    return np.asarray((255 * cells).round().byte().view(*grid, 4))


def reconstructed(
    image: Tensor, layer: LayerPlan, grid: tuple[int, int], returns: Sequence[float], reconstruct: Reconstruct
) -> Tensor:
    """The patches Z of an image merged and reconstructed, as the paper shows it: `R M Z + (1 - T) Z`.

    With `pinv` these are the very products. With `residual`, where only what a block changes is reconstructed, each
    group becomes its weighted mean, so that the result is a picture. The image is (channels, height, width), as the
    model takes it; `returns` is the weight with which each patch gets back what its group became.
    """
    rows, columns = grid
    height, width = (-(-side // cells) * cells for side, cells in zip(image.shape[1:], grid, strict=True))
    if (height, width) != tuple(image.shape[1:]):  # the grid was padded on the way
        image = F.interpolate(image[None], size=(height, width), mode="nearest")[0]
    size = (height // rows, width // columns)
    tokens = F.unfold(image[None], size, stride=size)[0].t()
    groups, _, weights = layer.tensors()
    is_member = groups != PRUNED
    if reconstruct == "residual":
        totals = torch.zeros(layer.num_kept).index_add_(0, groups[is_member], weights[is_member].abs())
        weights = weights.abs() / totals[groups.clamp(min=0)]
    merged = torch.zeros(layer.num_kept, tokens.shape[1])
    merged.index_add_(0, groups[is_member], weights[is_member, None] * tokens[is_member])
    back = torch.where(is_member[:, None], torch.tensor(returns)[:, None] * merged[groups.clamp(min=0)], tokens)
    return F.fold(back.t()[None], (height, width), size, stride=size)[0]


def value_map(values: Sequence[float], grid: tuple[int, int]) -> Bytes:
    """Numbers from the colour of the lowest to that of the highest."""
    numbers = np.asarray(values, dtype=np.float64).reshape(grid)
    return coloured((numbers - numbers.min()) / (np.ptp(numbers) or 1.0))


def coloured(shares: npt.ArrayLike, name: str = SEQUENTIAL) -> Bytes:
    """Numbers from 0 to 1 as bytes of shape (..., 4), in the colours of one of matplotlib's colour maps."""
    made: Bytes = colormaps[name](np.asarray(shares), bytes=True)
    return made


def group_sizes(layer: LayerPlan) -> list[int]:
    """For each patch, how many patches its group has: one that is kept alone 1, a pruned one 0."""
    sizes = [len(members) for members in layer.members()]
    return [0 if group == PRUNED else sizes[group] for group in layer.groups]


def size_colours(sizes: npt.ArrayLike, largest: int) -> Bytes:
    """Numbers of patches that became one token as bytes of shape (..., 4): twice as many, as much lighter."""
    return coloured(np.log(np.maximum(sizes, 1)) / np.log(max(largest, 2)))


def size_map(layer: LayerPlan, grid: tuple[int, int], largest: int) -> Bytes:
    """How many patches became one token: the more, the lighter; pruned ones white. `largest` is the lightest."""
    sizes = np.reshape(group_sizes(layer), grid)
    cells = size_colours(sizes, largest)
    cells[sizes == 0] = (*WHITE, 255)
    return cells


def group_map(layer: LayerPlan, grid: tuple[int, int]) -> Bytes:
    """Groups of several patches in colours that differ from those beside them, a dot on the kept patch of each.

    Patches that are kept alone are grey, pruned ones white.
    """
    colours = {PRUNED: WHITE, **_colours_of_groups(layer, grid)}
    cells = np.array([(*colours.get(group, NEUTRAL), 255) for group in layer.groups], dtype=np.uint8)
    cell = patch_side(grid)
    picture = cells.reshape(*grid, 4).repeat(cell, axis=0).repeat(cell, axis=1)
    dot = slice(cell // 3, cell - cell // 3)
    patches = picture.reshape(grid[0], cell, grid[1], cell, 4)
    for group, centre in enumerate(layer.centres):
        if group in colours:
            patches[centre // grid[1], dot, centre % grid[1], dot] = (0, 0, 0, 255)
    return picture


def _colours_of_groups(layer: LayerPlan, grid: tuple[int, int]) -> dict[int, Colour]:
    """For each group of several patches the first colour that none beside it has; if all have one, the rarest."""
    labels = np.reshape(layer.groups, grid)
    beside: dict[int, set[int]] = {}
    for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
        one = labels[: grid[0] - down, max(-right, 0) : grid[1] - max(right, 0)]
        other = labels[down:, max(right, 0) : grid[1] + min(right, 0)]
        for first, second in zip(one.flatten().tolist(), other.flatten().tolist(), strict=True):
            beside.setdefault(first, set()).add(second)
            beside.setdefault(second, set()).add(first)
    chosen: dict[int, int] = {}
    for group, members in enumerate(layer.members()):
        if len(members) > 1:
            taken = [chosen[each] for each in beside[group] if each in chosen]
            turns = [(group + number) % len(OKABE_ITO) for number in range(len(OKABE_ITO))]
            chosen[group] = min(turns, key=taken.count)
    return {group: OKABE_ITO[number] for group, number in chosen.items()}


def borders(labels: Sequence[int], grid: tuple[int, int]) -> Bytes:
    """Lines between patches with other labels, and nothing else."""
    cells, cell = np.reshape(labels, grid), patch_side(grid)
    picture = np.zeros((grid[0] * cell, grid[1] * cell, 4), dtype=np.uint8)
    picture[cell::cell][np.repeat(cells[1:] != cells[:-1], cell, axis=1)] = LINES
    picture[:, cell::cell][np.repeat(cells[:, 1:] != cells[:, :-1], cell, axis=0)] = LINES
    return picture
