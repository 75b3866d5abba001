"""Bring a model to where it runs: `export`, `benchmark`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from pmvit.cli.common import app, console, print_json
from pmvit.cli.options import AsJson, Saved

Threads = Annotated[int | None, typer.Option("--threads", help="CPU threads; as many as PyTorch takes if left out.")]


@app.command()
def export(
    model: Saved,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.", show_default=False)],
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            help="onnx, openvino, torch-export, aot-inductor, torchscript or executorch; by the file's ending if left "
            "out.",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", min=1, help="The one batch size the file is for.", show_default="any")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option("--data", help="Images to compare on, and to calibrate on with --int8.", show_default=False),
    ] = None,
    int8: Annotated[bool, typer.Option("--int8", help="Quantise to eight bits (onnx, openvino).")] = False,
    tokens: Annotated[
        str, typer.Option("--tokens", help="`all` if tokens are read too, not only the logits.")
    ] = "head",
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Write a model for a runtime; done means that it was loaded back there and gave the same as PyTorch."""
    import pmvit
    from pmvit.loading import open_loader

    network = pmvit.load(model)
    images = None if data is None else open_loader(network, data, labels=False, batch_size=8, workers=0, shuffle=True)
    result = pmvit.export(network, output, to=to, batch=batch, images=images, int8=int8, tokens=tokens, threads=threads)
    if as_json:
        print_json({**asdict(result), "path": str(result.path)})
        return
    kind = f"{result.runtime}, eight bits" if result.int8 else result.runtime
    console.print(
        f"{result.path}: {kind}, {result.megabytes:.1f} MB. Compared with PyTorch on {result.images} images: largest "
        f"error of a logit {result.max_error:.1e} of the largest, same top-1 on {result.agreement:.1%}."
    )
