"""`compare`: methods side by side."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pmvit.cli import options as opt
from pmvit.cli.common import app, measured_on, names_in, open_images, open_model, refuse
from pmvit.cli.completion import BENCHMARKED, METHODS, some_of
from pmvit.cli.screen import console, print_json
from pmvit.config import MergeCostConfig, ScoreConfig
from pmvit.errors import PmvitError

if TYPE_CHECKING:
    from torch import nn

SCORE_OPTIONS = opt.options_of(ScoreConfig, but=("limit", "seed"))


@app.command()
@opt.with_options(SCORE_OPTIONS, opt.ModelOptions, opt.Reading)
def compare(
    model: opt.ModelName,
    data: opt.Data,
    gflops: Annotated[str, typer.Option(help="What each is to cost, in GFLOPs (MACs), with commas.")],
    methods: Annotated[
        str,
        typer.Option(
            help="With commas: names as for compress --method; prune-merge, measured; magnitude-pruning, "
            "taylor-pruning (torch-pruning); or all untrained.",
            autocompletion=some_of("all", "prune-merge", "measured", "magnitude-pruning", "taylor-pruning", *METHODS),
        ),
    ] = "all",
    scores: Annotated[Path | None, typer.Option(help="Scores for prune-merge, made before.")] = None,
    merge_costs: Annotated[Path | None, typer.Option(help="Merge costs for measured, made before.")] = None,
    measure_data: Annotated[
        str | None, typer.Option(help="Images to measure scores and merge costs on; for ps-vit and taylor-pruning.")
    ] = None,
    given_models: Annotated[
        list[Path] | None, typer.Option("--with", help="A saved model to compare too, as a tuned one; repeatable.")
    ] = None,
    limit: opt.Limit = None,
    exports: Annotated[bool, typer.Option(help="Try whether each is a static graph.")] = True,
    runtime: Annotated[
        str,
        typer.Option(
            help="As for benchmark, with commas; none for no speed.", autocompletion=some_of("none", *BENCHMARKED)
        ),
    ] = "eager",
    batch: Annotated[str, typer.Option(help="Batch sizes to measure speed at, with commas.")] = "1,16",
    rounds: opt.Rounds = 20,
    threads: opt.Threads = None,
    device: opt.CpuDevice = "cpu",
    output: opt.ResultFolder = None,
    as_json: opt.AsJson = False,
    **options: Any,
) -> None:
    """Put methods side by side at equal measured GFLOPs, untrained: accuracy, agreement, speed, export."""
    import pmvit

    if measure_data is None or scores is not None:
        refuse(options, SCORE_OPTIONS, "nothing is scored: expected with --measure-data and without --scores")
    network = open_model(model, opt.made(opt.ModelOptions, options), device)
    names = None if methods == "all" else names_in(methods)
    reading = opt.made(opt.Reading, options)
    config = ScoreConfig(**opt.given(options, ScoreConfig))
    evidence = _evidence(network, scores, merge_costs, measure_data, names, output or Path(), config, reading)
    if names is None and (missing := [name for name, found in evidence.items() if found is None]):
        console.print(f"what needs {', '.join(missing)} is left out: give --measure-data", style="yellow")
    result = pmvit.compare(
        network,
        open_images(network, data, reading, limit),
        gflops=[_budget(text) for text in names_in(gflops)],
        methods=names,
        **evidence,
        others={str(path): pmvit.load(path) for path in given_models or ()},
        exports=exports,
        runtimes=[] if runtime == "none" else names_in(runtime),
        batches=opt.batch_sizes(batch),
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
    config: ScoreConfig,
    reading: opt.Reading,
) -> dict[str, Any]:
    """Scores, merge costs and images as `compare` takes them: those that were made before, and what images give."""
    import pmvit
    from pmvit.loading import open_loader
    from pmvit.measuring.cost_run import can_measure_merges
    from pmvit.pipeline import measured_file

    found: dict[str, Any] = {
        "scores": None if scores is None else pmvit.Scores.load(scores),
        "merge_costs": None if merge_costs is None else pmvit.MergeCosts.load(merge_costs),
        "images": None,
    }
    if source is None:
        return found
    how: dict[str, tuple[str, ScoreConfig | MergeCostConfig]] = {"scores": ("prune-merge", config)}
    if can_measure_merges(network):
        how["merge_costs"] = ("measured", MergeCostConfig())
    for kind, (name, each) in how.items():
        if found[kind] is None and (names is None or name in names):
            found[kind] = measured_on(source, each, network, measured_file(folder, each), reading)
    found["images"] = open_loader(network, source, shuffle=True, **asdict(reading))
    return found


def _budget(text: str) -> float:
    try:
        budget = float(text)
    except ValueError:
        budget = 0.0
    if not 0 < budget < float("inf"):
        raise PmvitError(f"--gflops: expected numbers above 0 with commas, as in 0.9,0.7; got {text!r}")
    return budget
