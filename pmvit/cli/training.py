"""Train a compressed model: `finetune`, and `run` for everything in one go."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from pmvit.cli.common import (
    app,
    console,
    fail,
    follow_paper,
    meter,
    open_model,
    pairs,
    plan_options_of,
    print_json,
    processes,
    settle_method,
    split_folders,
    training_device,
)
from pmvit.cli.options import (
    CALIBRATE_OPTIONS,
    DATA_HELP,
    FINETUNE_OPTIONS,
    MASK_OPTIONS,
    PLAN_OPTIONS,
    SCORE_OPTIONS,
    SEGMENTER_OPTIONS,
    AsJson,
    Data,
    DataArguments,
    EpochImages,
    Learning,
    ModelArguments,
    ModelName,
    Output,
    Paper,
    Preset,
    Saved,
    Validation,
    WeightsFile,
    given,
    with_options,
)
from pmvit.commands import remember_command
from pmvit.errors import PmvitError

if TYPE_CHECKING:
    from pmvit.evaluation.validation import AnyEvaluation
    from pmvit.pipeline import RunResults
    from pmvit.prune_merge import Learn
    from pmvit.training import FinetuneConfig


def _config(preset: str | None, options: dict[str, Any]) -> "FinetuneConfig":
    from pmvit.training import FinetuneConfig

    chosen = _chosen(options)
    return FinetuneConfig.preset(preset, **chosen) if preset is not None else FinetuneConfig(**chosen)


def _chosen(options: dict[str, Any]) -> dict[str, Any]:
    chosen = given(options, FINETUNE_OPTIONS)
    if chosen.get("auto_augment") == "none":
        chosen["auto_augment"] = None
    if "token_blocks" in chosen:
        chosen["token_blocks"] = tuple(chosen["token_blocks"])
    return chosen


def _absolute(path: str | None) -> str | None:
    """A path that is found again from elsewhere; what is no local path stays as it is."""
    return str(Path(path).resolve()) if path is not None and Path(path).exists() else path


@app.command()
@with_options(FINETUNE_OPTIONS, SEGMENTER_OPTIONS, MASK_OPTIONS)
def finetune(
    model: Annotated[str | None, typer.Argument(help="What pmvit saved; or an architecture, to tune it first.")] = None,
    data: Annotated[str | None, typer.Option("--data", help="Training images, as for score.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder for the run.")] = None,
    val: Validation = None,
    teacher: Annotated[str | None, typer.Option(help="Another teacher than the model uncompressed.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder, as it was started.")] = None,
    preset: Preset = None,
    weights: WeightsFile = None,
    model_arg: ModelArguments = None,
    data_arg: DataArguments = None,
    epoch_images: EpochImages = None,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Fine-tune with self-distillation; can be stopped and resumed at any time, and run by many processes."""
    if resume is None and (model is None or data is None or output is None):
        raise PmvitError("expected a model, --data and -o; or --resume with the folder of a run")

    import pmvit
    from pmvit.training.record import RunRecord

    if resume is not None:
        if any(value is not None for value in (model, data, output, val, teacher, preset, weights, epoch_images)):
            raise PmvitError(
                "--resume goes on as the run was started; model, images, teacher and preset are known to it"
            )
        record = RunRecord.read(resume)
        command, output = record.command, resume
        if not command:
            raise PmvitError(f"the run in {resume} was started from Python: resume it there, with resume=True")
        config = replace(record.config, **_chosen(options))
    else:
        train, val = split_folders(cast("str", data), val)
        if Path(cast("str", model)).exists() and Path(cast("str", model)).resolve() == cast("Path", output).resolve():
            raise PmvitError(f"the run would overwrite the model it begins with: choose another folder than {output}")
        command = {
            "model": _absolute(model),
            "weights": _absolute(str(weights)) if weights is not None else None,
            "model_arg": model_arg,
            "data_arg": data_arg,
            "data": _absolute(train),
            "val": _absolute(val),
            "teacher": _absolute(teacher),
            "epoch_images": epoch_images,
            "segmenter": given(options, SEGMENTER_OPTIONS),
            "first_label": options["first_label"],
        }
        config = _config(preset, options)
    here = processes(training_device(config.cpu))
    file = Path(command["weights"]) if command["weights"] is not None else None
    network = open_model(
        command["model"], file, command["model_arg"], command["data_arg"], "cpu", command.get("segmenter")
    )
    other = None if command["teacher"] is None else open_model(command["teacher"], None, None, None, "cpu")
    result = pmvit.finetune(
        network,
        train=command["data"],
        val=command["val"],
        teacher=other,
        config=config,
        output=output,
        resume=resume is not None,
        epoch_images=command["epoch_images"],
        first_label=command.get("first_label"),
        command=command,
    )
    if not here.is_main:
        return
    remember_command(cast("Path", output), after=resume or Path(command["model"]))
    if as_json:
        print_json(asdict(result))
        return
    _print_tuned(result.best, result.best_epoch, config.epochs)
    if result.broken:
        from pmvit.data.loaders import Broken

        console.print(Broken(result.broken).summary(what="left out of training"), style="yellow")
    console.print(f"tuned model: {output}")


@app.command()
@with_options(CALIBRATE_OPTIONS)
def calibrate(
    model: Saved,
    data: Annotated[str, typer.Option("--data", help=f"Images; labels are not read. {DATA_HELP}")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the calibrated model.")],
    val: Annotated[str | None, typer.Option("--val", help="Images to compare with the original on.")] = None,
    teacher: Annotated[str | None, typer.Option(help="Another teacher than the model uncompressed.")] = None,
    distill: Annotated[bool, typer.Option("--distill/--biases-only", help="After the biases, or only these.")] = True,
    epoch_images: Annotated[int, typer.Option(min=1, help="Images an epoch at most.")] = 1000,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Bring a compressed model nearer to its original in minutes, without labels; the same command again goes on."""
    import pmvit
    from pmvit.training import FinetuneConfig

    if model.exists() and model.resolve() == output.resolve():
        raise PmvitError(f"the calibrated model would overwrite the one it is made of: choose another folder: {output}")
    chosen = given(options, CALIBRATE_OPTIONS)
    here = processes(training_device(chosen.get("cpu", False)))
    result = pmvit.calibrate(
        open_model(str(model), None, None, None, "cpu"),
        data,
        val=val,
        teacher=None if teacher is None else open_model(teacher, None, None, None, "cpu"),
        output=output,
        resume=True,
        distill=distill,
        epoch_images=epoch_images,
        **chosen,
    )
    if here.is_main and as_json:
        print_json(asdict(result))
    elif here.is_main:
        if distill:
            _print_tuned(result.best, result.best_epoch, FinetuneConfig.preset("calibrate", **chosen).epochs)
        console.print(f"calibrated model: {output}")


def _print_tuned(best: "AnyEvaluation | None", epoch: int, epochs: int) -> None:
    if best is None:
        console.print(f"{epochs} epochs done; no images to validate on were given")
    else:
        console.print(f"best after epoch {epoch} of {epochs}: {best.headline} on {best.images} images")


@app.command()
@with_options(PLAN_OPTIONS, SCORE_OPTIONS, FINETUNE_OPTIONS, SEGMENTER_OPTIONS, MASK_OPTIONS)
def run(
    model: ModelName,
    data: Data,
    output: Output,
    val: Validation = None,
    preset: Preset = None,
    weights: WeightsFile = None,
    model_arg: ModelArguments = None,
    data_arg: DataArguments = None,
    paper: Paper = False,
    learn: Learning = "group",
    epoch_images: EpochImages = None,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Score, plan, compress, fine-tune and evaluate; the same command again goes on where it was."""
    import pmvit

    train, val = split_folders(data, val)
    if val is None:
        raise PmvitError(f"expected --val, or folders train and val below {data}: something to evaluate on")
    paper = settle_method(options, paper)
    follow_paper(options, paper)
    config = _config(preset, options)
    here = processes(training_device(config.cpu))
    network = open_model(model, weights, model_arg, data_arg, here.device, given(options, SEGMENTER_OPTIONS))
    try:
        results = pmvit.run(
            network,
            train=train,
            val=val,
            output=output,
            score_config=pmvit.ScoreConfig(**given(options, SCORE_OPTIONS)),
            plan_config=pmvit.PlanConfig(**plan_options_of(options, paper)),
            finetune_config=config,
            learn=cast("Learn", learn),
            arguments=pairs("--model-arg", model_arg),
            epoch_images=epoch_images,
            first_label=options["first_label"],
            measure=meter(network),
        )
    except KeyboardInterrupt:
        fail("stopped; the same command goes on where it was", code=130)
    if not here.is_main:
        return
    remember_command(output, after=Path(model))
    if as_json:
        print_json({"evaluations": {k: asdict(v) for k, v in results.evaluations.items()}, "gflops": results.gflops})
        return
    _print_stages(results)
    console.print(f"tuned model: {output}")


def _print_stages(results: "RunResults") -> None:
    """Original, compressed and tuned side by side, by what was measured."""
    from pmvit.evaluation.measures import MEASURES
    from pmvit.evaluation.tables import format_number

    rows = {stage: asdict(result) for stage, result in results.evaluations.items()}
    shown = ("top1", "top5", "miou", "pixel_accuracy", "agreement", "kl", "cosine")
    names = [name for name in shown if any(row.get(name) is not None for row in rows.values())]
    titles = (f"{next(iter(rows.values()))['images']} images", "GFLOPs", *(MEASURES[name].title for name in names))
    cells = [
        (stage, format_number(results.gflops[stage], ".3f"), *(MEASURES[name].text(row[name]) for name in names))
        for stage, row in rows.items()
    ]
    console.table(titles, cells)
