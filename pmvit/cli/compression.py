"""From a model to a compressed one: `measure`, `plan`, `compress`; and `info`, to look at it."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from pmvit.cli import common
from pmvit.cli import options as opt
from pmvit.cli.completion import METHODS, MethodName
from pmvit.cli.screen import console, print_json
from pmvit.config import PlanConfig
from pmvit.config.measuring import Method
from pmvit.errors import PmvitError
from pmvit.saving.commands import remember_command

if TYPE_CHECKING:
    from torch import nn

    from pmvit.measuring.flops import Flops
    from pmvit.methods import Method as Other
    from pmvit.planning import Plan

METHOD_HELP = "measured (merge costs; the default), scored (Eq. 9; that of Swin) or paper (its choices)"
PlanMethod = Annotated[Method | None, typer.Option(help=f"{METHOD_HELP}.")]
AnyMethod = Annotated[MethodName | None, typer.Option(help=f"{METHOD_HELP}; or another method (docs/methods.md).")]
SHARED = ("keep", "gflops", "skip")  # options of a plan that another method may have, too


@dataclass(frozen=True)
class MethodOptions:
    """What other methods are told.

    Attributes:
        r: tome, ...: tokens to merge a block, or one number for each, as in 9,9,8.
        method_arg: tome, ...: another of its options, as blocks=[3,6,9]; may be repeated.
    """

    r: str | None = None
    method_arg: tuple[str, ...] = ()


@common.app.command()
@opt.with_options(common.MEASURE_OPTIONS, opt.ModelOptions, opt.Reading)
def measure(
    model: opt.ModelName,
    data: opt.Data,
    output: opt.Output,
    method: PlanMethod = None,
    device: opt.Device = "cpu",
    as_json: opt.AsJson = False,
    **options: Any,
) -> None:
    """Measure what merging tokens costs, or how much each token matters; write it as JSON for `plan`."""
    from pmvit.measuring import Scores, measure_config

    device, is_main = common.join_processes(device)
    network = common.open_model(model, opt.made(opt.ModelOptions, options), device)
    config = measure_config(network, method, common.measure_options(options))
    found = common.measured_on(data, config, network, output, opt.made(opt.Reading, options))
    kind = "scores" if isinstance(found, Scores) else "merge costs"
    if as_json and is_main:
        print_json({"measured": output, "kind": kind, "images": found.images})
        return
    console.print(f"{kind} from {found.images} images: {output}")


@common.app.command()
@opt.with_options({name: option for name, option in common.PLAN_OPTIONS.items() if name != "speedup"})
def plan(
    measured: Annotated[Path, typer.Argument(help="What `pmvit measure` wrote.")],
    output: opt.Output,
    method: PlanMethod = None,
    as_json: opt.AsJson = False,
    **options: Any,
) -> None:
    """Decide which tokens of each block are kept, merged and pruned; write the plan and draw it."""
    import pmvit
    from pmvit.measuring import read_measured
    from pmvit.planning.drawing import table

    made = pmvit.plan(read_measured(measured), method=method, **opt.given(options, PlanConfig))
    made.save(output)
    if as_json:
        print_json({"plan": output, "blocks": blocks_of(made)})
        return
    console.print(table(made))
    console.print(made.draw(console.width))
    console.print(f"plan: {output}")


@common.app.command()
@opt.with_options(common.PLAN_OPTIONS, MethodOptions, common.MEASURE_OPTIONS, opt.ModelOptions, opt.Reading)
def compress(
    model: opt.ModelName,
    output: opt.Output,
    data: opt.MaybeData = None,
    measured: Annotated[Path | None, typer.Option(help="What `pmvit measure` wrote, instead of --data.")] = None,
    plan: Annotated[Path | None, typer.Option(help="A plan made before, instead of --data.")] = None,
    method: AnyMethod = None,
    learn: opt.Learning = None,
    device: opt.Device = "cpu",
    as_json: opt.AsJson = False,
    **options: Any,
) -> None:
    """Measure, plan and compress a model in one go; write a folder that `evaluate`, `info` and pmvit.load take.

    By default, what merges change in the predictions is measured. Where attention stays inside windows, and with
    options that only scores have (--prune, --loss, --scope, ...), tokens are scored by Eq. 9. --method tome, evit,
    tofu, ... (docs/methods.md) compresses by that method; --keep, --gflops, --skip and --r say how much.
    """
    import pmvit
    from pmvit.compression import record_source
    from pmvit.measuring import measure_config, read_measured
    from pmvit.pipeline import measured_file
    from pmvit.planning import plan_by
    from pmvit.saving.models import check_output, check_savable

    other = method if method in METHODS else None
    ours = None if other else cast("Method | None", method)
    planning = None
    if other is not None:
        _check_other({**options, "measured": measured, "plan": plan, "learn": learn}, other, data)
    else:
        _check_ours({**options, "method": method}, data, measured, plan)
        if plan is None:
            planning = PlanConfig.of(method=ours, **opt.given(options, PlanConfig))
    check_output(output)
    device, is_main = common.join_processes(device)
    making, reading = opt.made(opt.ModelOptions, options), opt.made(opt.Reading, options)
    network = common.open_model(model, making, device)
    arguments = common.pairs("--model-arg", making.model_arg)
    check_savable(network, arguments)  # better found out now than after the images were measured
    if planning is not None and data is not None:
        config = measure_config(network, ours or planning.measurement, common.measure_options(options))
        measured = measured_file(output, config)
        common.measured_on(data, config, network, measured, reading)
    if not is_main:
        return
    what: Plan | Other
    if other is not None:
        what = _method(network, other, options, data, reading)
    elif planning is not None and measured is not None:
        found = read_measured(measured)
        found.save(measured_file(output, found.config))
        what = plan_by(planning, found, common.meter(network))
    else:
        what = pmvit.Plan.load(plan or "")
    small = pmvit.compress(network, what, learn=learn or "group")
    record_source(small, **common.source_of(model, making))
    pmvit.save(small, output, arguments=arguments, card=common.card_details(network, model, making.weights))
    remember_command(output, after=Path(model))
    _show(what, pmvit.flops(network), pmvit.flops(small), as_json, {"model": output})
    if not as_json:
        console.print(f"compressed model: {output}")


def _check_ours(options: dict[str, Any], data: str | None, measured: Path | None, plan: Path | None) -> None:
    """See that there is one thing to plan from, and nothing that would be ignored."""
    common.refuse(options, opt.options_of(MethodOptions), "for --method tome and the like alone; see docs/methods.md")
    if len([source for source in (data, measured, plan) if source is not None]) != 1:
        raise PmvitError("expected one of --data, --measured and --plan, or --method tome and the like")
    if data is None:
        unread = [*common.MEASURE_OPTIONS, *opt.options_of(opt.Reading)]
        common.refuse(options, unread, "nothing is measured without --data")
    if plan is not None:
        common.refuse(options, [*common.PLAN_OPTIONS, "method"], "--plan says what to keep already")


def _check_other(options: dict[str, Any], method: str, data: str | None) -> None:
    """See that another method is told nothing that it would ignore."""
    from pmvit.methods import METHODS

    ours = [*common.PLAN_OPTIONS, *common.MEASURE_OPTIONS, "measured", "plan", "learn"]
    unused = [name for name in ours if name not in SHARED]
    common.refuse(options, unused, f"for Prune and Merge alone; got it beside --method {method}")
    if data is None:
        common.refuse(options, opt.options_of(opt.Reading), "nothing is read without --data")
    elif not METHODS[method].needs_images:
        raise PmvitError(f"--method {method} needs no images, measurements or plan; got {data}")


def _method(model: "nn.Module", name: str, options: dict[str, Any], data: str | None, reading: opt.Reading) -> "Other":
    """Another method with its options, by a budget if there is one; it may look at images."""
    from pmvit.loading import open_loader
    from pmvit.methods import make_method, method_called
    from pmvit.methods.budget import method_for

    images = None if data is None else open_loader(model, data, **asdict(reading))
    wanted: dict[str, Any] = common.pairs("--method-arg", options["method_arg"])
    wanted = {key: tuple(value) if isinstance(value, list) else value for key, value in wanted.items()}
    wanted |= {key: value for key, value in opt.given(options, PlanConfig).items() if key in ("keep", "skip")}
    if options["r"] is not None:
        numbers = opt.whole_numbers("--r", [options["r"]])
        wanted["r"] = numbers if len(numbers) > 1 else numbers[0]
    if options["gflops"] is None:
        chosen = make_method(name, **wanted)
        return chosen if images is None else chosen.fit(model, images)
    return method_for(model, method_called(name), options["gflops"], data=images, **wanted)


@common.app.command()
def info(
    model: opt.Saved,
    draw: Annotated[bool, typer.Option("--draw", help="Draw what each block keeps, too.")] = False,
    as_json: opt.AsJson = False,
) -> None:
    """Show what a saved model keeps in each block, and what it costs before and after."""
    import pmvit
    from pmvit.compression import compression_of
    from pmvit.planning import Plan

    network = pmvit.load(model)
    after = pmvit.flops(network)
    compression = compression_of(network)
    if compression is None:
        raise PmvitError(f"{model} is not compressed: it has {after.gflops:.3f} GFLOPs and nothing merged or pruned")
    what = cast("Plan | Other", compression.what)
    if draw and (as_json or not isinstance(what, Plan)):
        raise PmvitError("--draw: expected for a plan, and without --json, which draws nothing")
    _show(what, pmvit.flops(pmvit.decompress(network)), after, as_json)
    if draw and isinstance(what, Plan):
        console.print(what.draw(console.width))


def blocks_of(plan: "Plan") -> dict[int, dict[str, int]]:
    """What each block keeps, merges and prunes."""
    return {
        index: {
            "kept": layer.num_kept,
            "kept_in_mlp": (layer.mlp or layer).num_kept,
            "merged": layer.num_merged,
            "pruned": layer.num_pruned,
        }
        for index, layer in plan.layers.items()
    }


def _show(
    what: "Plan | Other", before: "Flops", after: "Flops", as_json: bool, more: dict[str, Any] | None = None
) -> None:
    """What a plan or another method does to a model, and what that costs before and after."""
    from pmvit.planning import Plan
    from pmvit.planning.drawing import table

    if as_json:
        told = {"blocks": blocks_of(what)} if isinstance(what, Plan) else {"method": what.describe()}
        print_json({**(more or {}), **told, "original": asdict(before), "compressed": asdict(after)})
        return
    counts = (f"{count / 1e6:.3f} M" for count in (before.parameters, after.parameters))
    rows = [
        ("GFLOPs (MACs)", f"{before.gflops:.3f}", f"{after.gflops:.3f}", f"{before.macs / after.macs:.2f}x fewer"),
        ("parameters", *counts, f"{after.parameters / before.parameters - 1:+.2%}"),
    ]
    if isinstance(what, Plan):
        console.print(table(what))
        share = f"{after.module_macs / after.macs:.2%} of the total"
        rows.append(("merge + reconstruct", "-", f"{after.module_macs / 1e6:.2f} MFLOPs", share))
    else:
        said = ", ".join(f"{name} {value}" for name, value in what.describe()["options"].items() if value is not None)
        console.print(f"{what.title}: {said if len(said) < 200 else said[:199] + '…'}")
    console.table(("", "original", "compressed", "ratio"), rows)
    if not isinstance(what, Plan) and what.needs_training:
        console.print("It has weights of its own, which are random: fine-tune it before you use it.", style="yellow")
