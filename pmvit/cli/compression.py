"""From a model to a compressed one: `measure`, `plan`, `compress`; and `info`, to look at it."""

import shutil
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from pmvit.cli import common
from pmvit.cli import options as opt
from pmvit.cli.completion import METHODS, MethodName
from pmvit.cli.screen import console
from pmvit.config import PlanConfig, PlanOptions, SpeedConfig
from pmvit.config.measuring import Method
from pmvit.config.planning import MEASURED_BUDGETS
from pmvit.errors import PmvitError
from pmvit.saving.commands import this_command

if TYPE_CHECKING:
    from torch import nn

    from pmvit.measuring.flops import Flops
    from pmvit.methods import Method as Other
    from pmvit.planning.planner import AnyPlan

SHARED = ("keep", "gflops", "skip")  # options of a plan that another method may have, too
Strength = Annotated[
    str | None, typer.Option("--r", help="tome, ...: tokens to merge a block, or one number for each, as in 9,9,8.")
]
MethodArguments = Annotated[
    list[str] | None,
    typer.Option(metavar="<text>", help="tome, ...: another of its options, as blocks=[3,6,9]; may be repeated."),
]
AnyMethod = Annotated[MethodName | None, typer.Option(help=f"{opt.METHOD_HELP}; or another method (docs/methods.md).")]


@opt.verb
def measure(
    model: opt.ModelName,
    output: opt.Output,
    measuring: opt.Measuring,
    making: opt.Making,
    reading: opt.Reading,
    data: opt.MaybeData = None,
    method: opt.PlanMethod = None,
    device: opt.Device = "cpu",
) -> dict[str, Any]:
    """Measure how much differences of tokens matter, what merges cost, or how much each token matters, for `plan`.

    A metric, for adaptive plans, is written as safetensors, the others as JSON. Without --data, it is measured on
    images that pmvit generates.
    """
    from pmvit.config import MetricConfig
    from pmvit.measuring import KINDS, kind_of, measure_config
    from pmvit.measuring.metric import expect_safetensors

    network = common.open_model(model, making, common.join_processes(device)[0])
    config = measure_config(network, method, measuring)
    if isinstance(config, MetricConfig):
        expect_safetensors(output)
    found = common.measured_on(data, config, network, output, reading)
    kind = KINDS[kind_of(found)].title.removeprefix("a ")
    if data is None:
        console.print(common.source_text(found))
    console.print(f"{kind} from {found.images} images: {output}")
    return {"measured": output, "kind": kind, "images": found.images, "data": found.data}


@opt.verb
def plan(
    measured: Annotated[Path, typer.Argument(help="What `pmvit measure` wrote.")],
    output: opt.Output,
    planning: Annotated[PlanOptions, opt.Fields(PlanConfig, but=MEASURED_BUDGETS)],
    method: opt.PlanMethod = None,
) -> dict[str, Any]:
    """Decide how many tokens merge before each block, or which are kept, merged and pruned; write the plan, draw it."""
    import pmvit
    from pmvit.measuring import read_measured
    from pmvit.planning import Plan
    from pmvit.planning.drawing import table

    planning["method"] = method
    made: AnyPlan = pmvit.plan(read_measured(measured), **planning)
    made.save(output)
    console.print(table(made))
    if isinstance(made, Plan):
        console.print(made.draw(console.rich.width))
    console.print(f"plan: {output}")
    return {"plan": output, "blocks": made.blocks}


@opt.verb
def compress(
    model: opt.ModelName,
    output: opt.Output,
    planning: opt.Planning,
    measuring: opt.Measuring,
    speed: opt.Speed,
    making: opt.Making,
    reading: opt.Reading,
    data: opt.MaybeData = None,
    val: opt.Validation = None,
    measured: Annotated[Path | None, typer.Option(help="What `pmvit measure` wrote, instead of --data.")] = None,
    plan: Annotated[Path | None, typer.Option(help="A plan made before, instead of --data.")] = None,
    method: AnyMethod = None,
    r: Strength = None,
    method_arg: MethodArguments = None,
    learn: opt.Learning = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a fine-tuned model, and its run with it.")] = False,
    device: opt.Device = "cpu",
) -> dict[str, Any] | None:
    """Measure, plan and compress a model in one go; write a folder that `evaluate`, `info` and pmvit.load take.

    By default, the plan says how many tokens merge before each block and lets every image choose which: it is measured
    on --data, without it on images that pmvit generates. --method measured makes a fixed plan, from what merges change
    in the predictions. Where attention stays inside windows, and with options that only scores have (--prune, --loss,
    --scope, ...), tokens are scored by Eq. 9. --speedup is for a --runtime and --batch, --max-drop for the images of
    --val: plans are tried until one fits. --method tome, evit, tofu, ... (docs/methods.md) compresses by that method;
    --keep, --gflops, --skip and --r say how much.
    """
    import pmvit
    from pmvit import methods
    from pmvit.compression import record_source
    from pmvit.data.opening import open_loader
    from pmvit.locks import only_writer
    from pmvit.measuring import kind_of, measure_config, read_measured
    from pmvit.pipeline import measured_file, run_files
    from pmvit.planning.planner import read_plan
    from pmvit.saving.card import CardDetails
    from pmvit.saving.models import check_output, check_savable
    from pmvit.tradeoff import check_speed, plan_for

    config = where = None
    if method is not None and method in METHODS:
        ours = {name: value for name, value in planning.items() if name not in SHARED}
        ours |= {**measuring, **speed, "measured": measured, "plan": plan, "learn": learn, "val": val}
        opt.refuse(f"for Prune and Merge alone; got it beside --method {method}", ours)
        if data is None:
            opt.refuse("nothing is read without --data", reading)
        elif not methods.METHODS[method].needs_images:
            raise PmvitError(f"--method {method} needs no images, measurements or plan; got {data}")
    else:
        opt.refuse("for --method tome and the like alone; see docs/methods.md", {"r": r, "method_arg": method_arg})
        if [data, measured, plan].count(None) < 2:
            raise PmvitError("expected one of --data, --measured and --plan, or none of them; got several")
        if measured is not None or plan is not None:
            opt.refuse("nothing is measured beside --measured or --plan", measuring, {} if val else reading)
        elif data is None:
            common.refuse_reading(reading, val)
        if plan is not None:
            opt.refuse("--plan says what to keep already", planning, speed, {"method": method, "val": val})
        else:
            planning["method"] = cast("Method | None", method)
            config = PlanConfig.of(**planning)
            where = check_speed(config, SpeedConfig(**speed) if speed else None)
            data, val = common.judged_on(data, val, config.max_drop)
    check_output(output)
    tuned = run_files(output) if output.is_dir() else []
    if tuned and not force:
        raise PmvitError(f"{output} holds a trained model and its run: choose another folder, or --force")
    device, is_main = common.join_processes(device)
    is_folder = output.suffix != ".safetensors"
    with only_writer(output) if is_main and is_folder else nullcontext():
        network = common.open_model(model, making, device)
        arguments = common.pairs("--model-arg", making.get("model_arg"))
        check_savable(network, arguments)  # better found out now than after the images were measured
        if config is not None and measured is None:
            how = measure_config(network, planning["method"] or config.measurement, measuring)
            measured = measured_file(output, kind_of(how))
            common.measured_on(data, how, network, measured, reading)
        if not is_main:
            return None
        what: AnyPlan | Other
        if config is not None and measured is not None:
            found = read_measured(measured)
            found.save(measured_file(output, kind_of(found)))
            shown = None if val is None else common.open_images(network, val, reading, None)
            what = plan_for(config, found, model=network, data=shown, speed=where)
        elif plan is not None:
            what = read_plan(plan)
        else:
            how_read = asdict(opt.ReadingOptions(**reading))
            images = None if data is None else open_loader(network, data, **how_read)
            what = _method(network, method or "", planning, r, method_arg, images)
        small = pmvit.compress(network, what, learn=learn or "group")
        record_source(small, **common.source_of(model, making))
        for path in tuned:  # or the folder would tell of a run that its model is not from
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        pmvit.save(small, output, arguments=arguments, card=CardDetails(command=this_command()))
        described = _describe(what, pmvit.flops(network), pmvit.flops(small))
        console.print(f"compressed model: {output}")
        return {"model": output, **described}


def _method(
    model: "nn.Module", name: str, planning: PlanOptions, r: str | None, arguments: list[str] | None, images: Any
) -> "Other":
    """Another method with its options, by a budget if there is one; it may look at images."""
    from pmvit.methods import make_method, method_called
    from pmvit.methods.budget import method_for

    named = common.pairs("--method-arg", arguments).items()
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in named}
    options |= {key: value for key, value in planning.items() if key in ("keep", "skip")}
    if r is not None:
        numbers = opt.whole_numbers("--r", [r])
        options["r"] = numbers if len(numbers) > 1 else numbers[0]
    if (gflops := planning.get("gflops")) is not None:
        return method_for(model, method_called(name), gflops, data=images, **options)
    chosen = make_method(name, **options)
    return chosen if images is None else chosen.fit(model, images)


@opt.verb
def info(
    model: opt.Saved,
    draw: Annotated[bool, typer.Option("--draw", help="Draw what each block keeps, too.")] = False,
    img_size: opt.Side = None,
) -> dict[str, Any]:
    """Show what a saved model keeps in each block, and what it costs before and after."""
    import pmvit
    from pmvit.compression import compression_of
    from pmvit.planning import Plan

    network = pmvit.load(model, img_size=img_size)
    after = pmvit.flops(network)
    compression = compression_of(network)
    if compression is None:
        raise PmvitError(f"{model} is not compressed: it has {after.gflops:.3f} GFLOPs and nothing merged or pruned")
    what = cast("AnyPlan | Other", compression.what)
    if draw and (console.is_json or not isinstance(what, Plan)):
        raise PmvitError("--draw: expected for a fixed plan, and without --json, which draws nothing")
    described = _describe(what, pmvit.flops(pmvit.decompress(network)), after)
    if draw and isinstance(what, Plan):
        console.print(what.draw(console.rich.width))
    return described


def _describe(what: "AnyPlan | Other", before: "Flops", after: "Flops") -> dict[str, Any]:
    """Print what a plan or another method does to a model, and what that costs before and after; the same as data."""
    from pmvit.methods import Method as Other
    from pmvit.planning.adaptive import AdaptivePlan
    from pmvit.planning.budget import REACHED, reached_text
    from pmvit.planning.drawing import sizes_text, table

    counts = (f"{count / 1e6:.3f} M" for count in (before.parameters, after.parameters))
    rows = [
        ("GFLOPs (MACs)", f"{before.gflops:.3f}", f"{after.gflops:.3f}", f"{before.macs / after.macs:.2f}x fewer"),
        ("parameters", *counts, f"{after.parameters / before.parameters - 1:+.2%}"),
    ]
    if not isinstance(what, Other):
        told: dict[str, Any] = {"blocks": what.blocks, "reached": what.made_by.get(REACHED)}
        console.print(table(what))
        if isinstance(what, AdaptivePlan):
            told |= {"grid": what.metric.grid, "measured_at": what.measured_at, "measured_on": what.metric.data}
            console.print(f"patches: {sizes_text(what)}")
            console.print(common.source_text(what.metric))
        if (reached := reached_text(what.made_by)) is not None:
            console.print(reached)
        share = f"{after.module_macs / after.macs:.2%} of the total"
        rows.append(("merge + reconstruct", "-", f"{after.module_macs / 1e6:.2f} MFLOPs", share))
    else:
        told = {"method": what.describe()}
        said = ", ".join(f"{name} {value}" for name, value in told["method"]["options"].items() if value is not None)
        console.print(f"{what.title}: {said if len(said) < 200 else said[:199] + '…'}")
    console.table(("", "original", "compressed", "ratio"), rows)
    if isinstance(what, Other) and what.needs_training:
        console.warn("It has weights of its own, which are random: fine-tune it before you use it.")
    return {**told, "original": asdict(before), "compressed": asdict(after)}
