"""Which model to take, and to where it runs: `compare`, `curve`, `export`, `benchmark`."""

import json
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pmvit.cli import options as opt
from pmvit.cli.common import measured_on, open_images, open_model, split_folders
from pmvit.cli.completion import BENCHMARKED, METHODS, VARIANTS, Runtime, some_of
from pmvit.cli.screen import console
from pmvit.config import MergeCostConfig, MetricConfig, PlanConfig, PlanOptions, ScoreConfig
from pmvit.config.measuring import OURS, Measurement
from pmvit.errors import PmvitError

if TYPE_CHECKING:
    from torch import nn

    from pmvit.measuring import Measured
    from pmvit.numbers.tables import Results

AGAINST, EAGER = "original,compressed,optimized,bound", "eager"


@opt.verb
def compare(
    model: opt.ModelName,
    data: opt.Data,
    gflops: Annotated[str, typer.Option(help="What each is to cost, in GFLOPs (MACs), with commas.")],
    scoring: Annotated[dict[str, Any], opt.Fields(ScoreConfig, but=("limit", "seed"))],
    making: opt.Making,
    reading: opt.Reading,
    methods: Annotated[
        str,
        typer.Option(
            help="With commas: names as for compress --method; prune-merge, measured, adaptive; magnitude-pruning, "
            "taylor-pruning (torch-pruning); or all untrained.",
            autocompletion=some_of("all", *OURS, "magnitude-pruning", "taylor-pruning", *METHODS),
        ),
    ] = "all",
    measured: Annotated[
        list[Path] | None, typer.Option(help="What `pmvit measure` wrote, for plans of ours; may be repeated.")
    ] = None,
    measure_data: Annotated[
        str | None, typer.Option(help="Images to measure on what our plans are made from; for ps-vit, taylor-pruning.")
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
    device: opt.Device = "cpu",
    output: opt.ResultFolder = None,
) -> dict[str, Any]:
    """Put methods side by side at equal measured GFLOPs, untrained: accuracy, agreement, speed, export.

    Accuracy is measured on the device, speed on the CPU.
    """
    import pmvit
    from pmvit.data.opening import open_loader
    from pmvit.hosts import host_of
    from pmvit.measuring import KINDS, kind_of, read_measured
    from pmvit.measuring.probe import measurable
    from pmvit.pipeline import measured_file

    found = {kind_of(each): each for each in map(read_measured, measured or ())}
    if measure_data is None or "scored" in found:
        opt.refuse("nothing is scored: expected with --measure-data and without --measured scores", scoring)
    network = open_model(model, making, device)
    names = None if methods == "all" else opt.names_in(methods)
    images = None
    if measure_data is not None:
        how: dict[str, Any] = {
            "scored": ScoreConfig(**scoring),
            "measured": MergeCostConfig(),
            "adaptive": MetricConfig(),
        }
        for name, kind in OURS.items():
            if kind not in found and (names is None or name in names) and kind in measurable(host_of(network)):
                file = measured_file(output or Path(), kind)
                found[kind] = measured_on(measure_data, how[kind], network, file, reading)
        images = open_loader(network, measure_data, shuffle=True, **asdict(opt.ReadingOptions(**reading)))
    missing = [KINDS[kind].title for kind in OURS.values() if kind not in found] + ["images"] * (images is None)
    if names is None and missing:
        why = "give --measure-data" if measure_data is None else f"a {type(network).__name__} has none"
        console.warn(f"what needs {', '.join(missing)} is left out: {why}")
    evidence: dict[str, Any] = {
        "scores": found.get("scored"),
        "merge_costs": found.get("measured"),
        "metric": found.get("adaptive"),
    }
    result = pmvit.compare(
        network,
        open_images(network, data, reading, limit),
        gflops=_budgets("--gflops", gflops),
        methods=names,
        **evidence,
        images=images,
        others={str(path): pmvit.load(path, device=device) for path in given_models or ()},
        exports=exports,
        runtimes=[] if runtime == "none" else opt.names_in(runtime),
        batches=opt.batch_sizes(batch),
        rounds=rounds,
        threads=threads,
    )
    return _shown(result, output)


def _budgets(option: str, texts: str) -> list[float]:
    """Numbers above 0 that were given with commas."""
    try:
        found = [float(text) for text in opt.names_in(texts)]
    except ValueError:
        found = []
    if not found or not all(0 < budget < float("inf") for budget in found):
        raise PmvitError(f"{option}: expected numbers above 0 with commas, as in 0.9,0.7; got {texts!r}")
    return found


def _shown(result: "Results", output: Path | None) -> dict[str, Any]:
    """Write results, print them, and return them as data."""
    if output is not None:
        result.write(output)
    console.table(result.columns(), result.cells(), left=("variant",))
    document: dict[str, Any] = json.loads(result.to_json())
    return document


@opt.verb
def curve(
    model: opt.ModelName,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="A folder for JSON, Markdown, a chart and the chosen plan.")
    ],
    planning: Annotated[PlanOptions, opt.Fields(PlanConfig, but=("keep", "gflops", "flops_share"))],
    measuring: opt.Measuring,
    speed: opt.Speed,
    making: opt.Making,
    reading: opt.Reading,
    data: opt.MaybeData = None,
    val: opt.Validation = None,
    measured: Annotated[Path | None, typer.Option(help="What `pmvit measure` wrote, instead of --data.")] = None,
    method: opt.PlanMethod = None,
    keep: Annotated[
        str | None, typer.Option(help="Shares of the tokens to keep, with commas.", show_default="0.9,0.8,...,0.3")
    ] = None,
    gflops: Annotated[str | None, typer.Option(help="Or what each is to cost, in GFLOPs (MACs), with commas.")] = None,
    limit: opt.Limit = None,
    device: opt.Device = "cpu",
) -> dict[str, Any]:
    """Measure accuracy against latency over several budgets from one measurement, and choose one of them.

    --max-drop chooses the fastest that loses no more points (1 by default), --speedup the best that is so fast. Plans
    are made from what --data gives, or --measured or, if MODEL is a compressed one, its own folder. The chosen one is
    written, too: pmvit compress MODEL --plan takes it.
    """
    import pmvit
    from pmvit.measuring import kind_of, measure_config, read_measured
    from pmvit.pipeline import measured_file
    from pmvit.planning.adaptive import AdaptivePlan
    from pmvit.planning.planner import plan_by

    if data is not None and measured is not None:
        raise PmvitError("expected one of --data and --measured, to make plans from; got both")
    if data is None:
        opt.refuse("nothing is measured without --data", measuring)
    else:
        data, val = split_folders(data, val)
    if val is None:
        raise PmvitError("expected --val, images to measure accuracy on; or folders train and val below --data")
    speedup, max_drop = planning.pop("speedup", None), planning.pop("max_drop", None)
    planning["method"], planning["gflops"] = method, 1.0  # a budget of no account
    config = PlanConfig.of(**planning)
    network = open_model(model, making, device)
    if data is not None:
        how = measure_config(network, method or config.measurement, measuring)
        found = measured_on(data, how, network, measured_file(output, kind_of(how)), reading)
    else:
        found = read_measured(measured) if measured is not None else _measured_beside(network, Path(model))
    result = pmvit.curve(
        network,
        open_images(network, val, reading, limit),
        found,
        keep=None if keep is None else _budgets("--keep", keep),
        gflops=None if gflops is None else _budgets("--gflops", gflops),
        plan_config=config,
        speedup=speedup,
        max_drop=max_drop,
        **speed,
    )
    document = _shown(result, output)
    told = result.environment["chosen by"]
    if result.chosen is None:
        console.warn(f"none is {told}: no plan is chosen")
        return {**document, "plan": None}
    budget: dict[str, Any] = {"gflops": None, **result.chosen.budget}
    chosen = plan_by(replace(config, **budget), found)
    file = output / ("plan.safetensors" if isinstance(chosen, AdaptivePlan) else "plan.json")
    chosen.save(file)
    console.print(f"chosen ({told}): {result.chosen.name}, {file}")
    return {**document, "plan": file}


def _measured_beside(model: "nn.Module", path: Path) -> "Measured":
    """What the plan of a saved model was made from: an adaptive one has it with it, others in their folder."""
    from pmvit.compression import compression_of
    from pmvit.measuring import read_measured
    from pmvit.pipeline import measured_file
    from pmvit.planning.adaptive import AdaptivePlan

    compression = compression_of(model)
    if compression is not None and isinstance(compression.what, AdaptivePlan):
        return compression.what.metric
    kinds: tuple[Measurement, ...] = ("measured", "scored")
    files = (measured_file(path, kind) for kind in kinds)
    file = next((file for file in files if file.exists()), None)
    if file is None:
        raise PmvitError(
            f"expected --data to measure on, or --measured; there is neither, and none was found at {path}"
        )
    return read_measured(file)


@opt.verb
def export(
    model: opt.Saved,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")],
    budget: opt.Budget,
    img_size: Annotated[
        str | None,
        typer.Option(help="Sides of its images, in pixels, with commas: one file each; else that it was saved with."),
    ] = None,
    to: Annotated[Runtime | None, typer.Option(help="The runtime; by the file's ending if left out.")] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="The one batch size the file is for.", show_default="any")
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", help="Images to compare on, and to calibrate on with --int8.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1, help="Use so many images at most.", show_default="8; 16 for an adaptive plan, 256 with --int8"
        ),
    ] = None,
    int8: Annotated[bool, typer.Option("--int8", help="Quantise to eight bits (onnx, openvino).")] = False,
    threads: opt.Threads = None,
    device: Annotated[str, typer.Option(help="cpu, where every runtime can be compared.")] = "cpu",
) -> dict[str, Any]:
    """Write a model for a runtime; done means that it was loaded back there and gave the same as PyTorch.

    With --keep, --gflops or --flops-share, a model with an adaptive plan gets another budget than it was saved with.
    Files for several --img-size have the size in their names, as in model-384.onnx.
    """
    if device != "cpu":
        raise PmvitError(
            f"--device: expected cpu, got {device}: what is written is compared there, by ONNX Runtime's CPU provider "
            "and the like, and runs wherever its runtime does"
        )
    sizes = [None] if img_size is None else opt.whole_numbers("--img-size", [img_size])
    how: dict[str, Any] = {"to": to, "batch": batch, "limit": limit, "int8": int8, "threads": threads}
    written = []
    for side in sizes:
        file = output if len(sizes) == 1 else output.with_stem(f"{output.stem}-{side}")
        written.append(_export(model, file, side, budget, data, how))
    return written[0] if len(written) == 1 else {"files": written}


def _export(
    model: Path, output: Path, side: int | None, budget: PlanOptions, data: str | None, how: dict[str, Any]
) -> dict[str, Any]:
    """Write one file of a saved model, for images of one size, and say what came out."""
    import pmvit
    from pmvit.data.opening import open_loader

    network = pmvit.load(model, img_size=side, **budget)
    images = None if data is None else open_loader(network, data, labels=False, batch_size=8, workers=0, shuffle=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it warns of is said below, in one line
        result = pmvit.export(network, output, images=images, **how)
    for trial in result.tried:
        kept = " (kept)" if trial.kept else ""
        console.print(f"eight bits, {trial.way}: same top-1 on {trial.agreement:.1%}, {trial.megabytes:.1f} MB{kept}")
    kind = f"{result.runtime}, eight bits" if result.int8 else result.runtime
    console.print(
        f"{result.path}: {kind}, {result.megabytes:.1f} MB. Compared with PyTorch on {result.images} images: largest "
        f"error of a logit {result.max_error:.1e} of the largest, same top-1 on {result.agreement:.1%}."
    )
    if result.warning is not None:
        console.warn(result.warning)
    return asdict(result)


@opt.verb
def benchmark(
    model: opt.Saved,
    budget: opt.Budget,
    img_size: opt.Side = None,
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
    original: opt.Original = None,
    device: opt.Device = "cpu",
    output: opt.ResultFolder = None,
) -> dict[str, Any]:
    """Measure speed side by side: all variants take turns in one run, on the same images and threads.

    With --keep, --gflops or --flops-share, a model with an adaptive plan gets another budget than it was saved with.
    """
    import pmvit
    from pmvit.runtime.bench.run import overhead

    network = pmvit.load(model, device=device, img_size=img_size, **budget)
    sizes = opt.batch_sizes(batch)
    if in_place:
        ignored = {"against": against, "runtime": runtime, "memory": memory, "original": original}
        opt.refuse("not beside --overhead, which has one runtime and its own variants", ignored)
        return _shown(overhead(network, batch=sizes[-1], rounds=rounds, threads=threads, device=device), output)
    result = pmvit.benchmark(
        network,
        against=opt.names_in(against or AGAINST),
        runtimes=opt.names_in(runtime or EAGER),
        batches=sizes,
        rounds=rounds,
        threads=threads,
        memory=memory is not False,
        original=original,
        device=device,
    )
    document = _shown(result, output)
    console.print(f"speed-ups are over {result.environment['original']}")
    return document
