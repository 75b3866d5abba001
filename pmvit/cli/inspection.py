"""Look at a model: `info`, `evaluate`, `demo`."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pmvit.cli.common import app, blocks_of, console, print_info, print_json
from pmvit.cli.methods import print_method
from pmvit.cli.options import AsJson, BatchSize, Data, Device, FirstLabel, Original, Output, Saved, Workers
from pmvit.errors import PmvitError

if TYPE_CHECKING:
    from pmvit.data.loaders import ImageLoader
    from pmvit.evaluation.segmentation import SegmentationEvaluation
    from pmvit.evaluation.validation import AnyEvaluation


Rows = dict[str, tuple[float | None, str]]  # what was measured by its title, and how it is written


@app.command()
def info(
    model: Saved,
    draw: Annotated[bool, typer.Option("--draw", help="Draw what each block keeps, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a saved model keeps in each block, and what it costs before and after."""
    import pmvit
    from pmvit.compression import compression_of
    from pmvit.methods import Method

    network = pmvit.load(model)
    after = pmvit.flops(network)
    compression = compression_of(network)
    if compression is None:
        raise PmvitError(f"{model} is not compressed: it has {after.gflops:.3f} GFLOPs and nothing merged or pruned")
    before = pmvit.flops(pmvit.decompress(network))
    made: Any = compression.what
    is_method = isinstance(made, Method)
    if as_json:
        told = {"method": made.describe()} if is_method else {"blocks": blocks_of(made)}
        print_json({**told, "original": asdict(before), "compressed": asdict(after)})
        return
    if is_method:
        print_method(made, before, after)
        return
    print_info(made, before, after)
    if draw:
        console.print(made.draw(console.width))


@app.command()
def evaluate(
    model: Saved,
    data: Data,
    batch_size: BatchSize = 64,
    workers: Workers = 2,
    device: Device = "cpu",
    strict: Annotated[bool, typer.Option("--strict", help="A broken image is an error.")] = False,
    stride: Annotated[int | None, typer.Option(min=1, help="With a segmenter: from one window to the next.")] = None,
    first_label: FirstLabel = None,
    original: Original = None,
    as_json: AsJson = False,
) -> None:
    """Measure accuracy, and agreement with the original; mIoU of a segmenter."""
    import pmvit
    from pmvit.compression import compression_of
    from pmvit.data.segmentation import has_masks
    from pmvit.evaluation.reference import reference_for
    from pmvit.hosts import host_of
    from pmvit.loading import open_loader

    network = pmvit.load(model, device=device)
    if compression_of(network) is None and original is not None:
        raise PmvitError(f"--original is for compressed models; {model} is not compressed")
    reference = reference_for(network, original) if compression_of(network) is not None else None
    if host_of(network).outputs().pixel_classes is not None:
        reading: dict[str, Any] = {"workers": workers, "strict": strict, "split": "val", "first_label": first_label}
        masks = open_loader(network, data, labels=has_masks(data), whole=has_masks(data), **reading)
        found = pmvit.evaluate_segmentation(network, masks, reference=reference, stride=stride, batch_size=batch_size)
        _show_segmentation(found, masks, model, as_json)
        return
    if stride is not None or first_label is not None:
        raise PmvitError(f"stride and first_label are for models that label pixels; {model} does not")
    loader = open_loader(network, data, batch_size=batch_size, workers=workers, strict=strict)
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
    from pmvit.evaluation.tables import format_number

    if as_json:
        print_json({**asdict(result), "broken_files": loader.broken.files})
        return
    parts = [
        [(name, format_number(value, form)) for name, (value, form) in rows.items() if value is not None]
        for rows in (own, compared)
    ]
    title = [] if result.reference is None else [("compared with", TITLES[result.reference])]
    console.table((f"{result.images} images", str(model)), [*parts[0], *title, *parts[1]])
    if loader.broken:
        console.print(loader.broken.summary(), style="yellow")


@app.command()
def demo(output: Output = Path("demo-output"), as_json: AsJson = False) -> None:
    """Compress the built-in ViT; print accuracy and speed before and after, write a picture and a report."""
    from pmvit.cli.demo_run import run
    from pmvit.commands import remember_command

    remember_command(output)
    results = run(output, console.rich)
    if as_json:
        print_json(results)
