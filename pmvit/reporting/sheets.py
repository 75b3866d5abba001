"""The sheets that `visualize` writes: what each block keeps of an image, where it looks, and maps of its plan."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pmvit.config.planning import Reconstruct
from pmvit.measuring import Scores
from pmvit.planning import LayerPlan
from pmvit.reporting.bands import SHARES, Header, Heading, Row, Tile, lay_out_bands, tile_size
from pmvit.reporting.blocks import Block, planned
from pmvit.reporting.cam import MOST, Explained, agreement, heat, legend_colours
from pmvit.reporting.canvas import TILE, Canvas, Layer
from pmvit.reporting.colours import NEUTRAL
from pmvit.reporting.legend import Entry
from pmvit.reporting.pictures import (
    WHITE,
    borders,
    group_map,
    group_sizes,
    merged_map,
    photograph,
    recovered,
    sequential,
    size_map,
    value_map,
)

NO_MAP = "no map: what follows\nreads none of its patches"
HANDED_BACK = {
    "residual": "reconstructed: the mean of a group for each of its patches, pruned patches as they came; in the model "
    "it is an update, added to each patch",
    "pinv": "reconstructed: R M Z + (1 - T) Z (Eq. 4 to 7) on the patches Z, for a block that changes nothing",
}


class Photo(NamedTuple):
    """An image as a model takes it, (channels, height, width), and how to see it."""

    name: str
    pixels: Tensor
    mean: Sequence[float]
    std: Sequence[float]

    def visible(self, pixels: Tensor) -> Tensor:
        """Normalised pixels from 0 to 1 again."""
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return (pixels * std + mean).clamp(0, 1)


def about(model: nn.Module) -> str:
    """A line that says which model it is and what was done to it."""
    plan = planned(model)
    grids = ", ".join(f"{rows} x {columns}" for rows, columns in dict.fromkeys(plan.grids))
    return (
        f"{type(model).__name__}, {plan.depth} blocks of {grids} patches; {plan.keep:.0%} of the patch tokens kept, "
        f"reconstruct {plan.reconstruct}"
    )


def blocks_sheet(photo: Photo, blocks: Sequence[Block], reconstruct: Reconstruct, model: str) -> Canvas:
    """Fig. 5: for every block, the patches as it sees them, and as they come back."""
    image = photo.visible(photo.pixels)
    shown = _layer(image)
    seen, back = [], []
    for block in blocks:
        grid, layer = block.layout.grid, block.layer
        seen.append(Tile((shown, Layer(merged_map(image, layer, grid)))))
        if layer.is_identity:
            back.append(Tile((shown,)))
            continue
        returned = photo.visible(recovered(photo.pixels, layer, grid, block.returns, reconstruct))
        back.append(Tile((_layer(returned),)))
    words = {"kept": "kept: as it is", "merged": "merged: in the colour of its group", "pruned": "pruned: white"}
    legend = {"bar": [Entry(colour, words[state]) for state, colour in SHARES]}
    header = Header(f"{Path(photo.name).name}: what each block keeps", [model, HANDED_BACK[reconstruct]], shown)
    rows = [Row(("seen by", "the block"), seen), Row(("reconstructed",), back)]
    return lay_out_bands(header, _headings(blocks), rows, legend, tile_size(*image.shape[1:]))


def cam_sheet(
    photo: Photo, blocks: Sequence[Block], explained: Mapping[str, Explained], model: str, names: Sequence[str] = ()
) -> Canvas:
    """Fig. cam: for every block, where each of the models looks, one below the other; the first is the original."""
    image = photo.visible(photo.pixels)
    shown, grey = _layer(image), _layer(image.mean(0, keepdim=True))
    original, *_ = explained.values()
    rows = []
    for name, each in explained.items():
        tiles = []
        for block in blocks:
            values = each.maps[block.number]
            alike = None if each is original else agreement(original.maps[block.number], values)
            words = "" if alike is None else f"cosine {alike:.2f}"
            tiles.append(Tile((), NO_MAP) if values is None else Tile((grey, Layer(heat(values), smooth=True)), words))
        rows.append(Row(tuple(name.split(", ")), tiles))
    target = "the whole output" if original.target is None else _class(original.target, names)
    lines = [
        model,
        f"Grad-CAM of {target} on the patches that leave a block, each map from 0 to its {MOST:.0%} quantile; "
        "cosine: how alike both maps are",
    ]
    if original.target is not None:
        lines.append(";  ".join(f"{name}: {_finding(each, names)}" for name, each in explained.items()))
    ends = ("nothing", "", "", "", "most")
    legend = {"speaks for it": [Entry(*pair) for pair in zip(legend_colours(len(ends)), ends, strict=True)]}
    header = Header(f"{Path(photo.name).name}: where each block looks", lines, shown)
    return lay_out_bands(header, _headings(blocks), rows, legend, tile_size(*image.shape[1:]))


def maps_sheet(blocks: Sequence[Block], scores: Scores | None, model: str, size: tuple[int, int]) -> Canvas:
    """For every block, the score of each patch, its group, and how many patches became one token with it."""
    largest = max(max(group_sizes(block.layer)) for block in blocks)
    rows = [
        Row(("group",), [_group_tile(block) for block in blocks]),
        Row(("token count", "patches each"), [_size_tile(block, largest) for block in blocks]),
    ]
    ends = ("low", "", "", "", "high")
    legends: dict[str, Sequence[Entry]] = {
        "bar": [Entry(colour, state) for state, colour in SHARES],
        "score": [],
        "group": [
            Entry(NEUTRAL, "kept alone"),
            Entry(WHITE, "pruned"),
            Entry(None, "other colours: merged into the patch with the dot"),
        ],
        "token count": [Entry(WHITE, "pruned"), *_size_entries(largest)],
    }
    lines = [model]
    if scores is not None:
        tiles = [_score_tile(scores.of(block.number).tolist(), block) for block in blocks]
        rows.insert(0, Row(("score",), tiles))
        legends["score"] = [Entry(*pair) for pair in zip(_sequential(len(ends)), ends, strict=True)]
        lines.append(
            f"{scores.config.scorer} scores of {scores.images} images, from the lowest to the highest of each block"
        )
    if any(block.layout.windows is not None for block in blocks):
        lines.append("lines in the maps of groups are the borders of attention windows")
    header = Header("scores, groups and tokens of each block", lines)
    return lay_out_bands(header, _headings(blocks), rows, legends, size)


def _layer(image: Tensor) -> Layer:
    """A photograph to draw; one that is much smaller than its tile keeps its pixels sharp."""
    return Layer(photograph(image), smooth=max(image.shape[1:]) > TILE // 2)


def _headings(blocks: Sequence[Block]) -> list[Heading]:
    return [_heading(block.number, block.layer) for block in blocks]


def _heading(number: int, layer: LayerPlan) -> Heading:
    counts = (layer.num_kept, layer.num_merged, layer.num_pruned)
    in_mlp = None if layer.mlp is None else f"{layer.mlp.num_kept} in the MLP"
    if layer.is_identity:
        return Heading(f"block {number}: all {layer.num_tokens} kept", in_mlp or "not compressed", counts)
    name = f"block {number}: {layer.num_kept} of {layer.num_tokens} kept"
    return Heading(name, in_mlp or f"{layer.num_merged} merged, {layer.num_pruned} pruned", counts)


def _score_tile(values: Sequence[float], block: Block) -> Tile:
    return Tile((Layer(value_map(values, block.layout.grid)),), f"{min(values):.1e} to {max(values):.1e}")


def _group_tile(block: Block) -> Tile:
    grid, windows = block.layout.grid, block.layout.windows
    layers = [Layer(group_map(block.layer, grid))]
    if windows is not None:
        regions = windows.regions(grid).flatten()[windows.places(grid)]
        layers.append(Layer(borders(regions.tolist(), grid)))
    several = sum(len(members) > 1 for members in block.layer.members())
    return Tile(tuple(layers), f"{several} groups, {block.layer.num_kept - several} alone")


def _size_tile(block: Block, largest: int) -> Tile:
    most = max(group_sizes(block.layer))
    layer = Layer(size_map(block.layer, block.layout.grid, largest))
    return Tile((layer,), f"up to {most}" if most > 1 else "1 each")


def _size_entries(largest: int) -> list[Entry]:
    """A few sizes of groups and their colours, from 1 to the largest."""
    sizes = sorted({round(size) for size in np.linspace(1, largest, min(largest, 5))})
    colours = sequential((np.array(sizes) - 1) / max(largest - 1, 1))
    return [Entry((int(r), int(g), int(b)), str(size)) for (r, g, b, _), size in zip(colours, sizes, strict=True)]


def _sequential(count: int) -> list[tuple[int, int, int]]:
    return [(int(red), int(green), int(blue)) for red, green, blue, _ in sequential(np.linspace(0, 1, count))]


def _class(number: int, names: Sequence[str]) -> str:
    return names[number] if names else f"class {number}"


def _finding(explained: Explained, names: Sequence[str]) -> str:
    if explained.found is None or explained.confidence is None:
        return "no classes"
    share = f"{explained.confidence:.0%}" + (" of the image" if explained.is_dense else "")
    return f"{_class(explained.found, names)} ({share})"
