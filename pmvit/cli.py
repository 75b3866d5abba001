"""The command line: one verb a step, each a few lines over the function of the same name."""

import inspect
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar, cast

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pmvit.errors import PmvitError

if TYPE_CHECKING:
    from torch import nn

    from pmvit.cost import Flops
    from pmvit.data.folder import FolderLoader
    from pmvit.planning import Plan
    from pmvit.prune_merge import Learn
    from pmvit.scoring import Scores

app = typer.Typer(
    help="Prune and Merge: token compression for Vision Transformers.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)
console = Console(markup=False, highlight=False)

ModelName = Annotated[str, typer.Argument(help="A timm architecture, hf-hub:owner/name, or what pmvit saved.")]
Saved = Annotated[Path, typer.Argument(help="A model saved by pmvit: a folder or a .safetensors file.")]
WeightsFile = Annotated[Path | None, typer.Option("--weights", help="Weights file; without it timm fetches its own.")]
ModelArguments = Annotated[
    list[str] | None, typer.Option("--model-arg", help="More for timm.create_model, as name=value; may be repeated.")
]
DataArguments = Annotated[
    list[str] | None, typer.Option("--data-arg", help="How images are prepared, as in mean=[0.5,0.5,0.5]; repeatable.")
]
Data = Annotated[Path, typer.Option("--data", help="Folder of images, one subfolder a class; or images alone.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="Where to write.")]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Images a batch.")]
Workers = Annotated[int, typer.Option("--workers", min=0, help="Processes that read images.")]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, mps, ...")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

SCORE_OPTIONS = {
    "iterations": Annotated[int | None, typer.Option(min=1, help="Batches to score at most; 500 if not given.")],
    "scorer": Annotated[str | None, typer.Option(help="grad_attn, attn, class_attn, grad_class_attn, grad or random.")],
    "loss": Annotated[str | None, typer.Option(help="labels; or predicted, entropy, which need no labels.")],
    "abs_per_sample": Annotated[
        bool | None, typer.Option("--abs-per-sample/--abs-per-batch", help="Where scores are made absolute.")
    ],
}
PLAN_OPTIONS = {
    "keep": Annotated[float | None, typer.Option(help="Share of the patch tokens to keep.")],
    "prune": Annotated[float | None, typer.Option(help="Share of the patch tokens to prune; the rest merge.")],
    "gflops": Annotated[float | None, typer.Option(help="Budget in GFLOPs (MACs), instead of --keep.")],
    "flops_share": Annotated[float | None, typer.Option(help="Budget as a share of the original's FLOPs.")],
    "speedup": Annotated[
        float | None, typer.Option(help="Budget as a speed-up measured on this machine, eager, in batches of 16.")
    ],
    "scope": Annotated[str | None, typer.Option(help="global or local.")],
    "normalize_layers": Annotated[
        bool | None, typer.Option("--normalize-layers/--no-normalize-layers", help="Scores of a layer over their norm.")
    ],
    "layer_decay": Annotated[float | None, typer.Option(help="Scores of layer l times 1 - decay * l.")],
    "grouping": Annotated[str | None, typer.Option(help="grid, row or segment.")],
    "weight_rule": Annotated[str | None, typer.Option(help="sum, average, normalize, max, mean, ones or gaussian.")],
    "reconstruct": Annotated[str | None, typer.Option(help="residual or pinv.")],
    "attention_bias": Annotated[
        bool | None, typer.Option("--attention-bias/--no-attention-bias", help="Attention to a group by its log size.")
    ],
    "skip": Annotated[list[int] | None, typer.Option(help="A block to leave alone; may be repeated.")],
}
Paper = Annotated[bool, typer.Option("--paper", help="The paper's choices wherever an option is not given.")]

Command = TypeVar("Command", bound=Callable[..., None])


def with_options(*groups: dict[str, Any]) -> Callable[[Command], Command]:
    """Give a command the options of these groups, all of them `None` if not given, in place of its `**options`."""

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command)
        own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        more = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for group in groups
            for name, annotation in group.items()
        ]
        command.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in (*own, *more)}
        return command

    return decorate


def _meter(model: "nn.Module") -> "Callable[[Plan], float]":
    """Measures on random images of the model's size; nothing is measured before a plan has to be."""
    import torch

    from pmvit.models import adapter_for
    from pmvit.runtime.timing import speedup_meter

    device = next(model.parameters()).device
    return speedup_meter(model, torch.randn(16, *adapter_for(model).input_size(model), device=device))


def _follow_paper(options: dict[str, Any], paper: bool) -> None:
    """Score as the paper's code does, unless told otherwise."""
    if paper and options["abs_per_sample"] is None:
        options["abs_per_sample"] = False


def _scores_file(output: Path) -> Path:
    """Where the scores of a compressed model go: into its folder, or beside its file."""
    return output.with_suffix(".scores.json") if output.suffix == ".safetensors" else output / "scores.json"


def _needs_labels(options: dict[str, Any]) -> bool:
    return options["loss"] in (None, "labels") and options["scorer"] in (None, "grad_attn", "grad_class_attn", "grad")


def _given(options: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
    """Those options of a group that were given."""
    return {name: options[name] for name in group if options[name] is not None}


def _plan_options(options: dict[str, Any], paper: bool) -> dict[str, Any]:
    """Fields of a `PlanConfig`: the options that were given, over the paper's choices if asked for."""
    from pmvit.planning import PAPER

    given = _given(options, PLAN_OPTIONS)
    if "weight_rule" in given:
        given["weights"] = given.pop("weight_rule")
    return {**(PAPER if paper else {}), **given}


def _model(
    name: str, weights: Path | None, arguments: list[str] | None, preparation: list[str] | None, device: str
) -> "nn.Module":
    from pmvit.loading import create_model

    model = create_model(name, weights, **_pairs("--model-arg", arguments))
    cast("Any", model).pretrained_cfg.update(_pairs("--data-arg", preparation))
    return model.to(device)


def _pairs(option: str, texts: list[str] | None) -> dict[str, Any]:
    """Options given as name=value, the values as JSON where they are."""
    pairs = [text.partition("=") for text in texts or []]
    for name, equals, _ in pairs:
        if not (name and equals):
            raise PmvitError(f"{option}: expected name=value, got {name!r}")
    return {name: _value(text) for name, _, text in pairs}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _loader(
    model: "nn.Module", data: Path, batch_size: int, workers: int, labels: bool = True, **options: Any
) -> "FolderLoader":
    from pmvit.data.folder import image_folder
    from pmvit.models import adapter_for

    config = adapter_for(model).data_config(model)
    num_classes = getattr(model, "num_classes", None) if labels else None
    return image_folder(
        data, config, num_classes=num_classes or None, batch_size=batch_size, workers=workers, **options
    )


def _print_json(data: Any) -> None:
    typer.echo(json.dumps(data, indent=1))


def _run_score(model: "nn.Module", loader: "FolderLoader", output: Path, options: dict[str, Any]) -> "Scores":
    """Score and write the scores; partial sums are kept beside them, so that a stopped run goes on where it was."""
    import pmvit

    partial = output.with_name(output.name + ".partial")

    try:
        scores = pmvit.score(model, loader, checkpoint=partial, **_given(options, SCORE_OPTIONS))
    except KeyboardInterrupt:
        _fail("stopped; the same command goes on from the last batch", code=130)
    scores.save(output)
    partial.unlink(missing_ok=True)
    if loader.broken:
        console.print(loader.broken.summary(), style="yellow")
    return scores


@app.command()
@with_options(SCORE_OPTIONS)
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
    _follow_paper(options, paper)
    network = _model(model, weights, model_arg, data_arg, device)
    loader = _loader(network, data, batch_size, workers, labels=_needs_labels(options), shuffle=True)
    scores = _run_score(network, loader, output, options)
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

    made = pmvit.plan(pmvit.Scores.load(scores), **_plan_options({**options, "speedup": None}, paper))
    made.save(output)
    console.print(table(made))
    console.print(made.draw(console.width))
    console.print(f"plan: {output}")


@app.command()
@with_options(PLAN_OPTIONS, SCORE_OPTIONS)
def compress(
    model: ModelName,
    output: Output,
    data: Annotated[Path | None, typer.Option("--data", help="Folder of images to score on.")] = None,
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
    plan_options = _plan_options(options, paper)
    if plan is not None and plan_options:
        raise PmvitError(f"--plan says what to keep already; got {', '.join(sorted(plan_options))} beside it")
    if data is None and (unused := _given(options, SCORE_OPTIONS)):
        raise PmvitError(f"{', '.join(unused)}: nothing is scored without --data")
    _follow_paper(options, paper)
    check_output(output)
    if plan is None:
        pmvit.PlanConfig(**plan_options)  # a contradiction is better found before the scoring than after
    network = _model(model, weights, model_arg, data_arg, device)
    if plan is not None:
        made = pmvit.Plan.load(plan)
    elif scores is not None:
        made = pmvit.plan(pmvit.Scores.load(scores), measure=_meter(network), **plan_options)
    else:
        labels = _needs_labels(options)
        loader = _loader(network, cast("Path", data), batch_size, workers, labels=labels, shuffle=True)
        measured = _run_score(network, loader, _scores_file(output), options)
        made = pmvit.plan(measured, measure=_meter(network), **plan_options)
    small = pmvit.compress(network, made, learn=cast("Learn", learn))
    pmvit.save(small, output, arguments=_pairs("--model-arg", model_arg))
    _print_info(made, before=pmvit.flops(network), after=pmvit.flops(small))
    console.print(f"compressed model: {output}")


def _print_info(plan: "Plan", before: "Flops", after: "Flops") -> None:
    from pmvit.planning.drawing import table

    console.print(table(plan))
    summary = Table(show_edge=False, pad_edge=False)
    for name in ("", "original", "compressed", "ratio"):
        summary.add_column(name, justify="right" if name else "left")
    summary.add_row(
        "GFLOPs (MACs)", f"{before.gflops:.3f}", f"{after.gflops:.3f}", f"{before.macs / after.macs:.2f}x fewer"
    )
    parameters = (before.parameters, after.parameters)
    change = f"{after.parameters / before.parameters - 1:+.2%}"
    summary.add_row("parameters", *(f"{count / 1e6:.3f} M" for count in parameters), change)
    share = f"{after.module_macs / after.macs:.2%} of the total"
    summary.add_row("merge + reconstruct", "-", f"{after.module_macs / 1e6:.2f} MFLOPs", share)
    console.print(summary)


@app.command()
def info(
    model: Saved,
    draw: Annotated[bool, typer.Option("--draw", help="Draw what each block keeps, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a saved model keeps in each block, and what it costs before and after."""
    import pmvit
    from pmvit.compress import compression_of

    network = pmvit.load(model)
    after = pmvit.flops(network)
    compression = compression_of(network)
    if compression is None:
        raise PmvitError(f"{model} is not compressed: it has {after.gflops:.3f} GFLOPs and nothing merged or pruned")
    before = pmvit.flops(pmvit.decompress(network))
    made = compression.plan
    if as_json:
        blocks = {
            i: {"kept": p.num_kept, "merged": p.num_merged, "pruned": p.num_pruned} for i, p in made.layers.items()
        }
        _print_json({"blocks": blocks, "original": asdict(before), "compressed": asdict(after)})
        return
    _print_info(made, before, after)
    if draw:
        console.print(made.draw(console.width))


@app.command()
def evaluate(
    model: Saved,
    data: Data,
    batch_size: BatchSize = 64,
    workers: Workers = 2,
    device: Device = "cpu",
    strict: Annotated[bool, typer.Option("--strict", help="A broken image is an error.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure accuracy, and agreement with the same weights uncompressed."""
    import copy

    import pmvit
    from pmvit.compress import compression_of

    network = pmvit.load(model, device=device)
    original = pmvit.decompress(copy.deepcopy(network)) if compression_of(network) is not None else None
    loader = _loader(network, data, batch_size, workers, strict=strict)
    result = pmvit.evaluate(network, loader, reference=original)
    if as_json:
        _print_json({**asdict(result), "broken_files": {str(k): v for k, v in loader.broken.files.items()}})
        return
    table = Table(show_edge=False, pad_edge=False)
    table.add_column(f"{result.images} images")
    table.add_column(str(model), justify="right")
    rows = {
        "top-1": (result.top1, "{:.2%}"),
        "  standard error": (result.top1_error, "{:.2%}"),
        "top-5": (result.top5, "{:.2%}"),
        "cross-entropy": (result.cross_entropy, "{:.4f}"),
        "top-1 uncompressed": (result.reference_top1, "{:.2%}"),
        "agreement with it": (result.agreement, "{:.2%}"),
        "KL from it": (result.kl, "{:.4f}"),
    }
    for name, (value, form) in rows.items():
        if value is not None:
            table.add_row(name, form.format(value))
    console.print(table)
    if loader.broken:
        console.print(loader.broken.summary(), style="yellow")


@app.command()
def demo(output: Output = Path("demo-output")) -> None:
    """Compress the built-in ViT; print accuracy and speed before and after, write a picture of its blocks."""
    from pmvit.demo import run

    run(output, console)


def main() -> None:
    """Run the command line: exit code 0, 1 for what did not fit or failed, 2 for wrong usage, 130 when interrupted."""
    try:
        app()
    except PmvitError as error:
        _fail(str(error))
    except Exception as error:
        if os.environ.get("PMVIT_DEBUG"):
            raise
        reason = str(error).strip().splitlines()
        message = f"{type(error).__name__}: {reason[0] if reason else 'no message'}"
        _fail(f"{message} (PMVIT_DEBUG=1 shows where)")


def _fail(message: str, code: int = 1) -> NoReturn:
    Console(stderr=True).print(Text.assemble(("pmvit: ", "bold red"), message), soft_wrap=True)
    sys.exit(code)
