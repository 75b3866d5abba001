"""`visualize`: what each block of a compressed model keeps, its Grad-CAM, and its plan as maps, as PNG and SVG."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from torch import Tensor, nn

from pmvit.data.loaders import Broken
from pmvit.data.sources import choose_samples, open_source
from pmvit.errors import PmvitError
from pmvit.evaluation.reference import Reference, reference_for
from pmvit.hosts import host_of
from pmvit.measuring import Scores
from pmvit.methods.base import numbers_of_blocks
from pmvit.numbers.colours import NEUTRAL, Colour
from pmvit.planning.adaptive import AdaptivePlan
from pmvit.progress import track
from pmvit.reporting.blocks import Block, blocks_of, check_scores, planned, sizes
from pmvit.reporting.class_names import class_names, name_of
from pmvit.reporting.images import InputImages, photograph, readable
from pmvit.reporting.pictures import patches
from pmvit.reporting.pictures.cam import HEAT, MOST, agreement, explain, heat
from pmvit.reporting.pictures.figure import Format, Layer, PixelFigure, numbered_stem
from pmvit.reporting.pictures.tiles import SHARES, TILE, Heading, Legends, Row, Tile, draw_tiles, tile_size

What = Literal["blocks", "cam", "maps"]
Formats = Literal["png", "svg", "both"]
Rows = dict[tuple[str, ...], Sequence[Tile]]  # by their names, in lines
NO_MAP = ("no map: what follows", "reads none of its patches")
STATES = {"kept": "kept: as it is", "merged": "merged: in the colour of its group", "pruned": "pruned: white"}
RECONSTRUCTED = {
    "residual": "reconstructed: the mean of a group for each of its patches, pruned patches as they came; in the model "
    "it is an update, added to each patch",
    "pinv": "reconstructed: R M Z + (1 - T) Z (Eq. 4 to 7) on the patches Z, for a block that changes nothing",
}


@dataclass(frozen=True)
class Visualized:
    """What `visualize` wrote.

    Attributes:
        maps: The maps of the plan, if they were asked for: a file a format.
        images: For each image, what was written of it.
        broken: Images that could not be read and were left out.
    """

    maps: list[Path] = field(default_factory=list)
    images: dict[str, list[Path]] = field(default_factory=dict)
    broken: Broken = field(default_factory=Broken)


def visualize(
    model: nn.Module,
    data: str | Path | None,
    output: str | Path,
    *,
    what: Sequence[What] = get_args(What),
    blocks: Sequence[int] | None = None,
    limit: int = 8,
    formats: Formats = "both",
    scores: Scores | None = None,
    original: str | Path | nn.Module | None = None,
    names: str | Path | None = None,
    progress: bool = True,
) -> Visualized:
    """Draw what compression does to images, block by block.

    Args:
        model: What `compress` or `load` returned.
        data: A folder of images or whatever else `open_source` knows, or an image file. Maps alone need none.
        output: The folder to write to.
        what: `blocks`: for each image, kept patches as they are, merged ones in the colour of their group, pruned ones
            white, and what is reconstructed (Fig. 5). `cam`: Grad-CAM of the original and of the compressed model.
            `maps`: of scores, groups and token counts, which are the same for all images unless the plan is adaptive.
        blocks: Which blocks, negative numbers from the last; all if not given.
        limit: How many images at most, taken evenly from all there are.
        formats: `png`, `svg` or `both`.
        scores: Those the plan was made from, for their map.
        original: What Grad-CAM is compared with: a model, or its name or path as `create_model` takes it; if not given,
            what the model was made of or, if that is not at hand, the same weights uncompressed.
        names: A text file with the names of the classes, one a line; those that the model says if not given.
        progress: Show a progress bar.

    Raises:
        PmvitError: If the model has no plan, an option is not one, or there is no image that can be read.
    """
    plan = planned(model)
    needs_images = isinstance(plan, AdaptivePlan) or set(what) != {"maps"}
    _check(what, formats, limit, needs_images and data is None, Path(output))
    check_scores(scores, model)
    wanted = range(plan.depth) if blocks is None else numbers_of_blocks(blocks, plan.depth, "blocks")
    chosen = [] if isinstance(plan, AdaptivePlan) else [block for block in blocks_of(model) if block.number in wanted]
    reference = reference_for(model, original) if "cam" in what or original is not None else None
    if reference is not None and host_of(reference.model).layouts() != host_of(model).layouts():
        raise PmvitError("original: expected a model with the same blocks and grids; got one with others")
    prepared, titles, made, folder = InputImages(model), class_names(model, names), Visualized(), Path(output)
    kinds: tuple[Format, ...] = ("png", "svg") if formats == "both" else (formats,)
    if "maps" in what and not isinstance(plan, AdaptivePlan):
        made.maps.extend(_save(draw_maps(model, chosen, scores), folder / "maps", kinds))
    samples = choose_samples(open_source(data), limit) if data is not None and needs_images else []
    opened = readable(samples, prepared.mode, made.broken)
    for number, sample, picture in track(opened, "visualize", len(samples), show=progress):
        pixels, name = prepared.prepare(picture), Path(sample.name).name
        stem = folder / numbered_stem(number, len(samples), sample.name)
        written: list[Path] = []
        if isinstance(plan, AdaptivePlan):
            chosen = [block for block in blocks_of(model, pixels) if block.number in wanted]
        for kind in dict.fromkeys(what):
            if kind == "blocks":
                figure = draw_blocks(model, chosen, pixels, name)
            elif kind == "cam" and reference is not None:
                figure = draw_cam(model, chosen, pixels, name, reference, titles)
            elif isinstance(plan, AdaptivePlan):
                figure = draw_maps(model, chosen, scores, f"{name}: ")
            else:
                continue
            written += _save(figure, stem.with_name(f"{stem.name}-{kind}"), kinds)
        made.images[sample.name] = written
    return made


def _check(what: Sequence[str], formats: str, limit: int, lacks_images: bool, output: Path) -> None:
    unknown = [each for each in what if each not in get_args(What)]
    if unknown or not what:
        got = repr(unknown[0]) if unknown else "none"
        raise PmvitError(f"what: expected some of {', '.join(get_args(What))}; got {got}")
    if formats not in get_args(Formats):
        raise PmvitError(f"formats: expected one of {', '.join(get_args(Formats))}; got {formats!r}")
    if limit < 1:
        raise PmvitError(f"limit: expected 1 or more, got {limit}")
    if lacks_images:
        raise PmvitError(
            "data: expected a folder or an image, without which there are only maps of a fixed plan; got none"
        )
    if output.is_file():
        raise PmvitError(f"expected a folder or a new name to write pictures to, got the file {output}")


def _save(figure: PixelFigure, stem: Path, kinds: Sequence[Format]) -> list[Path]:
    return [figure.save(stem.with_name(f"{stem.name}.{kind}"), kind) for kind in kinds]


def draw_blocks(model: nn.Module, blocks: Sequence[Block], pixels: Tensor, name: str) -> PixelFigure:
    """Fig. 5: for every block, the patches of a prepared image as it gets them, and as they are reconstructed."""
    images, reconstruct = InputImages(model), planned(model).reconstruct
    image = images.visible(pixels)
    shown = _photograph(image)
    merged, back = [], []
    for block in blocks:
        grid, layer = block.layout.drawn_grid, block.layer
        merged.append(Tile((shown, Layer(patches.merged_map(image, layer, grid)))))
        returned = patches.reconstructed(pixels, layer, grid, block.returns, reconstruct)
        back.append(Tile((shown if layer.is_identity else _photograph(images.visible(returned)),)))
    legends = {"bar": [(colour, STATES[state]) for state, colour in SHARES]}
    rows: Rows = {("tokens of", "the block"): merged, ("reconstructed",): back}
    return _draw(model, blocks, f"{name}: what each block keeps", [RECONSTRUCTED[reconstruct]], rows, legends, shown)


def draw_cam(
    model: nn.Module, blocks: Sequence[Block], pixels: Tensor, name: str, reference: Reference, names: Sequence[str]
) -> PixelFigure:
    """Fig. cam: for every block, the Grad-CAM of what the model is compared with and, below, its own."""
    image = InputImages(model).visible(pixels)
    shown, grey = _photograph(image), _photograph(image.mean(0, keepdim=True))
    original = explain(reference.model, pixels)
    explained = {reference.heading: original, "compressed": explain(model, pixels, original.target)}
    rows: Rows = {}
    for title, each in explained.items():
        tiles = []
        for block in blocks:
            values = each.maps[block.number]
            alike = None if each is original else agreement(original.maps[block.number], values)
            caption = () if alike is None else (f"cosine {alike:.2f}",)
            layers = () if values is None else (grey, Layer(heat(values), smooth=True))
            tiles.append(Tile(layers, caption if layers else NO_MAP))
        rows[tuple(title.split(", "))] = tiles
    target = "the whole output" if original.target is None else name_of(original.target, names)
    lines = [
        f"Grad-CAM of {target} on the patches that leave a block, each map from 0 to its {MOST:.0%} quantile; "
        "cosine: how alike both maps are",
        ";  ".join(
            f"{title}: {name_of(each.found, names)} ({each.confidence:.0%}{' of the image' if each.is_dense else ''})"
            for title, each in explained.items()
            if each.found is not None
        ),
    ]
    legends = {"speaks for it": _scale(HEAT, "nothing", "most")}
    return _draw(model, blocks, f"{name}: Grad-CAM of each block", lines, rows, legends, shown)


def draw_maps(model: nn.Module, blocks: Sequence[Block], scores: Scores | None, of: str = "") -> PixelFigure:
    """For every block, the score of each patch, its group, and how many patches became one token with it.

    The title begins with what the maps are of, if they are not of all images.
    """
    largest = max(max(patches.group_sizes(block.layer)) for block in blocks)
    marked, groups, counts = [], [], []
    for number, _, layout, layer, _ in blocks:
        if scores is not None:
            values = scores.of(number).tolist()
            span = f"{min(values):.1e} to {max(values):.1e}"
            marked.append(Tile((Layer(patches.value_map(values, layout.drawn_grid)),), (span,)))
        layers = [Layer(patches.group_map(layer, layout.drawn_grid))]
        if layout.windows is not None:
            regions = layout.windows.regions(layout.grid).flatten()[layout.windows.places(layout.grid)]
            layers.append(Layer(patches.borders(regions.tolist(), layout.drawn_grid)))
        several, most = sum(len(members) > 1 for members in layer.members()), max(patches.group_sizes(layer))
        groups.append(Tile(tuple(layers), (f"{several} groups, {layer.num_kept - several} alone",)))
        layers = [Layer(patches.size_map(layer, layout.drawn_grid, largest))]
        counts.append(Tile(tuple(layers), (f"up to {most}" if most > 1 else "1 each",)))
    steps = sorted({round(size) for size in np.geomspace(1, largest, min(largest, 5))})
    colours = zip(patches.size_colours(steps, largest).tolist(), steps, strict=True)
    alone, pruned = (NEUTRAL, "kept alone"), (patches.WHITE, "pruned")
    rows: Rows = {("group",): groups, ("token count", "patches each"): counts}
    legends: Legends = {
        "group": [alone, pruned, (None, "other colours: merged into the patch with the dot")],
        "token count": [pruned, *((tuple(colour[:3]), str(size)) for colour, size in colours)],
    }
    lines = []
    if scores is not None:
        rows = {("score",): marked, **rows}
        legends = {"score": _scale(patches.SEQUENTIAL, "low", "high"), **legends}
        lines.append(
            f"{scores.config.scorer} scores of {scores.images} images, from the lowest to the highest of each block"
        )
    legends = {"bar": [(colour, state) for state, colour in SHARES], **legends}
    if any(block.layout.windows is not None for block in blocks):
        lines.append("lines in the maps of groups are the borders of attention windows")
    return _draw(model, blocks, f"{of}scores, groups and tokens of each block", lines, rows, legends)


def _draw(
    model: nn.Module,
    blocks: Sequence[Block],
    title: str,
    lines: Sequence[str],
    rows: Rows,
    legends: Legends,
    shown: Layer | None = None,
) -> PixelFigure:
    """Rows of tiles under a title and a line that says which model it is and what was done to it."""
    plan, size = planned(model), tile_size(block.layout.drawn_grid for block in blocks)
    merges = plan.merges if isinstance(plan, AdaptivePlan) else None
    grids = sizes([layout.grid for layout in host_of(model).layouts()])
    about = (
        f"{type(model).__name__}, {plan.depth} blocks of {grids} patches; {plan.keep:.0%} of the patch tokens kept"
        f"{', which the image chooses' if merges is not None else ''}, reconstruct {plan.reconstruct}"
    )
    headings = []
    for number, _, _, layer, _ in blocks:
        kept = f"all {layer.num_tokens}" if layer.is_identity else f"{layer.num_kept} of {layer.num_tokens}"
        words = "not compressed" if layer.is_identity else f"{layer.num_merged} merged, {layer.num_pruned} pruned"
        words = words if layer.mlp is None else f"{layer.mlp.num_kept} in the MLP"
        if merges is not None and not layer.is_identity:
            words = f"{layer.num_merged} merged, {merges[number]} of them here"
        counts = (layer.num_kept, layer.num_merged, layer.num_pruned)
        headings.append(Heading(f"block {number}: {kept} kept", words, counts))
    made = [Row(tiles, size, name) for name, tiles in rows.items()]
    return draw_tiles(headings, made, legends, title=title, lines=[about, *lines], photograph=shown)


def _photograph(image: Tensor) -> Layer:
    """A photograph to draw; one that is much smaller than its tile keeps its pixels sharp."""
    return Layer(photograph(image), smooth=max(image.shape[1:]) > TILE // 2)


def _scale(colour_map: str, low: str, high: str) -> list[tuple[Colour | None, str]]:
    colours = patches.coloured(np.linspace(0, 1, 5), colour_map)[:, :3].tolist()
    return [(tuple(colour), words) for colour, words in zip(colours, (low, "", "", "", high), strict=True)]
