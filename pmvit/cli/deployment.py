"""Bring a model to where it runs: `export`, `benchmark`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from pmvit.cli import options as opt
from pmvit.cli.common import app, names_in, refuse
from pmvit.cli.completion import BENCHMARKED, VARIANTS, Runtime, some_of
from pmvit.cli.screen import console, print_json

AGAINST, EAGER = "original,compressed,optimized,bound", "eager"


@app.command()
def export(
    model: opt.Saved,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")],
    to: Annotated[
        Runtime | None,
        typer.Option(help="The runtime; by the file's ending if left out."),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="The one batch size the file is for.", show_default="any")
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", help="Images to compare on, and to calibrate on with --int8.")
    ] = None,
    int8: Annotated[bool, typer.Option("--int8", help="Quantise to eight bits (onnx, openvino).")] = False,
    threads: opt.Threads = None,
    device: opt.CpuDevice = "cpu",
    as_json: opt.AsJson = False,
) -> None:
    """Write a model for a runtime; done means that it was loaded back there and gave the same as PyTorch."""
    import pmvit
    from pmvit.loading import open_loader

    network = pmvit.load(model, device=device)
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
    model: opt.Saved,
    against: Annotated[
        str | None,
        typer.Option(
            help="Variants, with commas: original, original-optimized, compressed (without the passes), optimized, "
            "bound (equal tokens, no operations), direct, tome; with -int8 behind them quantised.",
            show_default=AGAINST,
            autocompletion=some_of(*VARIANTS),
        ),
    ] = None,
    batch: Annotated[str, typer.Option(help="Batch sizes, with commas.")] = "1,16",
    runtime: Annotated[
        str | None,
        typer.Option(
            help=f"With commas: {', '.join(BENCHMARKED)}.",
            show_default=EAGER,
            autocompletion=some_of(*BENCHMARKED),
        ),
    ] = None,
    rounds: opt.Rounds = 20,
    threads: opt.Threads = None,
    memory: Annotated[
        bool | None, typer.Option("--memory/--no-memory", help="Measure peak memory too.", show_default="memory")
    ] = None,
    in_place: Annotated[
        bool,
        typer.Option(
            "--overhead",
            help="Instead: what the operations cost with nothing compressed (Table IV), eager, at the last batch size.",
        ),
    ] = False,
    device: opt.CpuDevice = "cpu",
    output: opt.ResultFolder = None,
    as_json: opt.AsJson = False,
) -> None:
    """Measure speed side by side: all variants take turns in one run, on the same images and threads."""
    import pmvit
    from pmvit.runtime.bench.run import overhead

    network = pmvit.load(model, device=device)
    sizes = opt.batch_sizes(batch)
    if in_place:
        chosen = {"against": against, "runtime": runtime, "memory": memory}
        refuse(chosen, chosen, "not beside --overhead, which has one runtime and its own variants")
        result = overhead(network, batch=sizes[-1], rounds=rounds, threads=threads)
    else:
        result = pmvit.benchmark(
            network,
            against=names_in(against or AGAINST),
            runtimes=names_in(runtime or EAGER),
            batches=sizes,
            rounds=rounds,
            threads=threads,
            memory=memory is not False,
        )
    if output is not None:
        result.write(output)
    if as_json:
        print_json(json.loads(result.to_json()))
        return
    console.table(result.columns(), result.cells(), left=("runtime", "variant"), least_width=124)
