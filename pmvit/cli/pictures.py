"""Pictures of what a model does: `segment`."""

from pathlib import Path
from typing import Annotated

import typer

from pmvit.cli.common import app, console, print_json
from pmvit.cli.options import AsJson, Data, Device, FirstLabel, Output, Saved


@app.command()
def segment(
    model: Saved,
    data: Data,
    output: Output,
    images: Annotated[int, typer.Option(min=1, help="How many images, taken evenly from all there are.")] = 8,
    original: Annotated[
        Path | None, typer.Option(help="A saved model to compare with; else the same weights, uncompressed.")
    ] = None,
    names: Annotated[Path | None, typer.Option(help="A text file with the names of the classes, one a line.")] = None,
    stride: Annotated[int | None, typer.Option(min=1, help="Pixels from one window to the next.")] = None,
    first_label: FirstLabel = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows that run at a time.")] = 8,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Draw what a segmenter finds: input, ground truth, original, compressed and difference side by side."""
    import pmvit

    made = pmvit.segment(
        pmvit.load(model, device=device),
        data,
        original=None if original is None else pmvit.load(original, device=device),
        images=images,
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
    cells = [
        (path.name, *("-" if value is None else f"{value:.1%}" for value in values))
        for path, values in zip(pictures, measures, strict=True)
    ]
    console.table(("picture", "agreement", "mIoU", "compressed"), cells)
    if made.broken:
        console.print(made.broken.summary(), style="yellow")
    console.print(f"all of them on one sheet: {sheet}")
