"""Bring a model to where it runs: `export`, `benchmark`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from pmvit.cli.common import app, console, names_in, print_json, whole_numbers
from pmvit.cli.completion import BENCHMARKED, VARIANTS, some_of, value_of
from pmvit.cli.options import AsJson, Saved, Threads


@app.command()
def export(
    model: Saved,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.", show_default=False)],
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            help="onnx, openvino, torch-export, aot-inductor, torchscript, executorch or litert; by the file's ending "
            "if left out.",
            show_default=False,
            autocompletion=value_of("to"),
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
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Write a model for a runtime; done means that it was loaded back there and gave the same as PyTorch."""
    import pmvit
    from pmvit.loading import open_loader

    network = pmvit.load(model)
    images = None if data is None else open_loader(network, data, labels=False, batch_size=8, workers=0, shuffle=True)
    result = pmvit.export(network, output, to=to, batch=batch, images=images, int8=int8, threads=threads)
    if as_json:
        print_json(asdict(result))
        return
    kind = f"{result.runtime}, eight bits" if result.int8 else result.runtime
    console.print(
        f"{result.path}: {kind}, {result.megabytes:.1f} MB. Compared with PyTorch on {result.images} images: largest "
        f"error of a logit {result.max_error:.1e} of the largest, same top-1 on {result.agreement:.1%}."
    )


@app.command()
def benchmark(
    model: Saved,
    against: Annotated[
        str,
        typer.Option(
            "--against",
            help="Variants, with commas: original, original-optimized, compressed (without the passes), optimized, "
            "bound (equal tokens, no operations), direct, tome; with -int8 behind them quantised.",
            autocompletion=some_of(*VARIANTS),
        ),
    ] = "original,compressed,optimized,bound",
    batch: Annotated[str, typer.Option("--batch", help="Batch sizes, with commas.")] = "1,16",
    runtime: Annotated[
        str,
        typer.Option(
            "--runtime",
            help="With commas: eager, compile, onnxruntime, openvino, torch-export, aot-inductor, torchscript, "
            "executorch, litert.",
            autocompletion=some_of(*BENCHMARKED),
        ),
    ] = "eager",
    rounds: Annotated[int, typer.Option("--rounds", min=3, help="Turns of each variant.")] = 20,
    threads: Threads = None,
    memory: Annotated[bool, typer.Option("--memory/--no-memory", help="Measure peak memory too.")] = True,
    in_place: Annotated[
        bool,
        typer.Option(
            "--overhead",
            help="Instead: what the operations cost with nothing compressed (Table IV), eager, at the last batch size.",
        ),
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A folder for JSON, Markdown and a chart.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure speed side by side: all variants take turns in one run, on the same images and threads."""
    import pmvit

    network = pmvit.load(model)
    sizes = whole_numbers(batch)
    if in_place:
        result = pmvit.overhead(network, batch=sizes[-1], rounds=rounds, threads=threads)
    else:
        result = pmvit.benchmark(
            network,
            against=names_in(against),
            runtimes=names_in(runtime),
            batches=sizes,
            rounds=rounds,
            threads=threads,
            memory=memory,
        )
    if output is not None:
        result.write(output)
    if as_json:
        print_json(json.loads(result.to_json()))
        return
    console.table(result.columns(), result.cells(), left=("runtime", "variant"), least_width=124)
