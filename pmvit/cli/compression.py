"""From a model to a compressed one: `score`, `plan`, `compress`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from pmvit.cli.common import (
    app,
    console,
    follow_paper,
    meter,
    open_model,
    pairs,
    plan_options_of,
    print_info,
    processes,
    run_score,
    scores_file,
)
from pmvit.cli.options import (
    DATA_HELP,
    MASK_OPTIONS,
    MASKS_HELP,
    PLAN_OPTIONS,
    SCORE_OPTIONS,
    SEGMENTER_OPTIONS,
    BatchSize,
    Data,
    DataArguments,
    Device,
    ModelArguments,
    ModelName,
    Output,
    Paper,
    WeightsFile,
    Workers,
    given,
    with_options,
)
from pmvit.commands import remember_command
from pmvit.errors import PmvitError

if TYPE_CHECKING:
    from pmvit.prune_merge import Learn


@app.command()
@with_options(SCORE_OPTIONS, SEGMENTER_OPTIONS, MASK_OPTIONS)
def score(
    model: ModelName,
    data: Data,
    output: Output,
    weights: WeightsFile = None,
    model_arg: ModelArguments = None,
    data_arg: DataArguments = None,
    paper: Paper = False,
    batch_size: BatchSize = 64,
    workers: Workers = 2,
    device: Device = "cpu",
    **options: Any,
) -> None:
    """Measure how much each token of each block matters; write the scores as JSON."""
    follow_paper(options, paper)
    here = processes(device)
    segmenter = given(options, SEGMENTER_OPTIONS)
    network = open_model(model, weights, model_arg, data_arg, here.device, segmenter)
    scores = run_score(network, data, output, options, here, batch_size=batch_size, workers=workers)
    console.print(f"scores of {scores.images} images in {scores.iterations} batches: {output}")


@app.command()
@with_options({name: option for name, option in PLAN_OPTIONS.items() if name != "speedup"})
def plan(
    scores: Annotated[Path, typer.Argument(help="Scores written by `pmvit score`.")],
    output: Output,
    paper: Paper = False,
    **options: Any,
) -> None:
    """Decide which tokens of each block are kept, merged and pruned; write the plan and draw it."""
    import pmvit
    from pmvit.planning.drawing import table

    made = pmvit.plan(pmvit.Scores.load(scores), **plan_options_of({**options, "speedup": None}, paper))
    made.save(output)
    console.print(table(made))
    console.print(made.draw(console.width))
    console.print(f"plan: {output}")


@app.command()
@with_options(PLAN_OPTIONS, SCORE_OPTIONS, SEGMENTER_OPTIONS, MASK_OPTIONS)
def compress(
    model: ModelName,
    output: Output,
    data: Annotated[str | None, typer.Option("--data", help=f"Images to score on. {DATA_HELP} {MASKS_HELP}")] = None,
    scores: Annotated[Path | None, typer.Option("--scores", help="Scores made before, instead of --data.")] = None,
    plan: Annotated[Path | None, typer.Option("--plan", help="A plan made before, instead of --data.")] = None,
    weights: WeightsFile = None,
    model_arg: ModelArguments = None,
    data_arg: DataArguments = None,
    paper: Paper = False,
    learn: Annotated[str, typer.Option("--learn", help="What tuning may change of M and R: group, dense.")] = "group",
    batch_size: BatchSize = 64,
    workers: Workers = 2,
    device: Device = "cpu",
    **options: Any,
) -> None:
    """Score, plan and compress a model in one go; write a folder that `evaluate`, `info` and pmvit.load take."""
    import pmvit
    from pmvit.compress import check_output

    if sum(source is not None for source in (data, scores, plan)) != 1:
        raise PmvitError("expected one of --data, --scores and --plan to say where the plan comes from")
    plan_options = plan_options_of(options, paper)
    if plan is not None and plan_options:
        raise PmvitError(f"--plan says what to keep already; got {', '.join(sorted(plan_options))} beside it")
    if data is None and (unused := given(options, SCORE_OPTIONS)):
        raise PmvitError(f"{', '.join(unused)}: nothing is scored without --data")
    follow_paper(options, paper)
    here = processes(device)
    check_output(output)
    if plan is None:
        pmvit.PlanConfig(**plan_options)  # a contradiction is better found before the scoring than after
    segmenter = given(options, SEGMENTER_OPTIONS)
    network = open_model(model, weights, model_arg, data_arg, here.device, segmenter)
    if plan is not None:
        made = pmvit.Plan.load(plan)
    elif scores is not None:
        made = pmvit.plan(pmvit.Scores.load(scores), measure=meter(network), **plan_options)
    else:
        reading = {"batch_size": batch_size, "workers": workers}
        measured = run_score(network, cast("str", data), scores_file(output), options, here, **reading)
        if not here.is_main:
            return
        made = pmvit.plan(measured, measure=meter(network), **plan_options)
    small = pmvit.compress(network, made, learn=cast("Learn", learn))
    pmvit.save(small, output, arguments=pairs("--model-arg", model_arg))
    remember_command(output, after=Path(model))
    print_info(made, before=pmvit.flops(network), after=pmvit.flops(small))
    console.print(f"compressed model: {output}")
