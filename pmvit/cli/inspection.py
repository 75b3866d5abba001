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
    from pmvit.data.folder import FolderLoader
    from pmvit.evaluation.segmentation import SegmentationEvaluation
    from pmvit.evaluation.validation import AnyEvaluation


@app.command()
@opt.with_options(opt.Reading)
def evaluate(
    model: opt.Saved,
    data: opt.Data,
    limit: opt.Limit = None,
    device: opt.Device = "cpu",
    strict: Annotated[bool, typer.Option("--strict", help="A broken image is an error.")] = False,
    stride: Annotated[int | None, typer.Option(min=1, help="With a segmenter: from one window to the next.")] = None,
    as_json: opt.AsJson = False,
    **options: Any,
) -> None:
    """Measure accuracy, and agreement with the same weights uncompressed; mIoU of a segmenter."""
    import copy

    import pmvit
    from pmvit.compression import compression_of
    from pmvit.evaluation.segmentation import evaluate_segmentation
    from pmvit.hosts import host_of

    reading = opt.made(opt.Reading, options)
    network = pmvit.load(model, device=device)
    loader = open_images(network, data, reading, limit, strict=strict)
    original = pmvit.decompress(copy.deepcopy(network)) if compression_of(network) is not None else None
    if host_of(network).outputs().pixel_classes is not None:
        found = evaluate_segmentation(network, loader, reference=original, stride=stride, batch_size=reading.batch_size)
        _show_segmentation(found, loader, model, as_json)
        return
    if stride is not None:
        raise PmvitError(f"--stride: expected for models that label pixels; {model} does not")
    result = pmvit.evaluate(network, loader, reference=original)
    rows = {
        "top-1": (result.top1, "{:.2%}"),
        "  standard error": (result.top1_error, "{:.2%}"),
        "top-5": (result.top5, "{:.2%}"),
        "cross-entropy": (result.cross_entropy, "{:.4f}"),
        "top-1 uncompressed": (result.reference_top1, "{:.2%}"),
        "agreement with it": (result.agreement, "{:.2%}"),
        "KL from it": (result.kl, "{:.4f}"),
        "cosine to it": (result.cosine, "{:.4f}"),
    }
    _show(result, rows, loader, model, as_json)


def _show_segmentation(result: "SegmentationEvaluation", loader: "FolderLoader", model: Path, as_json: bool) -> None:
    rows = {
        "mIoU": (result.miou, "{:.2%}"),
        "pixel accuracy": (result.pixel_accuracy, "{:.2%}"),
        **{f"  IoU of class {i}": (value, "{:.2%}") for i, value in enumerate(result.class_iou or ())},
        "mIoU uncompressed": (result.reference_miou, "{:.2%}"),
        "pixel accuracy uncompressed": (result.reference_pixel_accuracy, "{:.2%}"),
        "agreement with it": (result.agreement, "{:.2%}"),
        "GFLOPs a window (MACs)": (result.gflops, "{:.3f}"),
        "GFLOPs uncompressed": (result.reference_gflops, "{:.3f}"),
        "windows an image": (result.windows, "{:.2f}"),
        "images a second": (result.fps, "{:.1f}"),
        "images a second uncompressed": (result.reference_fps, "{:.1f}"),
    }
    _show(result, rows, loader, model, as_json)


def _show(
    result: "AnyEvaluation",
    rows: dict[str, tuple[float | None, str]],
    loader: "FolderLoader",
    model: Path,
    as_json: bool,
) -> None:
    """What was measured, as JSON or as a table of those rows that have a number; and what could not be read."""
    if as_json:
        print_json({**asdict(result), "broken_files": loader.broken.files})
        return
    cells = [(name, form.format(value)) for name, (value, form) in rows.items() if value is not None]
    console.table((f"{result.images} images", str(model)), cells)
    print_broken(loader.broken)


@app.command()
def demo(output: opt.Output = Path("demo-output"), as_json: opt.AsJson = False) -> None:
    """Compress the built-in ViT; print accuracy and speed before and after, write a picture and a report."""
    from pmvit.cli.demo_run import run
    from pmvit.commands import remember_command

    remember_command(output)
    results = run(output, console.rich)
    if as_json:
        print_json(results)
