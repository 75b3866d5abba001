"""`compare`: methods side by side."""

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pmvit.cli.common import (
    app,
    console,
    names_in,
    open_model,
    print_json,
    processes,
    run_merge_costs,
    run_score,
    whole_numbers,
)
from pmvit.cli.completion import BENCHMARKED, METHODS, some_of
from pmvit.cli.options import (
    MASK_OPTIONS,
    MERGE_COST_OPTIONS,
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

if TYPE_CHECKING:
    from torch import nn


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
            help="With commas: names as for compress --method; prune-merge, measured; magnitude-pruning, "
            "taylor-pruning (torch-pruning); or all untrained.",
            autocompletion=some_of("all", "prune-merge", "measured", "magnitude-pruning", "taylor-pruning", *METHODS),
        ),
    ] = "all",
    scores: Annotated[Path | None, typer.Option("--scores", help="Scores for prune-merge, made before.")] = None,
    merge_costs: Annotated[Path | None, typer.Option("--prices", help="Merge costs for measured, made before.")] = None,
    score_data: Annotated[
        str | None,
        typer.Option("--score-data", help="Images to score and price on, and for ps-vit and taylor-pruning."),
    ] = None,
    given_models: Annotated[
        list[Path] | None, typer.Option("--with", help="A saved model to measure too, as a tuned one; repeatable.")
    ] = None,
    images: Annotated[int | None, typer.Option("--images", min=1, help="Measure on so many of --data.")] = None,
    exports: Annotated[bool, typer.Option("--exports/--no-exports", help="Try whether each is a static graph.")] = True,
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
    from pmvit.hosts import host_of
    from pmvit.loading import open_loader

    network = open_model(model, weights, model_arg, data_arg, "cpu", given(options, SEGMENTER_OPTIONS))
    names = None if methods == "all" else names_in(methods)
    reading: dict[str, Any] = {"workers": workers, "shuffle": images is not None}
    if host_of(network).outputs().pixel_classes is None:
        shown: Any = open_loader(network, data, batch_size=batch_size, **reading)
        number = None if images is None else -(-images // batch_size)
    else:
        reading |= {"split": "val", "first_label": options["first_label"]}
        shown = open_loader(network, data, labels=has_masks(data), whole=has_masks(data), **reading)
        number = images
    if number is not None:
        shown = list(itertools.islice(shown, number))
    evidence = _evidence(
        network, scores, merge_costs, score_data, names, output or Path(), options, batch_size, workers
    )
    if names is None and (missing := [name for name, found in evidence.items() if found is None]):
        console.print(f"what needs {', '.join(missing)} is left out: give --score-data", style="yellow")
    result = pmvit.compare(
        network,
        shown,
        gflops=[_budget(text) for text in names_in(gflops)],
        methods=names,
        **evidence,
        others={str(path): pmvit.load(path) for path in given_models or ()},
        exports=exports,
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


def _evidence(
    network: "nn.Module",
    scores: Path | None,
    merge_costs: Path | None,
    source: str | None,
    names: list[str] | None,
    folder: Path,
    options: dict[str, Any],
    batch_size: int,
    workers: int,
) -> dict[str, Any]:
    """Scores, merge costs and images as `compare` takes them: those that were made before, and what images give."""
    import pmvit
    from pmvit.loading import open_loader

    reading: dict[str, Any] = {"batch_size": batch_size, "workers": workers}
    found: dict[str, Any] = {
        "scores": None if scores is None else pmvit.Scores.load(scores),
        "merge_costs": None if merge_costs is None else pmvit.MergeCosts.load(merge_costs),
        "images": None,
    }
    if source is None:
        return found
    here = processes("cpu")
    if scores is None and (names is None or "prune-merge" in names):
        found["scores"] = run_score(network, source, folder / "scores.json", options, here, **reading)
    if merge_costs is None and (names is None or "measured" in names):
        nothing = dict.fromkeys(MERGE_COST_OPTIONS)
        found["merge_costs"] = run_merge_costs(network, source, folder / "prices.json", nothing, here, **reading)
    found["images"] = open_loader(network, source, shuffle=True, **reading)
    return found


def _budget(text: str) -> float:
    try:
        budget = float(text)
    except ValueError:
        budget = 0.0
    if not 0 < budget < float("inf"):
        raise PmvitError(f"--gflops: expected numbers above 0 with commas, as in 0.9,0.7; got {text!r}")
    return budget
