"""`visualize`: what each block of a compressed model keeps, where it looks, and its plan as maps, as PNG and SVG."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from torch import nn

from pmvit.compression import decompress
from pmvit.data.choice import choose_samples
from pmvit.data.folder import Broken, color_mode, evaluation_transform
from pmvit.data.sources import BROKEN_IMAGE, Sample
from pmvit.errors import PmvitError
from pmvit.hosts import host_of
from pmvit.measuring import Scores
from pmvit.methods.base import numbers_of_blocks
from pmvit.progress import Bar
from pmvit.reporting.bands import tile_size
from pmvit.reporting.blocks import Block, blocks_of, check_scores, planned
from pmvit.reporting.cam import explain
from pmvit.reporting.canvas import Canvas, Format, numbered_stem
from pmvit.reporting.segmentation import read_names
from pmvit.reporting.sheets import Photo, about, blocks_sheet, cam_sheet, maps_sheet

What = Literal["blocks", "cam", "maps"]
Formats = Literal["png", "svg", "both"]


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
        original: What Grad-CAM is compared with; the same weights, uncompressed, if not given.
        names: A text file with the names of the classes, one a line.
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
    samples = choose_samples(images, limit) if images is not None and set(what) != {"maps"} else []
    made = Visualized()
    with Bar("visualize", len(samples) + ("maps" in what), show=progress) as bar:
        if "maps" in what:
            made.maps.extend(_save(drawing.maps(scores), Path(output) / "maps", kinds))
            bar.advance()
        for number, sample in enumerate(samples):
            stem = numbered_stem(number, len(samples), sample.name)
            try:
                photo = drawing.photo(sample)
            except BROKEN_IMAGE as error:
                made.broken.files[sample.name] = f"{type(error).__name__}: {error}"
            else:
                sheets = {kind: drawing.sheet(kind, photo) for kind in what if kind != "maps"}
                made.images[sample.name] = [
                    path
                    for kind, sheet in sheets.items()
                    for path in _save(sheet, Path(output) / f"{stem}-{kind}", kinds)
                ]
            bar.advance()
    if samples and not made.images:
        name, reason = next(iter(made.broken.files.items()))
        raise PmvitError(f"expected an image that can be read, got none: {name} ({reason})")
    return made


class _Drawing:
    """A model and all that its sheets have in common."""

    def __init__(
        self, model: nn.Module, original: nn.Module | None, blocks: Sequence[Block], names: str | Path | None
    ) -> None:
        host = host_of(model)
        self.model, self.blocks = model, blocks
        self.plan = planned(model)
        self.same_weights, self.title = original is None, about(model)
        self._original = original
        self.config = host.data_config()
        self.mode, self.transform = color_mode(self.config), evaluation_transform(self.config)
        self.size = tile_size(*host.input_size()[1:])
        classes = host.outputs().num_classes or host.outputs().pixel_classes or 0
        self.names = () if names is None else read_names(Path(names), classes)
        if original is not None and host_of(original).layouts() != host.layouts():
            raise PmvitError("original: expected a model with the same blocks and grids; got one with others")

    @property
    def original(self) -> nn.Module:
        if self._original is None:
            self._original = decompress(copy.deepcopy(self.model))
        return self._original

    def photo(self, sample: Sample) -> Photo:
        """Decode and prepare an image; raises what Pillow raises if it is broken."""
        return Photo(sample.name, self.transform(sample.open(self.mode)), self.config["mean"], self.config["std"])

    def maps(self, scores: Scores | None) -> Canvas:
        return maps_sheet(self.blocks, scores, self.title, self.size)

    def sheet(self, kind: What, photo: Photo) -> Canvas:
        """What is seen of one image."""
        if kind == "blocks":
            return blocks_sheet(photo, self.blocks, self.plan.reconstruct, self.title)
        first = explain(self.original, photo.pixels)
        second = explain(self.model, photo.pixels, first.target)
        explained = {"original, same weights" if self.same_weights else "original": first, "compressed": second}
        return cam_sheet(photo, self.blocks, explained, self.title, self.names)


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


def _save(sheet: Canvas, stem: Path, kinds: Sequence[Format]) -> list[Path]:
    return [sheet.save(stem.with_name(f"{stem.name}.{kind}"), kind) for kind in kinds]
