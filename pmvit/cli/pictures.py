"""Pictures of what a model does: `segment`, `visualize`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from pmvit.cli import options as opt
from pmvit.cli.common import app, print_broken
from pmvit.cli.screen import console, print_json
from pmvit.config import ScoreConfig

if TYPE_CHECKING:
    from pmvit.reporting.pictures.visualize import Formats, What


@app.command()
def segment(
    model: opt.Saved,
    data: opt.Data,
    output: opt.Output,
    limit: opt.SomeImages = 8,
    original: opt.Original = None,
    names: opt.Names = None,
    stride: Annotated[int | None, typer.Option(min=1, help="Pixels from one window to the next.")] = None,
    first_label: opt.FirstLabel = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows that run at a time.")] = 8,
    device: opt.Device = "cpu",
    as_json: opt.AsJson = False,
) -> None:
    """Draw what a segmenter finds: input, ground truth, original, compressed and difference side by side."""
    import pmvit

    made = pmvit.segment(
        pmvit.load(model, device=device),
        data,
        original=None if original is None else pmvit.load(original, device=device),
        images=limit,
        names=names,
        stride=stride,
        first_label=first_label,
        batch_size=batch_size,
    )
    sheet, *pictures = made.save(output)
    measures = [(image.agreement, image.original_miou, image.compressed_miou) for image in made.images]
    if as_json:
        titles = ("agreement", "original_miou", "compressed_miou")
        rows = [
            {"image": image.name, "picture": str(path), **dict(zip(titles, values, strict=True))}
            for image, path, values in zip(made.images, pictures, measures, strict=True)
        ]
        print_json({"sheet": str(sheet), "images": rows, "broken_files": made.broken.files})
        return
    from pmvit.numbers.tables import format_number

    cells = [
        (path.name, *(format_number(value, ".1%") for value in values))
        for path, values in zip(pictures, measures, strict=True)
    ]
    console.table(("picture", "agreement", "mIoU", "compressed"), cells)
    print_broken(made.broken)
    console.print(f"all of them on one sheet: {sheet}")


@app.command()
def visualize(
    model: opt.Saved,
    output: opt.Output,
    data: opt.MaybeData = None,
    what: Annotated[str, typer.Option(help="Some of blocks, cam and maps.")] = "blocks,cam,maps",
    blocks: Annotated[
        str | None, typer.Option(help="Numbers of blocks, as in 0,5,-1; all of them if not given.")
    ] = None,
    limit: opt.SomeImages = 8,
    formats: Annotated[str, typer.Option("--format", help="png, svg or both.")] = "both",
    scores: Annotated[
        Path | None, typer.Option(help="Scores for their map; if not given, those that `compress` left with the model.")
    ] = None,
    original: opt.Original = None,
    names: opt.Names = None,
    device: opt.Device = "cpu",
    as_json: opt.AsJson = False,
) -> None:
    """Draw what each block keeps, merges and prunes of images, where it looks (Grad-CAM), and maps of its plan."""
    import pmvit
    from pmvit.pipeline import measured_file

    beside = measured_file(model, ScoreConfig())
    found = scores or (beside if beside.is_file() else None)
    made = pmvit.visualize(
        pmvit.load(model, device=device),
        data,
        output,
        what=cast("list[What]", what.split(",")),
        blocks=None if blocks is None else opt.whole_numbers("--blocks", [blocks]),
        limit=limit,
        formats=cast("Formats", formats),
        scores=None if found is None else pmvit.Scores.load(found),
        original=None if original is None else pmvit.load(original, device=device),
        names=names,
    )
    if as_json:
        pictures = {name: [str(path) for path in paths] for name, paths in made.images.items()}
        print_json({"maps": [str(p) for p in made.maps], "images": pictures, "broken_files": made.broken.files})
        return
    for path in (*made.maps, *(path for paths in made.images.values() for path in paths)):
        console.print(str(path), soft_wrap=True)
    if made.maps and found is None:
        console.print("no scores lie with the model: pass --scores to have their maps", style="yellow")
    print_broken(made.broken)
