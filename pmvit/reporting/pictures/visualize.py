"""`visualize`: what each block of a compressed model keeps, its Grad-CAM, and its plan as maps, as PNG and SVG."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

from torch import nn

from pmvit.data.loaders import Broken
from pmvit.data.sources import choose_samples, open_source
from pmvit.errors import PmvitError
from pmvit.evaluation.reference import Reference, reference_for
from pmvit.hosts import host_of
from pmvit.measuring import Scores
from pmvit.methods.base import numbers_of_blocks
from pmvit.progress import track
from pmvit.reporting.blocks import Block, blocks_of, check_scores, planned
from pmvit.reporting.class_names import class_names
from pmvit.reporting.images import InputImages, readable
from pmvit.reporting.pictures.block_figures import Photo, describe_model, draw_blocks, draw_cam, draw_maps
from pmvit.reporting.pictures.cam import explain
from pmvit.reporting.pictures.figure import Format, PixelFigure, numbered_stem

What = Literal["blocks", "cam", "maps"]
Formats = Literal["png", "svg", "both"]
REFERENCES = {"original": "original", "uncompressed": "uncompressed, same weights", "other": "other model"}


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
    images: str | Path | None,
    output: str | Path,
    *,
    what: Sequence[What] = get_args(What),
    blocks: Sequence[int] | None = None,
    limit: int = 8,
    formats: Formats = "both",
    scores: Scores | None = None,
    original: nn.Module | None = None,
    names: str | Path | None = None,
    progress: bool = True,
) -> Visualized:
    """Draw what compression does to images, block by block.

    Args:
        model: What `compress` or `load` returned.
        images: A folder of images or whatever else `open_source` knows, or an image file. Maps alone need none.
        output: The folder to write to.
        what: `blocks`: for each image, kept patches as they are, merged ones in the colour of their group, pruned ones
            white, and what is reconstructed (Fig. 5). `cam`: Grad-CAM of the original and of the compressed model.
            `maps`: of scores, groups and token counts, which are the same for all images.
        blocks: Which blocks, negative numbers from the last; all if not given.
        limit: How many images, taken evenly from all there are.
        formats: `png`, `svg` or `both`.
        scores: Those the plan was made from, for their map.
        original: What Grad-CAM is compared with; if not given, what the model was made of or, if that is not at hand,
            the same weights uncompressed.
        names: A text file with the names of the classes, one a line; those that the model says if not given.
        progress: Show a progress bar.

    Raises:
        PmvitError: If the model has no plan, an option is not one, or there is no image that can be read.
    """
    _check(what, formats, limit, images, Path(output))
    blocks_there = blocks_of(model)
    if scores is not None:
        check_scores(scores, [block.layout.grid for block in blocks_there])
    if blocks is not None:
        wanted = numbers_of_blocks(blocks, len(blocks_there), "blocks")
        blocks_there = [block for block in blocks_there if block.number in wanted]
    kinds: tuple[Format, ...] = ("png", "svg") if formats == "both" else (formats,)
    drawing = _Drawing(model, original, blocks_there, names)
    samples = choose_samples(open_source(images), limit) if images is not None and set(what) != {"maps"} else []
    made, folder = Visualized(), Path(output)
    if "maps" in what:
        made.maps.extend(_save(draw_maps(blocks_there, scores, drawing.title), folder / "maps", kinds))
    opened = readable(samples, drawing.images.mode, made.broken)
    for number, sample, picture in track(opened, "visualize", len(samples), show=progress):
        photo = Photo(sample.name, drawing.images.prepare(picture), drawing.images)
        stem = numbered_stem(number, len(samples), sample.name)
        figures = {kind: drawing.draw(kind, photo) for kind in what if kind != "maps"}
        written = [_save(figure, folder / f"{stem}-{kind}", kinds) for kind, figure in figures.items()]
        made.images[sample.name] = [path for paths in written for path in paths]
    return made


class _Drawing:
    """A model and all that its figures have in common."""

    def __init__(
        self, model: nn.Module, original: nn.Module | None, blocks: Sequence[Block], names: str | Path | None
    ) -> None:
        self.model, self.blocks, self.images = model, blocks, InputImages(model)
        self.plan, self.title = planned(model), describe_model(model)
        self._original, self.names = original, class_names(model, names)
        if original is not None and host_of(original).layouts() != host_of(model).layouts():
            raise PmvitError("original: expected a model with the same blocks and grids; got one with others")

    @cached_property
    def reference(self) -> Reference:
        return reference_for(self.model, self._original)

    def draw(self, kind: What, photo: Photo) -> PixelFigure:
        """The figure of a kind for one image."""
        if kind == "blocks":
            return draw_blocks(photo, self.blocks, self.plan.reconstruct, self.title)
        first = explain(self.reference.model, photo.pixels)
        second = explain(self.model, photo.pixels, first.target)
        explained = {REFERENCES[self.reference.name]: first, "compressed": second}
        return draw_cam(photo, self.blocks, explained, self.title, self.names)


def _check(what: Sequence[str], formats: str, limit: int, images: str | Path | None, output: Path) -> None:
    if unknown := [each for each in what if each not in get_args(What)]:
        raise PmvitError(f"what: expected some of {', '.join(get_args(What))}; got {unknown[0]!r}")
    if not what:
        raise PmvitError(f"what: expected some of {', '.join(get_args(What))}; got none")
    if formats not in get_args(Formats):
        raise PmvitError(f"formats: expected one of {', '.join(get_args(Formats))}; got {formats!r}")
    if limit < 1:
        raise PmvitError(f"limit: expected 1 or more, got {limit}")
    if images is None and set(what) != {"maps"}:
        raise PmvitError("images: expected a folder or an image, without which there are only maps; got none")
    if output.is_file():
        raise PmvitError(f"expected a folder or a new name to write pictures to, got the file {output}")


def _save(figure: PixelFigure, stem: Path, kinds: Sequence[Format]) -> list[Path]:
    return [figure.save(stem.with_name(f"{stem.name}.{kind}"), kind) for kind in kinds]
