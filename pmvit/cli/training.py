"""Train a compressed model: `calibrate`, `finetune`, and `run` for everything in one go."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from pmvit.cli import options as opt
from pmvit.cli.common import join_processes, open_model, pairs, split_folders, warn_of
from pmvit.cli.resuming import resumed
from pmvit.cli.screen import console, fail
from pmvit.config import FinetuneConfig, FinetuneOptions, PlanConfig, SpeedConfig
from pmvit.config.measuring import PAPER_SCORES
from pmvit.config.training import Preset
from pmvit.errors import PmvitError

if TYPE_CHECKING:
    from pmvit.config import MeasureOptions
    from pmvit.evaluation.validation import AnyEvaluation

CALIBRATED = ("epochs", "batch_size", "lr", "hflip", "seed", "workers")
MADE_WITH = ("img_size", "decoder", "classes")
PresetName = Annotated[Preset | None, typer.Option("--preset", help="Other defaults, which options override.")]


def _begin(config: FinetuneConfig, device: str | None) -> tuple[str, bool]:
    """Join other processes; where training computes (on a GPU if there is one, unless told), and if this one prints."""
    import torch

    if device not in (None, "cpu", "cuda", "mps"):
        raise PmvitError(f"--device: expected cpu, cuda or mps to train on; got {device}: see `accelerate-launch`")
    found = "cuda" if torch.cuda.is_available() else "cpu"
    return join_processes("cpu" if config.cpu else device or found)


def _config(start: FinetuneConfig, tuning: FinetuneOptions, device: str | None) -> FinetuneConfig:
    """A configuration with what was given in its place."""
    if device == "cpu":
        tuning["cpu"] = True
    return replace(start, **tuning)


def _start(preset: Preset | None) -> FinetuneConfig:
    return FinetuneConfig() if preset is None else FinetuneConfig.preset(preset)


def _absolute(path: str | Path | None) -> str | None:
    """A path that is found again from elsewhere; what is no local path stays as it is."""
    return None if path is None else str(Path(path).resolve()) if Path(path).exists() else str(path)


@opt.verb
def calibrate(
    model: opt.Saved,
    data: opt.Data,
    output: opt.Output,
    tuning: Annotated[FinetuneOptions, opt.Fields(FinetuneConfig.preset("calibrate"), only=CALIBRATED)],
    val: Annotated[str | None, typer.Option("--val", help="Images to compare with the original on.")] = None,
    teacher: opt.Teacher = None,
    distill: Annotated[bool, typer.Option("--distill/--biases-only", help="After the biases, or only these.")] = True,
    epoch_images: opt.EpochImages = None,
    device: opt.TrainingDevice = None,
) -> dict[str, Any] | None:
    """Bring a compressed model nearer to its original in minutes, without labels; the same command again goes on."""
    import pmvit
    from pmvit.training.run import EPOCH_IMAGES

    if model.exists() and model.resolve() == output.resolve():
        raise PmvitError(f"the calibrated model would overwrite the one it is made of: choose another folder: {output}")
    if not distill:
        ignored = {**tuning, "epoch_images": epoch_images, "val": val}
        opt.refuse("expected without --biases-only, which learns nothing more", ignored)
    config = _config(_start("calibrate"), tuning, device)
    _begin(config, device)
    result = pmvit.calibrate(
        open_model(str(model), {}),
        data,
        val=val,
        teacher=None if teacher is None else open_model(teacher, {}, is_teacher=True),
        output=output,
        resume=True,
        distill=distill,
        epoch_images=epoch_images or EPOCH_IMAGES,
        **vars(config),
    )
    if distill:
        _print_tuned(result.best, result.best_epoch, config.epochs)
    console.print(f"calibrated model: {output}")
    return asdict(result)


@opt.verb
def finetune(
    tuning: opt.Tuning,
    making: opt.Making,
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
) -> dict[str, Any] | None:
    """Fine-tune with self-distillation; can be stopped and resumed at any time, and run by many processes."""
    import pmvit
    from pmvit.data.loaders import Broken

    begins = {"model": model, "data": data, "output": output, "val": val, "teacher": teacher, "preset": preset}
    counts = {"epoch_images": epoch_images, "first_label": first_label}
    if resume is not None:
        train, val = (None, val) if data is None else split_folders(data, val)
        paths = {"model": model, "data": train, "val": val, "teacher": teacher}
        confirmed = {**{name: _absolute(path) for name, path in paths.items()}, "model_arg": making.get("model_arg")}
        others = {**begins, **counts, **making}
        if known := [name for name, value in others.items() if value is not None and name not in confirmed]:
            raise PmvitError(f"{', '.join(known)}: not beside --resume, which goes on as the run was started")
        command, start = resumed(resume, confirmed)
    elif model is None or data is None or output is None:
        raise PmvitError("expected a model, --data and -o; or --resume with the folder of a run")
    else:
        if Path(model).exists() and Path(model).resolve() == output.resolve():
            raise PmvitError(f"the run would overwrite the model it begins with: choose another folder than {output}")
        train, val = split_folders(data, val)
        paths = {"model": model, "weights": making.get("weights"), "data": train, "val": val, "teacher": teacher}
        command = {
            **{name: _absolute(path) for name, path in paths.items()},
            **{name: making.get(name) for name in ("model_arg", "data_arg")},
            **counts,
            "made_with": {name: making[name] for name in MADE_WITH if name in making},
        }
        start = _start(preset)
    config = _config(start, tuning, device)
    folder = resume or output
    _, is_main = _begin(config, device)
    making = {name: command[name] for name in ("weights", "model_arg", "data_arg") if command[name] is not None}
    result = pmvit.finetune(
        open_model(command["model"], {**making, **command.get("made_with", command.get("segmenter", {}))}),
        train=command["data"],
        val=command["val"],
        teacher=None if command["teacher"] is None else open_model(command["teacher"], {}, is_teacher=True),
        output=folder,
        resume=resume is not None,
        epoch_images=command["epoch_images"],
        first_label=command.get("first_label"),
        command=command,
        **vars(config),
    )
    if not is_main or folder is None:
        return None
    _print_tuned(result.best, result.best_epoch, config.epochs)
    warn_of(Broken(result.broken), what="left out of training")
    console.print(f"tuned model: {folder}")
    return asdict(result)


def _print_tuned(best: "AnyEvaluation | None", epoch: int, epochs: int) -> None:
    if best is None:
        console.print(f"{epochs} epoch{'' if epochs == 1 else 's'} done; no images to validate on were given")
    else:
        console.print(f"best after epoch {epoch} of {epochs}: {best.headline} on {best.images} images")


@opt.verb
def run(
    model: opt.ModelName,
    data: opt.Data,
    output: opt.Output,
    planning: opt.Planning,
    measuring: opt.Measuring,
    tuning: opt.Tuning,
    speed: opt.Speed,
    making: opt.Making,
    val: opt.Validation = None,
    method: opt.PlanMethod = None,
    preset: PresetName = None,
    learn: opt.Learning = None,
    epoch_images: opt.EpochImages = None,
    first_label: opt.FirstLabel = None,
    device: opt.TrainingDevice = None,
) -> dict[str, Any] | None:
    """Measure, plan, compress, fine-tune and evaluate; the same command again goes on where it was."""
    import pmvit
    from pmvit.numbers.measures import MEASURES
    from pmvit.numbers.tables import format_number

    train, val = split_folders(data, val)
    if val is None:
        raise PmvitError(f"expected --val, or folders train and val below {data}: something to evaluate on")
    config = _config(_start(preset), tuning, device)
    planning["method"] = method
    plan_config = PlanConfig.of(**planning)
    paper = PAPER_SCORES if method == "paper" else {}
    where, is_main = _begin(config, device)
    network = open_model(model, making, where)
    try:
        results = pmvit.run(
            network,
            train=train,
            val=val,
            output=output,
            plan_config=plan_config,
            finetune_config=config,
            measure_options=cast("MeasureOptions", {**paper, **measuring}),
            learn=learn or "group",
            arguments=pairs("--model-arg", making.get("model_arg")),
            epoch_images=epoch_images,
            first_label=first_label,
            speed=SpeedConfig(**speed) if speed else None,
        )
    except KeyboardInterrupt:
        fail("stopped; the same command goes on where it was", code=130)
    if not is_main:
        return None
    rows = {stage: asdict(result) for stage, result in results.evaluations.items()}
    shown = ("top1", "top5", "miou", "pixel_accuracy", "agreement", "kl", "cosine")
    names = [name for name in shown if any(row.get(name) is not None for row in rows.values())]
    titles = (f"{next(iter(rows.values()))['images']} images", "GFLOPs", *(MEASURES[name].title for name in names))
    cells = [
        (stage, format_number(results.gflops[stage], ".3f"), *(MEASURES[name].text(row[name]) for name in names))
        for stage, row in rows.items()
    ]
    console.table(titles, cells)
    console.print(f"tuned model: {output}")
    return {"evaluations": rows, "gflops": results.gflops}
