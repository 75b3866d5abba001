"""The fields of `FinetuneConfig` as keywords, so that an editor completes them and a type checker refuses others."""

from typing import TypedDict

from pmvit.training.config import MatrixSchedule, MixedPrecision


class FinetuneOptions(TypedDict, total=False):
    """What `finetune` and `calibrate` take beside a configuration; see `FinetuneConfig`."""

    epochs: int
    batch_size: int
    accumulate: int
    optimizer: str
    lr: float
    min_lr: float
    warmup_epochs: float
    scheduler: str
    weight_decay: float
    clip: float
    ema: float
    alpha: float
    temperature: float
    labels: bool
    label_smoothing: float
    token_alpha: float
    token_blocks: tuple[int, ...]
    matrices: MatrixSchedule
    freeze_matrices_after: int | None
    matrix_lr_factor: float
    crop_scale: tuple[float, float]
    resize_scale: tuple[float, float]
    hflip: float
    color_jitter: float
    auto_augment: str | None
    random_erasing: float
    mixup: float
    cutmix: float
    cpu: bool
    mixed_precision: MixedPrecision | None
    channels_last: bool
    compile: bool
    seed: int
    workers: int
    checkpoint_every: int
    keep_checkpoints: int
    log_with: str | None
