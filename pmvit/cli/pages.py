"""Pages about a model: `report` to send to a colleague, `serve` to try it."""

from pathlib import Path
from typing import Annotated

import typer

from pmvit.cli import options as opt
from pmvit.cli.common import app
from pmvit.cli.screen import console, print_json


@app.command()
def report(
    model: opt.Saved,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The HTML file; report.html beside the model if left out.")
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
    device: opt.CpuDevice = "cpu",
    as_json: opt.AsJson = False,
) -> None:
    """Write one HTML file about a compressed model: numbers, blocks to look into, curves, commands."""
    import pmvit

    beside = model / "report.html" if model.is_dir() else model.with_suffix(".html")
    written = pmvit.report(
        model,
        output or beside,
        data=data,
        original=original,
        limit=limit,
        names=names,
        evaluation=evaluation,
        benchmark=benchmark,
        comparison=comparison,
        workers=workers,
    )
    if as_json:
        print_json({"report": written, "bytes": written.stat().st_size})
        return
    console.print(f"report: {written} ({written.stat().st_size / 1e6:.1f} MB)")


@app.command()
def serve(
    model: opt.Saved,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 for any that is free.")] = 8000,
    original: opt.Original = None,
    names: opt.Names = None,
    device: opt.CpuDevice = "cpu",
    max_megabytes: Annotated[float, typer.Option(help="Largest file that is taken.")] = 16.0,
    max_megapixels: Annotated[float, typer.Option(help="Largest image that is taken.")] = 50.0,
) -> None:
    """Start a page on this machine where one drops an image and sees what the model and its original say."""
    import pmvit
    from pmvit.reporting.serve.uploads import Limits

    limits = Limits(max_megabytes, max_megapixels)
    pmvit.serve(model, port=port, original=original, names=names, limits=limits, say=console.print)
