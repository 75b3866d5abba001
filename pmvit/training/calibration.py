"""`calibrate`: bring a compressed model back to its original in minutes, without labels."""

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from pmvit.compression import compression_of, decompress
from pmvit.config import FinetuneConfig, FinetuneOptions, with_keywords
from pmvit.data.batches import first_images
from pmvit.errors import PmvitError
from pmvit.hosts.modes import check_trainable
from pmvit.loading import open_loader
from pmvit.saving.models import check_savable, save
from pmvit.training.biases import correct_biases
from pmvit.training.record import has_begun
from pmvit.training.run import finetune
from pmvit.training.trainer import Finetuned

if TYPE_CHECKING:
    from typing_extensions import Unpack

EPOCH_IMAGES = 1000
BIAS_IMAGES = 256


@with_keywords(FinetuneConfig)
def calibrate(
    model: nn.Module,
    data: str | Path | Iterable[Any],
    *,
    val: str | Path | Iterable[Any] | None = None,
    teacher: nn.Module | None = None,
    config: FinetuneConfig | None = None,
    output: str | Path | None = None,
    resume: bool = False,
    distill: bool = True,
    epoch_images: int = EPOCH_IMAGES,
    progress: bool = True,
    **options: "Unpack[FinetuneOptions]",
) -> Finetuned:
    """Let a compressed model learn to predict what its original predicts, in place, on about a thousand images.

    First the biases are corrected in closed form (`correct_biases`), which takes seconds. Then comes `finetune` without
    labels and with the preset `calibrate`, made for few images and few minutes. Of more images than `epoch_images`,
    every epoch takes others.

    Args:
        model: What `compress` returned.
        data: Images without labels (labels are not read): a path as `finetune` takes it, or a loader with a length.
        val: Images to compare with the original on after every epoch, likewise.
        teacher: The original; if none is given, the model itself, uncompressed.
        config: How to learn, in place of the preset; `options` are its fields and override it.
        output: A folder for the model and what it takes to resume.
        resume: Go on from the last checkpoint in `output`, if there is one.
        distill: Whether to go on after the biases.
        epoch_images: Images per epoch at most.
        progress: Show a progress bar.

    Raises:
        StoppedError: After SIGINT or SIGTERM, once a checkpoint is written.
        PmvitError: If the model is not compressed, or something does not fit.
    """
    if compression_of(model) is None:
        raise PmvitError("expected a compressed model to calibrate; this one is not, and has nothing to come back to")
    check_trainable(model)
    folder = Path(output) if output is not None else None
    if folder is not None:
        check_savable(model)
    teacher = teacher if teacher is not None else decompress(copy.deepcopy(model))
    if not (resume and folder is not None and has_begun(folder)):
        loader = open_loader(model, data, labels=False, shuffle=True) if isinstance(data, (str, Path)) else data
        images = first_images(loader, BIAS_IMAGES).to(next(model.parameters()).device)
        correct_biases(model, teacher, images)
    if not distill:
        if folder is not None:
            save(model, folder)
        return Finetuned(steps=0, best_epoch=0, best=None, last=None)
    return finetune(
        model,
        train=data,
        val=val,
        teacher=teacher,
        config=config or FinetuneConfig.preset("calibrate"),
        output=output,
        resume=resume,
        epoch_images=epoch_images,
        progress=progress,
        **options,
    )
