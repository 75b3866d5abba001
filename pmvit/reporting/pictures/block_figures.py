"""The figures that `visualize` writes: what each block keeps of an image, its Grad-CAM, and maps of its plan."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor, nn

from pmvit.config.planning import Reconstruct
from pmvit.measuring import Scores
from pmvit.reporting.blocks import Block, planned
from pmvit.reporting.images import InputImages
from pmvit.reporting.pictures.cam import HEAT, MOST, Explained, agreement, heat
from pmvit.reporting.pictures.colours import NEUTRAL
from pmvit.reporting.pictures.figure import Layer, PixelFigure
from pmvit.reporting.pictures.patches import (
    SEQUENTIAL,
    WHITE,
    borders,
    colour_scale,
    group_map,
    group_sizes,
    merged_map,
    photograph,
    reconstructed,
    size_colours,
    size_map,
    value_map,
)
from pmvit.reporting.pictures.tiles import (
    SHARES,
    TILE,
    Entry,
    Header,
    Heading,
    Legends,
    Row,
    Tile,
    draw_tiles,
    tile_size,
)

NO_MAP = ("no map: what follows", "reads none of its patches")
RECONSTRUCTED = {
    "residual": "reconstructed: the mean of a group for each of its patches, pruned patches as they came; in the model "
    "it is an update, added to each patch",
    "pinv": "reconstructed: R M Z + (1 - T) Z (Eq. 4 to 7) on the patches Z, for a block that changes nothing",
}


Rows = dict[tuple[str, ...], Sequence[Tile]]  # by their names, in lines


class Photo(NamedTuple):
    """An image as a model takes it, (channels, height, width), and how it was prepared."""

    name: str
    pixels: Tensor
    images: InputImages


def describe_model(model: nn.Module) -> str:
    """A line that says which model it is and what was done to it."""
    plan = planned(model)
    grids = ", ".join(f"{rows} x {columns}" for rows, columns in dict.fromkeys(plan.grids))
    return (
        f"{type(model).__name__}, {plan.depth} blocks of {grids} patches; {plan.keep:.0%} of the patch tokens kept, "
        f"reconstruct {plan.reconstruct}"
    )


def draw_blocks(photo: Photo, blocks: Sequence[Block], reconstruct: Reconstruct, model: str) -> PixelFigure:
    """Fig. 5: for every block, the patches as it gets them, and as they are reconstructed."""
    image = photo.images.visible(photo.pixels)
    shown = _photograph(image)
    merged, back = [], []
    for block in blocks:
        grid, layer = block.layout.grid, block.layer
        merged.append(Tile((shown, Layer(merged_map(image, layer, grid)))))
        if layer.is_identity:
            back.append(Tile((shown,)))
            continue
        returned = photo.images.visible(reconstructed(photo.pixels, layer, grid, block.returns, reconstruct))
        back.append(Tile((_photograph(returned),)))
    words = {"kept": "kept: as it is", "merged": "merged: in the colour of its group", "pruned": "pruned: white"}
    legends = {"bar": [Entry(colour, words[state]) for state, colour in SHARES]}
    header = Header(f"{Path(photo.name).name}: what each block keeps", [model, RECONSTRUCTED[reconstruct]], shown)
    return _draw(header, blocks, {("tokens of", "the block"): merged, ("reconstructed",): back}, legends)


def draw_cam(
    photo: Photo, blocks: Sequence[Block], explained: Mapping[str, Explained], model: str, names: Sequence[str] = ()
) -> PixelFigure:
    """Fig. cam: for every block, the Grad-CAM of each model, one below the other; the first is the original."""
    image = photo.images.visible(photo.pixels)
    shown, grey = _photograph(image), _photograph(image.mean(0, keepdim=True))
    original, *_ = explained.values()
    rows: Rows = {}
    for name, each in explained.items():
        tiles = []
        for block in blocks:
            values = each.maps[block.number]
            alike = None if each is original else agreement(original.maps[block.number], values)
            caption = () if alike is None else (f"cosine {alike:.2f}",)
            layers = () if values is None else (grey, Layer(heat(values), smooth=True))
            tiles.append(Tile(layers, caption if layers else NO_MAP))
        rows[tuple(name.split(", "))] = tiles
    target = "the whole output" if original.target is None else _class(original.target, names)
    lines = [
        model,
        f"Grad-CAM of {target} on the patches that leave a block, each map from 0 to its {MOST:.0%} quantile; "
        "cosine: how alike both maps are",
    ]
    if original.target is not None:
        lines.append(";  ".join(f"{name}: {_prediction(each, names)}" for name, each in explained.items()))
    header = Header(f"{Path(photo.name).name}: Grad-CAM of each block", lines, shown)
    return _draw(header, blocks, rows, {"speaks for it": _scale(HEAT, "nothing", "most")})


def draw_maps(blocks: Sequence[Block], scores: Scores | None, model: str) -> PixelFigure:
    """For every block, the score of each patch, its group, and how many patches became one token with it."""
    largest = max(max(group_sizes(block.layer)) for block in blocks)
    rows: Rows = {}
    lines = [model]
    if scores is not None:
        rows[("score",)] = [_score_tile(scores.of(block.number).tolist(), block) for block in blocks]
        lines.append(
            f"{scores.config.scorer} scores of {scores.images} images, from the lowest to the highest of each block"
        )
    rows[("group",)] = [_group_tile(block) for block in blocks]
    rows["token count", "patches each"] = [_size_tile(block, largest) for block in blocks]
    if any(block.layout.windows is not None for block in blocks):
        lines.append("lines in the maps of groups are the borders of attention windows")
    sizes = sorted({round(size) for size in np.geomspace(1, largest, min(largest, 5))})
    colours = size_colours(np.array(sizes), largest).tolist()
    alone, others = Entry(NEUTRAL, "kept alone"), Entry(None, "other colours: merged into the patch with the dot")
    legends = {
        "bar": [Entry(colour, state) for state, colour in SHARES],
        "score": [] if scores is None else _scale(SEQUENTIAL, "low", "high"),
        "group": [alone, Entry(WHITE, "pruned"), others],
        "token count": [
            Entry(WHITE, "pruned"),
            *(Entry((r, g, b), str(size)) for (r, g, b, _), size in zip(colours, sizes, strict=True)),
        ],
    }
    return _draw(Header("scores, groups and tokens of each block", lines), blocks, rows, legends)


def _draw(header: Header, blocks: Sequence[Block], rows: Rows, legends: Legends) -> PixelFigure:
    size = tile_size(block.layout.grid for block in blocks)
    made = [Row(tiles, size, name) for name, tiles in rows.items()]
    return draw_tiles(header, [_heading(block) for block in blocks], made, legends)


def _photograph(image: Tensor) -> Layer:
    """A photograph to draw; one that is much smaller than its tile keeps its pixels sharp."""
    return Layer(photograph(image), smooth=max(image.shape[1:]) > TILE // 2)


def _heading(block: Block) -> Heading:
    number, layer = block.number, block.layer
    counts = (layer.num_kept, layer.num_merged, layer.num_pruned)
    in_mlp = None if layer.mlp is None else f"{layer.mlp.num_kept} in the MLP"
    if layer.is_identity:
        return Heading(f"block {number}: all {layer.num_tokens} kept", in_mlp or "not compressed", counts)
    name = f"block {number}: {layer.num_kept} of {layer.num_tokens} kept"
    return Heading(name, in_mlp or f"{layer.num_merged} merged, {layer.num_pruned} pruned", counts)


def _score_tile(values: Sequence[float], block: Block) -> Tile:
    return Tile((Layer(value_map(values, block.layout.grid)),), (f"{min(values):.1e} to {max(values):.1e}",))


def _group_tile(block: Block) -> Tile:
    grid, windows = block.layout.grid, block.layout.windows
    layers = [Layer(group_map(block.layer, grid))]
    if windows is not None:
        regions = windows.regions(grid).flatten()[windows.places(grid)]
        layers.append(Layer(borders(regions.tolist(), grid)))
    several = sum(len(members) > 1 for members in block.layer.members())
    return Tile(tuple(layers), (f"{several} groups, {block.layer.num_kept - several} alone",))


def _size_tile(block: Block, largest: int) -> Tile:
    most = max(group_sizes(block.layer))
    layer = Layer(size_map(block.layer, block.layout.grid, largest))
    return Tile((layer,), (f"up to {most}" if most > 1 else "1 each",))


def _scale(colour_map: str, low: str, high: str) -> list[Entry]:
    return [Entry(*pair) for pair in zip(colour_scale(colour_map, 5), (low, "", "", "", high), strict=True)]


def _class(number: int, names: Sequence[str]) -> str:
    return names[number] if names else f"class {number}"


def _prediction(explained: Explained, names: Sequence[str]) -> str:
    if explained.found is None or explained.confidence is None:
        return "no classes"
    share = f"{explained.confidence:.0%}" + (" of the image" if explained.is_dense else "")
    return f"{_class(explained.found, names)} ({share})"
