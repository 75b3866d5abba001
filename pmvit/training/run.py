"""`finetune`: put a run together from a model, images and a configuration, and go."""

import copy
from collections.abc import Iterable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator, DistributedDataParallelKwargs
from torch import nn

from pmvit._system import avoid_broken_amx, keep_freed_memory
from pmvit.compression import compression_of, decompress
from pmvit.config import FinetuneConfig, FinetuneOptions, with_keywords
from pmvit.data.segmentation import PairSource
from pmvit.data.training import LoaderData, SourceData, TrainingData
from pmvit.data.transforms import PairAugmentation, Preparation, color_mode, training_transform
from pmvit.errors import PmvitError
from pmvit.hosts import host_of
from pmvit.hosts.modes import check_trainable
from pmvit.loading import open_images, open_validation
from pmvit.saving.models import check_savable, load
from pmvit.training.matrices import matrix_parameters
from pmvit.training.record import RunRecord
from pmvit.training.trainer import LAST, Finetuned, Trainer

if TYPE_CHECKING:
    from typing_extensions import Unpack


@with_keywords(FinetuneConfig)
def finetune(
    model: nn.Module,
    *,
    train: str | Path | Iterable[Any],
    val: str | Path | Iterable[Any] | None = None,
    teacher: nn.Module | None = None,
    config: FinetuneConfig | None = None,
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

    Run by several processes (`accelerate launch`), they share the images of each step; `output` then has to be a folder
    that all of them see. An uncompressed model is fine-tuned as well, without a teacher unless one is given. A model
    that labels pixels learns from images with masks, and from the teacher's distribution at every pixel.

    Args:
        model: What `compress` returned.
        train: The training images: a path as `pmvit finetune --data` takes it, or a loader of `(images, labels)` with a
            length, whose batches are taken as they come: `config.accumulate` of them per step.
        val: Images to validate on after every epoch, likewise.
        teacher: The original; if none is given and the model is compressed, the model itself, uncompressed.
        config: How to fine-tune; `options` are its fields and override it.
        output: A folder for the best model, the last one (`last/`), checkpoints, `metrics.jsonl` and `curves.png`.
        resume: Go on from the last checkpoint in `output`, if there is one.
        epoch_images: How many images make an epoch, if not all; a stream that cannot be counted needs it.
        first_label: The number of the first class in plain masks.
        progress: Show a progress bar.
        command: JSON data to keep with the run, for whoever resumes it.

    Raises:
        StoppedError: After SIGINT or SIGTERM, once a checkpoint is written.
        PmvitError: If something does not fit, the loss is not finite, or a checkpoint cannot be written.
    """
    config = replace(config or FinetuneConfig(), **options)
    check_trainable(model)
    if config.mixed_precision == "bf16":
        avoid_broken_amx()
    folder = Path(output) if output is not None else None
    if folder is not None:
        check_savable(model)  # better found out now than after the last epoch that the model cannot be saved
    if not config.needs_teacher:
        teacher = None
    elif teacher is None and compression_of(model) is not None:
        teacher = decompress(copy.deepcopy(model))
    record = RunRecord.of(model, teacher, config, command or {})
    if folder is not None:
        before = record.check_against(folder, resume)
        if before is not None and before.result is not None:
            return _finished(model, folder, before.result)
    accelerator = _accelerator(model, config, folder)
    if accelerator.device.type == "cpu":
        keep_freed_memory()
    process = (accelerator.process_index, accelerator.num_processes)
    data = training_data(model, train, config, process, epoch_images, first_label)
    validation = open_validation(model, val, config.labels, config.workers, process, first_label)
    return Trainer(model, teacher, data, config, accelerator, record, folder).run(validation, progress)


def _finished(model: nn.Module, folder: Path, result: dict[str, Any]) -> Finetuned:
    """The result of a run that had come to its end; the model gets the weights the run left in it."""
    model.load_state_dict(load(folder / LAST).state_dict())
    return Finetuned.from_json(result)


def _accelerator(model: nn.Module, config: FinetuneConfig, folder: Path | None) -> Accelerator:
    freezes_midway = 0 < config.learnable_epochs < config.epochs and bool(matrix_parameters(model))
    if config.log_with is not None and folder is None:
        raise PmvitError("log_with needs an output folder to write to")
    if config.log_with == "tensorboard" and not any(find_spec(name) for name in ("tensorboard", "tensorboardX")):
        raise PmvitError("log_with: tensorboard is not installed: pip install 'pmvit[tensorboard]'")
    try:
        return Accelerator(
            cpu=config.cpu,
            mixed_precision=config.mixed_precision,
            log_with=config.log_with,
            project_dir=folder,
            kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=freezes_midway)],
        )
    except (ImportError, ValueError) as error:
        raise PmvitError(f"accelerate cannot be set up as asked ({str(error).splitlines()[0]})") from None


def training_data(
    model: nn.Module,
    train: Any,
    config: FinetuneConfig,
    process: tuple[int, int],
    epoch_images: int | None,
    first_label: int | None = None,
) -> TrainingData:
    """The batches of this process: of a loader as they come, of a path as the configuration says."""
    if not isinstance(train, (str, Path)):
        return LoaderData(train, seed=config.seed, process=process)
    passes = config.accumulate * process[1]
    if config.batch_size % passes:
        raise PmvitError(
            f"expected a batch_size that {process[1]} processes with {config.accumulate} passes each can share; "
            f"got {config.batch_size}"
        )
    data_config = host_of(model).data_config()
    source = open_images(model, train, labels=config.labels, first_label=first_label)
    transform: Any
    if isinstance(source, PairSource):
        for name in ("auto_augment", "random_erasing", "mixup", "cutmix"):
            if getattr(config, name):
                raise PmvitError(f"{name} is for models that label images; this one labels pixels: leave it off")
        preparation = Preparation.of(data_config)
        transform = PairAugmentation(preparation, config.resize_scale, config.hflip, config.color_jitter)
    else:
        transform = training_transform(
            data_config,
            crop_scale=config.crop_scale,
            hflip=config.hflip,
            color_jitter=config.color_jitter,
            auto_augment=config.auto_augment,
        )
    return SourceData(
        source,
        transform,
        color_mode(data_config),
        batch=config.batch_size // passes,
        workers=config.workers,
        seed=config.seed,
        process=process,
        epoch_images=epoch_images,
    )
