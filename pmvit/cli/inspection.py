"""Look at a model: `evaluate`, pictures (`segment`, `visualize`), pages (`report`, `serve`); and `demo`, all of it."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from pmvit.cli import options as opt
from pmvit.cli.common import open_images, open_model, warn_of
from pmvit.cli.screen import console
from pmvit.errors import PmvitError

if TYPE_CHECKING:
    from pmvit.evaluation.validation import AnyEvaluation
    from pmvit.reporting.pictures.visualize import Formats, What

MORE = {  # of evaluations than `MEASURES` has: what it is called, and how it is written
    "top1_error": ("  standard error", ".2%"),
    "gflops": ("GFLOPs a window (MACs)", ".3f"),
    "windows": ("windows an image", ".2f"),
    "fps": ("images a second", ".1f"),
}


@opt.verb
def evaluate(
    model: opt.ModelName,
    data: opt.Data,
    reading: opt.Reading,
    making: opt.Making,
    limit: opt.Limit = None,
    device: opt.Device = "cpu",
    strict: Annotated[bool, typer.Option("--strict", help="A broken image is an error.")] = False,
    stride: Annotated[int | None, typer.Option(min=1, help="With a segmenter: from one window to the next.")] = None,
    original: opt.Original = None,
) -> dict[str, Any]:
    """Measure accuracy; agreement with the original, if the model is compressed; mIoU of a segmenter."""
    import pmvit
    from pmvit.compression import compression_of
    from pmvit.evaluation.reference import reference_for
    from pmvit.evaluation.segmentation import evaluate_segmentation, labels_pixels
    from pmvit.numbers.measures import REFERENCES

    network = open_model(model, making, device)
    loader = open_images(network, data, reading, limit, strict=strict)
    if compression_of(network) is None and original is not None:
        raise PmvitError(f"--original is for compressed models; {model} is not compressed")
    reference = reference_for(network, original) if compression_of(network) is not None else None
    result: AnyEvaluation
    if labels_pixels(network):
        size = opt.ReadingOptions(**reading).batch_size
        result = evaluate_segmentation(network, loader, reference=reference, stride=stride, batch_size=size)
    elif stride is not None:
        raise PmvitError(f"--stride: expected for models that label pixels; {model} does not")
    else:
        result = pmvit.evaluate(network, loader, reference=reference)
    found = asdict(result)
    own, compared = _rows(found)
    if result.reference is not None:
        own.append(("compared with", REFERENCES[result.reference]))
    console.table((f"{result.images} images", model), [*own, *compared])
    warn_of(loader.broken)
    return {**found, "broken_files": loader.broken}


def _rows(found: dict[str, Any]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """What was measured of a model, and beside its reference, as rows of a table."""
    from pmvit.numbers.measures import MEASURES
    from pmvit.numbers.tables import format_number

    own, compared = [], []
    for name, value in sorted(found.items(), key=lambda item: not item[0].startswith("reference_")):
        plain = name.removeprefix("reference_")
        if name == "class_iou":
            known = [(index, iou) for index, iou in enumerate(value or ()) if iou is not None]
            own += [(f"  IoU of class {index}", format_number(iou, ".2%")) for index, iou in known]
        elif value is not None and plain in (*MEASURES, *MORE):
            title, form = MORE.get(plain) or (MEASURES[plain].title, ".2%" if MEASURES[plain].is_share else ".4f")
            if plain != name or name in ("agreement", "kl", "cosine"):
                compared.append((f"  {title}" if plain == name else f"  its {title}", format_number(value, form)))
            else:
                own.append((title, format_number(value, form)))
    return own, compared


@opt.verb
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
) -> dict[str, Any]:
    """Draw what a segmenter finds: input, ground truth, original, compressed and difference side by side."""
    import pmvit
    from pmvit.numbers.tables import format_number

    made = pmvit.segment(
        pmvit.load(model, device=device),
        data,
        original=original,
        limit=limit,
        names=names,
        stride=stride,
        first_label=first_label,
        batch_size=batch_size,
    )
    sheet, *pictures = made.save(output)
    measures = ("agreement", "original_miou", "compressed_miou")
    rows: list[dict[str, Any]] = [
        {"image": image.name, "picture": path, **{name: getattr(image, name) for name in measures}}
        for image, path in zip(made.images, pictures, strict=True)
    ]
    cells = [(row["picture"].name, *(format_number(row[name], ".1%") for name in measures)) for row in rows]
    console.table(("picture", "agreement", "mIoU", "compressed"), cells)
    warn_of(made.broken)
    console.print(f"all of them on one sheet: {sheet}")
    return {"sheet": sheet, "images": rows, "broken_files": made.broken}


@opt.verb
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
) -> dict[str, Any]:
    """Draw what each block keeps, merges and prunes of images, where it looks (Grad-CAM), and maps of its plan."""
    import pmvit
    from pmvit.measuring import Scores
    from pmvit.pipeline import measured_file
    from pmvit.reporting.blocks import planned

    network, beside = pmvit.load(model, device=device), measured_file(model, "scored")
    found = scores or (beside if beside.is_file() else None)
    made = pmvit.visualize(
        network,
        data,
        output,
        what=cast("list[What]", what.split(",")),
        blocks=None if blocks is None else opt.whole_numbers("--blocks", [blocks]),
        limit=limit,
        formats=cast("Formats", formats),
        scores=None if found is None else Scores.load(found),
        original=original,
        names=names,
    )
    for path in (*made.maps, *(path for paths in made.images.values() for path in paths)):
        console.print(str(path), soft_wrap=True)
    if made.maps and found is None and "scores" in planned(network).made_by:
        console.warn("no scores lie with the model: pass --scores to have their maps")
    warn_of(made.broken)
    return {"maps": made.maps, "images": made.images, "broken_files": made.broken}


@opt.verb
def report(
    model: opt.Saved,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The HTML file; report.html beside a saved model, or here, if left out."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data", help=f"Images to measure on and to show; demo for built-in ones. {opt.DATA_HELP} {opt.MASKS_HELP}"
        ),
    ] = None,
    original: opt.Original = None,
    limit: opt.Limit = None,
    names: opt.Names = None,
    evaluation: Annotated[Path | None, typer.Option(help="What `pmvit evaluate --json` printed.")] = None,
    benchmark: Annotated[Path | None, typer.Option(help="benchmark.json of `pmvit benchmark -o`.")] = None,
    comparison: Annotated[Path | None, typer.Option(help="comparison.json of `pmvit compare`.")] = None,
    workers: opt.Workers = 2,
    memory: Annotated[bool, typer.Option("--memory/--no-memory", help="Measure peak memory too.")] = True,
    device: opt.Device = "cpu",
) -> dict[str, Any]:
    """Write one HTML file about a compressed model: numbers, blocks to look into, curves, commands."""
    import pmvit
    from pmvit.saving.hub import is_hub_name

    beside = model / "report.html" if model.is_dir() else model.with_suffix(".html")
    written = pmvit.report(
        model,
        output or (Path("report.html") if is_hub_name(model) else beside),
        data=data,
        original=original,
        limit=limit,
        names=names,
        evaluation=evaluation,
        benchmark=benchmark,
        comparison=comparison,
        workers=workers,
        memory=memory,
        device=device,
    )
    console.print(f"report: {written} ({written.stat().st_size / 1e6:.1f} MB)")
    return {"report": written, "bytes": written.stat().st_size}


@opt.verb
def serve(
    model: opt.Saved,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 for any that is free.")] = 8000,
    original: opt.Original = None,
    names: opt.Names = None,
    device: opt.Device = "cpu",
    max_megabytes: Annotated[float, typer.Option(help="Largest file that is taken.")] = 16.0,
    max_megapixels: Annotated[float, typer.Option(help="Largest image that is taken.")] = 50.0,
) -> None:
    """Start a page on this machine where one drops an image and sees what the model and its original say."""
    import pmvit
    from pmvit.reporting.serve.uploads import Limits

    limits = Limits(max_megabytes, max_megapixels)
    pmvit.serve(model, port=port, original=original, names=names, limits=limits, say=console.print, device=device)


@opt.verb
def demo(output: opt.Output = Path("demo-output")) -> dict[str, Any]:
    """Compress the built-in ViT; print accuracy and speed before and after, write a picture and a report."""
    from pmvit.cli.demo_run import run

    return run(output, console.rich)
