"""From a model to a compressed one: `score`, `price`, `plan`, `compress`."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from pmvit.cli.common import (
    PLANNERS,
    app,
    blocks_of,
    card_details,
    console,
    follow_paper,
    merge_costs_file,
    meter,
    open_model,
    pairs,
    plan_options_of,
    print_info,
    print_json,
    processes,
    read_measurements,
    run_merge_costs,
    run_score,
    scores_file,
    settle_method,
    source_of,
)
from pmvit.cli.methods import by_method
from pmvit.cli.options import (
    DATA_HELP,
    MASK_OPTIONS,
    MASKS_HELP,
    MERGE_COST_OPTIONS,
    METHOD_OPTIONS,
    PLAN_OPTIONS,
    SCORE_OPTIONS,
    SEGMENTER_OPTIONS,
    AsJson,
    BatchSize,
    Data,
    DataArguments,
    Device,
    Learning,
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
    from pmvit.measuring import MergeCosts, Scores
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
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Measure how much each token of each block matters; write the scores as JSON."""
    follow_paper(options, paper)
    here = processes(device)
    segmenter = given(options, SEGMENTER_OPTIONS)
    network = open_model(model, weights, model_arg, data_arg, here.device, segmenter)
    scores = run_score(network, data, output, options, here, batch_size=batch_size, workers=workers)
    if as_json and here.is_main:
        print_json({"scores": output, "images": scores.images, "iterations": scores.iterations})
        return
    console.print(f"scores of {scores.images} images in {scores.iterations} batches: {output}")


@app.command()
@with_options(MERGE_COST_OPTIONS, SEGMENTER_OPTIONS)
def price(
    model: ModelName,
    data: Data,
    output: Output,
    weights: WeightsFile = None,
    model_arg: ModelArguments = None,
    data_arg: DataArguments = None,
    batch_size: BatchSize = 64,
    workers: Workers = 2,
    device: Device = "cpu",
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Measure what merging tokens costs in each block, without labels; write the merge costs as JSON."""
    here = processes(device)
    network = open_model(model, weights, model_arg, data_arg, here.device, given(options, SEGMENTER_OPTIONS))
    merge_costs = run_merge_costs(network, data, output, options, here, batch_size=batch_size, workers=workers)
    if as_json and here.is_main:
        print_json({"prices": output, "images": merge_costs.images})
        return
    console.print(f"merge costs from {merge_costs.images} images: {output}")


@app.command()
@with_options({name: option for name, option in PLAN_OPTIONS.items() if name != "speedup"})
def plan(
    scores: Annotated[Path, typer.Argument(help="What `pmvit score` or `pmvit price` wrote.")],
    output: Output,
    paper: Paper = False,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Decide which tokens of each block are kept, merged and pruned; write the plan and draw it."""
    import pmvit
    from pmvit.planning.drawing import table

    paper = settle_method(options, paper)
    made = pmvit.plan(read_measurements(scores), **plan_options_of({**options, "speedup": None}, paper))
    made.save(output)
    if as_json:
        print_json({"plan": output, "blocks": blocks_of(made)})
        return
    console.print(table(made))
    console.print(made.draw(console.width))
    console.print(f"plan: {output}")


@app.command()
@with_options(PLAN_OPTIONS, METHOD_OPTIONS, SCORE_OPTIONS, MERGE_COST_OPTIONS, SEGMENTER_OPTIONS, MASK_OPTIONS)
def compress(
    model: ModelName,
    output: Output,
    data: Annotated[str | None, typer.Option("--data", help=f"Images to score on. {DATA_HELP} {MASKS_HELP}")] = None,
    scores: Annotated[Path | None, typer.Option("--scores", help="Scores or merge costs, instead of --data.")] = None,
    plan: Annotated[Path | None, typer.Option("--plan", help="A plan made before, instead of --data.")] = None,
    weights: WeightsFile = None,
    model_arg: ModelArguments = None,
    data_arg: DataArguments = None,
    paper: Paper = False,
    learn: Learning = "group",
    batch_size: BatchSize = 64,
    workers: Workers = 2,
    device: Device = "cpu",
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Measure, plan and compress a model in one go; write a folder that `evaluate`, `info` and pmvit.load take.

    By default, what merges change in the predictions is measured. Where attention stays inside windows, and with
    options that only scores have (--prune, --loss, --paper, ...), tokens are scored by Eq. 9 (scored). --method tome,
    evit, tofu, ... (docs/methods.md) compresses by that method; --keep, --gflops, --skip and --r say how much.
    """
    import pmvit
    from pmvit.compression import record_source
    from pmvit.loading import open_loader
    from pmvit.methods import METHODS
    from pmvit.planning import choose_method
    from pmvit.saving import check_output, check_savable

    sources = [source for source in (data, scores, plan) if source is not None]
    paper = settle_method(options, paper)
    if options["method"] not in PLANNERS:
        kind = METHODS.get(options["method"])
        if extra := sources[1:] if kind is not None and kind.needs_images and data is not None else sources:
            raise PmvitError(f"--method {options['method']} needs no images, scores or plan; got {extra[0]}")
        segmenter = given(options, SEGMENTER_OPTIONS)
        network = open_model(model, weights, model_arg, data_arg, device, segmenter)
        images = None if data is None else open_loader(network, data, batch_size=batch_size, workers=workers)
        card = card_details(network, model, weights)
        origin = source_of(model, weights, model_arg, segmenter)
        by_method(network, output, options, origin, pairs("--model-arg", model_arg), card, images, as_json=as_json)
        return
    if unused := given(options, METHOD_OPTIONS):
        raise PmvitError(f"{', '.join(unused)}: for --method tome and the like alone; see docs/methods.md")
    if len(sources) != 1:
        raise PmvitError("expected one of --data, --scores and --plan, or --method tome and the like")
    plan_options = plan_options_of(options, paper)
    if plan is not None and plan_options:
        raise PmvitError(f"--plan says what to keep already; got {', '.join(sorted(plan_options))} beside it")
    _check_measurement(data, options)
    follow_paper(options, paper)
    here = processes(device)
    check_output(output)
    if plan is None:
        pmvit.PlanConfig(**plan_options)  # a contradiction is better found before the scoring than after
    segmenter = given(options, SEGMENTER_OPTIONS)
    network = open_model(model, weights, model_arg, data_arg, here.device, segmenter)
    arguments = pairs("--model-arg", model_arg)
    check_savable(network, arguments)  # better found out now than after the images were measured
    if plan is not None:
        made = pmvit.Plan.load(plan)
    elif scores is not None:
        measured = read_measurements(scores)
        made = pmvit.plan(measured, measure=meter(network), **plan_options)
        measured.save(merge_costs_file(output) if isinstance(measured, pmvit.MergeCosts) else scores_file(output))
    else:
        reading = {"batch_size": batch_size, "workers": workers}
        if given(options, MERGE_COST_OPTIONS):
            plan_options["method"] = "measured"
        config, scoring = pmvit.PlanConfig(**plan_options), pmvit.ScoreConfig(**given(options, SCORE_OPTIONS))
        source: Scores | MergeCosts
        if choose_method(network, config, scoring) == "measured":
            if not here.is_main:
                return
            source = run_merge_costs(network, cast("str", data), merge_costs_file(output), options, here, **reading)
        else:
            source = run_score(network, cast("str", data), scores_file(output), options, here, **reading)
        if not here.is_main:
            return
        made = pmvit.plan(source, measure=meter(network), **plan_options)
    small = pmvit.compress(network, made, learn=cast("Learn", learn))
    record_source(small, **source_of(model, weights, model_arg, segmenter))
    pmvit.save(small, output, arguments=arguments, card=card_details(network, model, weights))
    remember_command(output, after=Path(model))
    before, after = pmvit.flops(network), pmvit.flops(small)
    if as_json:
        costs = {"original": asdict(before), "compressed": asdict(after)}
        print_json({"model": output, "blocks": blocks_of(made), **costs})
        return
    print_info(made, before, after)
    console.print(f"compressed model: {output}")


def _check_measurement(data: str | None, options: dict[str, Any]) -> None:
    """See that the options for scores and for merge costs are where something is scored or measured."""
    to_score, to_price = given(options, SCORE_OPTIONS), given(options, MERGE_COST_OPTIONS)
    if to_price and (options["method"] == "scored" or to_score):
        raise PmvitError(f"{', '.join(to_price)}: expected with --method measured alone")
    if to_score and options["method"] == "measured":
        raise PmvitError(f"{', '.join(to_score)}: expected with --method scored alone")
    if data is None and (unused := to_score or to_price):
        raise PmvitError(f"{', '.join(unused)}: nothing is {'scored' if to_score else 'measured'} without --data")
