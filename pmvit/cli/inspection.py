"""How good a model is: `evaluate`; and `demo`, which shows all of it."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pmvit.cli import options as opt
from pmvit.cli.common import app, open_images, print_broken
from pmvit.cli.screen import console, print_json
from pmvit.errors import PmvitError

if TYPE_CHECKING:
    from pmvit.data.loaders import ImageLoader
    from pmvit.evaluation.segmentation import SegmentationEvaluation
    from pmvit.evaluation.validation import AnyEvaluation


Rows = dict[str, tuple[float | None, str]]  # what was measured by its title, and how it is written


@app.command()
@opt.with_options(opt.Reading)
def evaluate(
    model: opt.Saved,
    data: opt.Data,
    limit: opt.Limit = None,
    device: opt.Device = "cpu",
    strict: Annotated[bool, typer.Option("--strict", help="A broken image is an error.")] = False,
    stride: Annotated[int | None, typer.Option(min=1, help="With a segmenter: from one window to the next.")] = None,
    original: opt.Original = None,
    as_json: opt.AsJson = False,
    **options: Any,
) -> None:
    """Measure accuracy, and agreement with the original; mIoU of a segmenter."""
    import pmvit
    from pmvit.compression import compression_of
    from pmvit.evaluation.reference import reference_for
    from pmvit.evaluation.segmentation import evaluate_segmentation
    from pmvit.hosts import host_of

    reading = opt.made(opt.Reading, options)
    network = pmvit.load(model, device=device)
    loader = open_images(network, data, reading, limit, strict=strict)
    if compression_of(network) is None and original is not None:
        raise PmvitError(f"--original is for compressed models; {model} is not compressed")
    reference = reference_for(network, original) if compression_of(network) is not None else None
    if host_of(network).outputs().pixel_classes is not None:
        found = evaluate_segmentation(
            network, loader, reference=reference, stride=stride, batch_size=reading.batch_size
        )
        _show_segmentation(found, loader, model, as_json)
        return
    if stride is not None:
        raise PmvitError(f"--stride: expected for models that label pixels; {model} does not")
    result = pmvit.evaluate(network, loader, reference=reference)
    own: Rows = {
        "top-1": (result.top1, ".2%"),
        "  standard error": (result.top1_error, ".2%"),
        "top-5": (result.top5, ".2%"),
        "cross-entropy": (result.cross_entropy, ".4f"),
    }
    compared: Rows = {
        "  its top-1": (result.reference_top1, ".2%"),
        "  agreement": (result.agreement, ".2%"),
        "  KL": (result.kl, ".4f"),
        "  cosine": (result.cosine, ".4f"),
    }
    _show(result, own, compared, loader, model, as_json)


def _show_segmentation(result: "SegmentationEvaluation", loader: "ImageLoader", model: Path, as_json: bool) -> None:
    own: Rows = {
        "mIoU": (result.miou, ".2%"),
        "pixel accuracy": (result.pixel_accuracy, ".2%"),
        **{f"  IoU of class {i}": (value, ".2%") for i, value in enumerate(result.class_iou or ())},
        "GFLOPs a window (MACs)": (result.gflops, ".3f"),
        "windows an image": (result.windows, ".2f"),
        "images a second": (result.fps, ".1f"),
    }
    compared: Rows = {
        "  its mIoU": (result.reference_miou, ".2%"),
        "  its pixel accuracy": (result.reference_pixel_accuracy, ".2%"),
        "  agreement": (result.agreement, ".2%"),
        "  its GFLOPs a window": (result.reference_gflops, ".3f"),
        "  its images a second": (result.reference_fps, ".1f"),
    }
    _show(result, own, compared, loader, model, as_json)


def _show(
    result: "AnyEvaluation", own: Rows, compared: Rows, loader: "ImageLoader", model: Path, as_json: bool
) -> None:
    """What was measured, as JSON or as a table of those rows that have a number; and what could not be read."""
    from pmvit.evaluation.reference import TITLES
    from pmvit.numbers.tables import format_number

    if as_json:
        print_json({**asdict(result), "broken_files": loader.broken.files})
        return
    parts = [
        [(name, format_number(value, form)) for name, (value, form) in rows.items() if value is not None]
        for rows in (own, compared)
    ]
    title = [] if result.reference is None else [("compared with", TITLES[result.reference])]
    console.table((f"{result.images} images", str(model)), [*parts[0], *title, *parts[1]])
    print_broken(loader.broken)


@app.command()
def demo(output: opt.Output = Path("demo-output"), as_json: opt.AsJson = False) -> None:
    """Compress the built-in ViT; print accuracy and speed before and after, write a picture and a report."""
    from pmvit.cli.demo_run import run
    from pmvit.saving.commands import remember_command

    remember_command(output)
    results = run(output, console.rich)
    if as_json:
        print_json(results)
