"""`finetune` and `calibrate`: put a run together from a model, images and options, and go."""

import copy
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import ProjectConfiguration
from torch import nn

from pmvit._system import avoid_broken_amx, keep_freed_memory, this_process, wait_for_all
from pmvit.compression import compression_of, decompress, record_tuning
from pmvit.config import FinetuneConfig, FinetuneOptions, with_keywords
from pmvit.config.training import Preset
from pmvit.data.batches import first_images
from pmvit.data.loaders import prepare
from pmvit.data.opening import ImageData, as_loader, open_images, open_validation
from pmvit.data.sources import has_pixel_labels, is_dataset
from pmvit.data.training import LoaderData, SourceData, TrainingData
from pmvit.data.transforms import Preparation, color_mode, training_transform
from pmvit.errors import PmvitError, first_line
from pmvit.evaluation.reference import Reference
from pmvit.hosts import host_of
from pmvit.hosts.modes import check_trainable
from pmvit.locks import only_writer
from pmvit.saving.card import CardDetails
from pmvit.saving.models import check_savable, load, save
from pmvit.training.biases import correct_biases
from pmvit.training.learner import matrix_parameters
from pmvit.training.record import FILE, RunRecord, has_begun
from pmvit.training.trackers import FOLDER as TRACKERS
from pmvit.training.trackers import tracker_names
from pmvit.training.trainer import LAST, Finetuned, Trainer
from pmvit.wrapping import Tuned, fingerprint

if TYPE_CHECKING:
    from typing_extensions import Unpack

EPOCH_IMAGES = 1000  # of calibration
BIAS_IMAGES = 256


@with_keywords(FinetuneConfig)
def finetune(
    model: nn.Module,
    *,
    train: ImageData,
    val: ImageData | None = None,
    teacher: nn.Module | None = None,
    preset: Preset | None = None,
    output: str | Path | None = None,
    resume: bool = False,
    epoch_images: int | None = None,
    first_label: int | None = None,
    progress: bool = True,
    command: dict[str, Any] | None = None,
    **options: "Unpack[FinetuneOptions]",
) -> Finetuned:
    """Fine-tune a compressed model with self-distillation (Eq. 11), in place.

    The model is left in evaluation mode with the weights after the last epoch (their moving average, if there is one);
    the best ones are in `output`.

    Run by several processes (`accelerate-launch`), they share the images of each step; `output` then has to be a folder
    that all of them see. An uncompressed model is fine-tuned as well, without a teacher unless one is given. A model
    that labels pixels learns from images with masks, and from the teacher's distribution at every pixel.

    Args:
        model: What `compress` returned.
        train: The training images, as `as_loader` knows them: a path as `pmvit finetune --data` takes it, a `Dataset`,
            or a loader of `(images, labels)` with a length, whose batches are taken as they come: `accumulate` of them
            per step.
        val: Images to validate on after every epoch, likewise.
        teacher: The original; if none is given and the model is compressed, the model itself, uncompressed.
        preset: Other defaults, which `options` override.
        output: A folder for the best model, the last one (`last/`), checkpoints, `metrics.jsonl` and `curves.png`.
        resume: Go on from the last checkpoint in `output`, if there is one.
        epoch_images: How many images make an epoch, if not all; a stream that cannot be counted needs it.
        first_label: The number of the first class in plain masks.
        progress: Show a progress bar.
        command: JSON data to keep with the run, for whoever resumes it.
        options: How to fine-tune: the fields of `FinetuneConfig`.

    Raises:
        StoppedError: After SIGINT or SIGTERM, once a checkpoint is written.
        PmvitError: If something does not fit, the loss is not finite, or a checkpoint cannot be written.
    """
    config = FinetuneConfig(**options) if preset is None else FinetuneConfig.preset(preset, **options)
    data: dict[str, Any] = {"train": train, "val": val, "epoch_images": epoch_images, "first_label": first_label}
    run: dict[str, Any] = {"output": output, "resume": resume, "progress": progress, "command": command}
    check_trainable(model)
    learns = config.needs_teacher and (teacher is not None or compression_of(model) is not None)
    return _tune(model, _teacher_of(model, teacher) if learns else None, config, "fine-tuned", **data, **run)


def _teacher_of(model: nn.Module, given: nn.Module | None) -> Reference:
    """What a model learns from, and what that is: the teacher that was given, else its own weights, uncompressed."""
    compression = compression_of(model)
    teacher = decompress(copy.deepcopy(model)) if given is None else given
    is_original = compression is not None and compression.original.fingerprint == fingerprint(teacher)
    return Reference(teacher, "original" if is_original else "uncompressed" if given is None else "other")


def _tune(
    model: nn.Module,
    teacher: Reference | None,
    config: FinetuneConfig,
    tuned: Tuned,
    *,
    train: Any,
    val: Any,
    output: str | Path | None,
    resume: bool,
    progress: bool,
    epoch_images: int | None = None,
    first_label: int | None = None,
    command: dict[str, Any] | None = None,
) -> Finetuned:
    """`finetune`, whatever the model is called afterwards."""
    tracker_names(config.log_with)
    if config.mixed_precision == "bf16":
        avoid_broken_amx()
    folder = Path(output) if output is not None else None
    if folder is not None:
        check_savable(model)  # better found out now than after the last epoch that the model cannot be saved
    record_tuning(model, tuned)
    record = RunRecord.of(model, None if teacher is None else teacher.model, config, command or {})
    accelerator = _accelerator(model, config, folder)
    with only_writer(folder) if folder is not None and accelerator.is_main_process else nullcontext():
        if folder is not None:
            before = record.check_against(folder, resume)
            if before is not None and before.result is not None:  # it had come to its end
                model.load_state_dict(load(folder / LAST).state_dict())
                return Finetuned.from_json(before.result, f"{folder / FILE}: result")
        if accelerator.device.type == "cpu":
            keep_freed_memory()
        process = (accelerator.process_index, accelerator.num_processes)
        data = training_data(model, train, config, process, epoch_images, first_label)
        validation = open_validation(model, val, config.labels, config.workers, process, first_label)
        return Trainer(model, teacher, data, accelerator, record, folder).run(validation, progress)


@with_keywords(FinetuneConfig.preset("calibrate"))
def calibrate(
    model: nn.Module,
    data: ImageData,
    *,
    val: ImageData | None = None,
    teacher: nn.Module | None = None,
    output: str | Path | None = None,
    resume: bool = False,
    distill: bool = True,
    epoch_images: int = EPOCH_IMAGES,
    progress: bool = True,
    **options: "Unpack[FinetuneOptions]",
) -> Finetuned:
    """Let a compressed model learn to predict what its original predicts, in place, on about a thousand images.

    First the biases are corrected in closed form (`correct_biases`), which takes seconds. Then the model learns as in
    `finetune`, without labels and with other defaults, made for few images and few minutes: those of the preset
    `calibrate`. What is not explained here is as `finetune` has it. Of more images than `epoch_images`, every epoch
    takes others.

    Args:
        model: What `compress` returned.
        data: Images without labels (labels are not read), as `finetune` takes them.
        val: Images to compare with the original on after every epoch, likewise.
        distill: Whether the model also learns from its original after the biases are corrected.
        epoch_images: Images per epoch at most.
        options: What differs from the preset: fields of `FinetuneConfig`.
    """
    if compression_of(model) is None:
        raise PmvitError("expected a compressed model to calibrate; this one is not, and has nothing to come back to")
    config = FinetuneConfig.preset("calibrate", **options)
    check_trainable(model)
    tracker_names(config.log_with)
    if output is not None:
        check_savable(model)
        if not distill and has_begun(Path(output)):
            raise PmvitError(
                f"{output} holds a fine-tuned model, which this one would overwrite: choose another folder"
            )
    learns_from = _teacher_of(model, teacher)
    if not (resume and output is not None and has_begun(Path(output))):
        loader = as_loader(model, data, labels=False, shuffle=True)
        images = first_images(loader, BIAS_IMAGES).to(next(model.parameters()).device)
        correct_biases(model, learns_from.model, images)
    if distill:
        run: dict[str, Any] = {"output": output, "resume": resume, "epoch_images": epoch_images, "progress": progress}
        return _tune(model, learns_from, config, "calibrated", train=data, val=val, **run)
    record_tuning(model, "calibrated")
    if output is not None and this_process()[0] == 0:
        save(model, output, card=CardDetails(settings={"calibrate": {"distill": False}}))
    wait_for_all()
    return Finetuned(steps=0, best_epoch=0, best=None, last=None)


def _accelerator(model: nn.Module, config: FinetuneConfig, folder: Path | None) -> Accelerator:
    freezes_midway = 0 < config.learnable_epochs < config.epochs and bool(matrix_parameters(model))
    if config.log_with is not None and folder is None:
        raise PmvitError("log_with needs an output folder to write to")
    try:
        return Accelerator(
            cpu=config.cpu,
            mixed_precision=config.mixed_precision,
            log_with=tracker_names(config.log_with) or None,
            project_config=ProjectConfiguration(folder, None if folder is None else str(folder / TRACKERS)),
            kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=freezes_midway)],
        )
    except (ImportError, ValueError) as error:
        raise PmvitError(f"accelerate cannot be set up as asked ({first_line(error)})") from None


def training_data(
    model: nn.Module,
    train: ImageData,
    config: FinetuneConfig,
    process: tuple[int, int],
    epoch_images: int | None,
    first_label: int | None = None,
) -> TrainingData:
    """The batches of this process: of a loader as they come, of a path or a `Dataset` as the configuration says."""
    if not (isinstance(train, (str, Path)) or is_dataset(train)):
        return LoaderData(as_loader(model, train), seed=config.seed, process=process)
    passes = config.accumulate * process[1]
    if config.batch_size % passes:
        raise PmvitError(
            f"expected a batch_size that {process[1]} processes with {config.accumulate} passes each can share; "
            f"got {config.batch_size}"
        )
    data_config = host_of(model).data_config()
    source = open_images(model, train, labels=config.labels, first_label=first_label)
    transform: Any
    if has_pixel_labels(source):
        for name in ("auto_augment", "random_erasing", "mixup", "cutmix"):
            if getattr(config, name):
                raise PmvitError(f"{name} is for models that label images; this one labels pixels: leave it off")
        how: dict[str, Any] = {"scale": config.resize_scale, "hflip": config.hflip, "color_jitter": config.color_jitter}
        transform = partial(Preparation(data_config).augmented_pair, **how)
    else:
        names = ("crop_scale", "hflip", "color_jitter", "auto_augment")
        transform = training_transform(data_config, **{name: getattr(config, name) for name in names})
    options = {"batch": config.batch_size // passes, "workers": config.workers, "seed": config.seed}
    read = partial(prepare, transform, color_mode(data_config))
    return SourceData(source, read, process, epoch_images, **options)
