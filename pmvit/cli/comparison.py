"""`compare`: methods side by side."""

import itertools
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from pmvit.cli.common import app, console, names_in, open_model, print_json, processes, run_score, whole_numbers
from pmvit.cli.completion import BENCHMARKED, METHODS, some_of
from pmvit.cli.options import (
    MASK_OPTIONS,
    SCORE_OPTIONS,
    SEGMENTER_OPTIONS,
    AsJson,
    BatchSize,
    Data,
    DataArguments,
    ModelArguments,
    ModelName,
    Threads,
    WeightsFile,
    Workers,
    given,
    with_options,
)
from pmvit.errors import PmvitError


@app.command()
@with_options(SCORE_OPTIONS, SEGMENTER_OPTIONS, MASK_OPTIONS)
def compare(
    model: ModelName,
    data: Data,
    gflops: Annotated[str, typer.Option("--gflops", help="What each is to cost, in GFLOPs (MACs), with commas.")],
    methods: Annotated[
        str,
        typer.Option(
            "--methods",
            help="With commas: names as for compress --method, prune-merge; or all untrained.",
            autocompletion=some_of("all", "prune-merge", *METHODS),
        ),
    ] = "all",
    scores: Annotated[Path | None, typer.Option("--scores", help="Scores for prune-merge, made before.")] = None,
    score_data: Annotated[str | None, typer.Option("--score-data", help="Or images to score on.")] = None,
    given_models: Annotated[
        list[Path] | None, typer.Option("--with", help="A saved model to measure too, as a tuned one; repeatable.")
    ] = None,
    images: Annotated[int | None, typer.Option("--images", min=1, help="Measure on so many of --data.")] = None,
    runtime: Annotated[
        str,
        typer.Option(
            "--runtime",
            help="As for benchmark, with commas; none for no speed.",
            autocompletion=some_of("none", *BENCHMARKED),
        ),
    ] = "eager",
    batch: Annotated[str, typer.Option("--batch", help="Batch sizes, with commas.")] = "1,16",
    rounds: Annotated[int, typer.Option("--rounds", min=3, help="Turns of each.")] = 20,
    threads: Threads = None,
    weights: WeightsFile = None,
    model_arg: ModelArguments = None,
    data_arg: DataArguments = None,
    batch_size: BatchSize = 64,
    workers: Workers = 2,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A folder for JSON, Markdown and a chart.", show_default=False)
    ] = None,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Put methods side by side at equal measured GFLOPs, untrained: accuracy, agreement, speed, export."""
    import pmvit
    from pmvit.data.segmentation import has_masks
    from pmvit.loading import open_loader
    from pmvit.models import adapter_for

    network = open_model(model, weights, model_arg, data_arg, "cpu", given(options, SEGMENTER_OPTIONS))
    names = None if methods == "all" else names_in(methods)
    reading: dict[str, Any] = {"workers": workers, "shuffle": images is not None}
    if adapter_for(network).pixel_classes(network) is None:
        shown: Any = open_loader(network, data, batch_size=batch_size, **reading)
        number = None if images is None else -(-images // batch_size)
    else:
        reading |= {"split": "val", "first_label": options["first_label"]}
        shown = open_loader(network, data, labels=has_masks(data), whole=has_masks(data), **reading)
        number = images
    if number is not None:
        shown = list(itertools.islice(shown, number))
    found = None if scores is None else pmvit.Scores.load(scores)
    if score_data is not None:
        file = (output or Path()) / "scores.json"
        found = run_score(network, score_data, file, options, processes("cpu"), batch_size=batch_size, workers=workers)
    if found is None and names is None:
        console.print("prune-merge is left out: it needs --scores or --score-data", style="yellow")
    result = pmvit.compare(
        network,
        shown,
        gflops=[_budget(text) for text in names_in(gflops)],
        methods=names,
        scores=found,
        others={str(path): pmvit.load(path) for path in given_models or ()},
        runtimes=[] if runtime == "none" else names_in(runtime),
        batches=whole_numbers(batch),
        rounds=rounds,
        threads=threads,
    )
    if output is not None:
        result.write(output)
    if as_json:
        print_json(json.loads(result.to_json()))
        return
    console.table(result.columns(), result.cells(), least_width=124)


def _budget(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise PmvitError(f"--gflops: expected numbers with commas, as in 0.9,0.7; got {text!r}") from None
