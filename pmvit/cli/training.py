"""Train a compressed model: `calibrate`, `finetune`, and `run` for everything in one go."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pmvit.cli import options as opt
from pmvit.cli.common import (
    FINETUNE_OPTIONS,
    MEASURE_OPTIONS,
    PLAN_OPTIONS,
    app,
    join_processes,
    measure_options,
    meter,
    open_model,
    pairs,
    print_broken,
    refuse,
    split_folders,
    training_device,
)
from pmvit.cli.compression import PlanMethod
from pmvit.cli.screen import console, fail, print_json
from pmvit.config import FinetuneConfig, PlanConfig
from pmvit.config.training import Preset
from pmvit.errors import PmvitError
from pmvit.saving.commands import remember_command

if TYPE_CHECKING:
    from pmvit.evaluation.validation import AnyEvaluation
    from pmvit.pipeline import RunResults

CALIBRATE_OPTIONS = opt.options_of(
    FinetuneConfig.preset("calibrate"), only=("epochs", "batch_size", "lr", "hflip", "seed", "workers")
)
PresetName = Annotated[Preset | None, typer.Option("--preset", help="Other defaults, which options override.")]


def _chosen(options: dict[str, Any], device: str | None) -> dict[str, Any]:
    """Fields of a `FinetuneConfig` that were given."""
    return {**opt.given(options, FinetuneConfig), **({"cpu": True} if device == "cpu" else {})}


def _config(preset: Preset | None, chosen: dict[str, Any]) -> FinetuneConfig:
    return FinetuneConfig.preset(preset, **chosen) if preset is not None else FinetuneConfig(**chosen)


def _absolute(path: str | Path | None) -> str | None:
    """A path that is found again from elsewhere; what is no local path stays as it is."""
    return None if path is None else str(Path(path).resolve()) if Path(path).exists() else str(path)


@app.command()
@opt.with_options(CALIBRATE_OPTIONS)
def calibrate(
    model: opt.Saved,
    data: opt.Data,
    output: opt.Output,
    val: Annotated[str | None, typer.Option("--val", help="Images to compare with the original on.")] = None,
    teacher: opt.Teacher = None,
    distill: Annotated[bool, typer.Option("--distill/--biases-only", help="After the biases, or only these.")] = True,
    epoch_images: opt.EpochImages = None,
    device: opt.TrainingDevice = None,
    as_json: opt.AsJson = False,
    **options: Any,
) -> None:
    """Bring a compressed model nearer to its original in minutes, without labels; the same command again goes on."""
    import pmvit
    from pmvit.training.calibration import EPOCH_IMAGES

    if model.exists() and model.resolve() == output.resolve():
        raise PmvitError(f"the calibrated model would overwrite the one it is made of: choose another folder: {output}")
    if not distill:
        ignored = {**options, "epoch_images": epoch_images, "val": val}
        refuse(ignored, ignored, "expected without --biases-only, which learns nothing more")
    config = FinetuneConfig.preset("calibrate", **_chosen(options, device))
    _, is_main = join_processes(training_device(device))
    result = pmvit.calibrate(
        open_model(str(model), opt.ModelOptions(), "cpu"),
        data,
        val=val,
        teacher=None if teacher is None else open_model(teacher, opt.ModelOptions(), "cpu"),
        config=config,
        output=output,
        resume=True,
        distill=distill,
        epoch_images=epoch_images or EPOCH_IMAGES,
    )
    if is_main and as_json:
        print_json(asdict(result))
    elif is_main:
        if distill:
            _print_tuned(result.best, result.best_epoch, config.epochs)
        console.print(f"calibrated model: {output}")


@app.command()
@opt.with_options(FINETUNE_OPTIONS, opt.ModelOptions)
def finetune(
    model: Annotated[str | None, typer.Argument(help="What pmvit saved; or an architecture, to tune it first.")] = None,
    data: opt.MaybeData = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder for the run.")] = None,
    val: opt.Validation = None,
    teacher: opt.Teacher = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder, as it was started.")] = None,
    preset: PresetName = None,
    epoch_images: opt.EpochImages = None,
    first_label: opt.FirstLabel = None,
    device: opt.TrainingDevice = None,
    as_json: opt.AsJson = False,
    **options: Any,
) -> None:
    """Fine-tune with self-distillation; can be stopped and resumed at any time, and run by many processes."""
    import pmvit
    from pmvit.training.record import RunRecord

    chosen, making = _chosen(options, device), opt.given(options, opt.ModelOptions)
    begins: dict[str, Any] = {
        "model": model,
        "data": data,
        "output": output,
        "val": val,
        "teacher": teacher,
        "preset": preset,
    }
    begins |= {"epoch_images": epoch_images, "first_label": first_label, **making}
    if resume is not None:
        if known := [name for name, value in begins.items() if value is not None]:
            raise PmvitError(f"{', '.join(known)}: not beside --resume, which goes on as the run was started")
        record = RunRecord.read(resume)
        command, output = record.command, resume
        if not command:
            raise PmvitError(f"the run in {resume} was started from Python: resume it there, with resume=True")
        for name in ("data", "val"):
            if str(command[name]).startswith("pipe:"):
                raise PmvitError(
                    f"{resume}: its {name} is a command to run ({command[name]}), which a file may not name: resume it "
                    "from Python, with resume=True"
                )
        config = replace(record.config, **chosen)
    elif model is None or data is None or output is None:
        raise PmvitError("expected a model, --data and -o; or --resume with the folder of a run")
    else:
        if Path(model).exists() and Path(model).resolve() == output.resolve():
            raise PmvitError(f"the run would overwrite the model it begins with: choose another folder than {output}")
        train, val = split_folders(data, val)
        command = {
            "model": _absolute(model),
            "weights": _absolute(making.get("weights")),
            "model_arg": making.get("model_arg"),
            "data_arg": making.get("data_arg"),
            "data": _absolute(train),
            "val": _absolute(val),
            "teacher": _absolute(teacher),
            "epoch_images": epoch_images,
            "segmenter": {name: making[name] for name in ("size", "decoder", "classes") if name in making},
            "first_label": first_label,
        }
        config = _config(preset, chosen)
    _, is_main = join_processes(training_device("cpu" if config.cpu else device))
    file = Path(command["weights"]) if command["weights"] is not None else None
    making = {"model_arg": command["model_arg"], "data_arg": command["data_arg"], **command.get("segmenter", {})}
    result = pmvit.finetune(
        open_model(command["model"], opt.ModelOptions(weights=file, **making), "cpu"),
        train=command["data"],
        val=command["val"],
        teacher=None if command["teacher"] is None else open_model(command["teacher"], opt.ModelOptions(), "cpu"),
        config=config,
        output=output,
        resume=resume is not None,
        epoch_images=command["epoch_images"],
        first_label=command.get("first_label"),
        command=command,
    )
    if not is_main:
        return
    remember_command(output, after=resume or Path(command["model"]))
    if as_json:
        print_json(asdict(result))
        return
    _print_tuned(result.best, result.best_epoch, config.epochs)
    if result.broken:
        from pmvit.data.loaders import Broken

        print_broken(Broken(result.broken), what="left out of training")
    console.print(f"tuned model: {output}")


def _print_tuned(best: "AnyEvaluation | None", epoch: int, epochs: int) -> None:
    if best is None:
        console.print(f"{epochs} epochs done; no images to validate on were opt.given")
    else:
        console.print(f"best after epoch {epoch} of {epochs}: {best.headline} on {best.images} images")


@app.command()
@opt.with_options(PLAN_OPTIONS, MEASURE_OPTIONS, FINETUNE_OPTIONS, opt.ModelOptions)
def run(
    model: opt.ModelName,
    data: opt.Data,
    output: opt.Output,
    val: opt.Validation = None,
    method: PlanMethod = None,
    preset: PresetName = None,
    learn: opt.Learning = None,
    epoch_images: opt.EpochImages = None,
    first_label: opt.FirstLabel = None,
    device: opt.TrainingDevice = None,
    as_json: opt.AsJson = False,
    **options: Any,
) -> None:
    """Measure, plan, compress, fine-tune and evaluate; the same command again goes on where it was."""
    import pmvit

    train, val = split_folders(data, val)
    if val is None:
        raise PmvitError(f"expected --val, or folders train and val below {data}: something to evaluate on")
    making = opt.made(opt.ModelOptions, options)
    config = _config(preset, _chosen(options, device))
    planning = PlanConfig.of(method=method, **opt.given(options, PlanConfig))
    where, is_main = join_processes(training_device("cpu" if config.cpu else device))
    network = open_model(model, making, where)
    try:
        results = pmvit.run(
            network,
            train=train,
            val=val,
            output=output,
            plan_config=planning,
            finetune_config=config,
            measure_options=measure_options(options, method),
            learn=learn or "group",
            arguments=pairs("--model-arg", making.model_arg),
            epoch_images=epoch_images,
            first_label=first_label,
            meter=meter(network),
        )
    except KeyboardInterrupt:
        fail("stopped; the same command goes on where it was", code=130)
    if not is_main:
        return
    remember_command(output, after=Path(model))
    if as_json:
        print_json({"evaluations": {k: asdict(v) for k, v in results.evaluations.items()}, "gflops": results.gflops})
        return
    _print_stages(results)
    console.print(f"tuned model: {output}")


def _print_stages(results: "RunResults") -> None:
    """Original, compressed and tuned side by side, by what was measured."""
    from pmvit.numbers.measures import MEASURES
    from pmvit.numbers.tables import format_number

    rows = {stage: asdict(result) for stage, result in results.evaluations.items()}
    shown = ("top1", "top5", "miou", "pixel_accuracy", "agreement", "kl", "cosine")
    names = [name for name in shown if any(row.get(name) is not None for row in rows.values())]
    titles = (f"{next(iter(rows.values()))['images']} images", "GFLOPs", *(MEASURES[name].title for name in names))
    cells = [
        (stage, format_number(results.gflops[stage], ".3f"), *(MEASURES[name].text(row[name]) for name in names))
        for stage, row in rows.items()
    ]
    console.table(titles, cells)
