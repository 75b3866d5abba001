"""Options of `finetune`, `calibrate` and `run`, and presets of them."""

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from pmvit.config.base import check_choices, expect
from pmvit.errors import PmvitError

if TYPE_CHECKING:
    from typing_extensions import Unpack

Learn = Literal["group", "dense"]  # what fine-tuning may change of M and R
Scheduler = Literal["cosine", "tanh", "poly", "step", "multistep"]
MatrixSchedule = Literal["frozen", "learnable", "learnable+frozen"]
MixedPrecision = Literal["no", "fp16", "bf16"]
Preset = Literal["deit_tiny", "deit_small", "mae_base", "swin_tiny", "segmenter", "calibrate", "quick"]


class FinetuneOptions(TypedDict, total=False):
    """Keywords of `finetune` and `calibrate`: fields of `FinetuneConfig`."""

    epochs: int
    batch_size: int
    accumulate: int
    optimizer: str
    lr: float
    min_lr: float
    warmup_epochs: float
    scheduler: Scheduler
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


@dataclass(frozen=True)
class FinetuneConfig:
    """How a compressed model is fine-tuned. The defaults are the paper's, with light augmentation.

    Attributes:
        epochs: Passes over the training images.
        batch_size: Images a step, over all processes and all forward passes of the step.
        accumulate: Forward and backward passes a step; raise it if a step does not fit into memory.
        optimizer: One of timm's optimizers.
        lr: Learning rate at its highest, for `batch_size` images a step.
        min_lr: Learning rate at the end.
        warmup_epochs: Epochs in which the learning rate rises from a hundredth of `lr`.
        scheduler: One of timm's schedulers that follow the step alone.
        weight_decay: On weights of two and more dimensions; never on biases, norms, M and R.
        clip: Largest norm of the gradient; 0 for no limit.
        ema: Decay of the moving average of the weights, which is then what is evaluated and saved; 0 for none.
        alpha: Weight of the divergence from the teacher (Eq. 11); 0 for none.
        temperature: Of both distributions in that divergence, which is multiplied by its square.
        labels: Whether labels are used. Without them the loss is the divergence from the teacher alone.
        label_smoothing: Share of the label that is spread over all classes.
        token_alpha: Weight of token-level distillation; 0 for none.
        token_blocks: The blocks whose output tokens are compared; none named, the last one.
        matrices: Whether M and R learn: never, always, or until `freeze_matrices_after` epochs are over (Table VII).
        freeze_matrices_after: Epochs in which M and R learn; if not given, two thirds of all, 40 of 60 in the paper.
        matrix_lr_factor: Learning rate of M and R as a multiple of that of the weights.
        crop_scale: Smallest and largest share of an image that a random crop shows; (1, 1) for no random crop.
            Models that label pixels have `resize_scale` instead.
        resize_scale: With masks: smallest and largest size an image is resized to before it is cropped, as a multiple
            of the one that just covers the crop.
        hflip: Probability that an image is mirrored.
        color_jitter: Strength of colour changes, where `auto_augment` is off; 0 for none.
        auto_augment: A policy of timm, as in `rand-m9-mstd0.5-inc1`; none if not given.
        random_erasing: Probability that a part of an image is erased.
        mixup: Alpha of mixup; 0 for none.
        cutmix: Alpha of cutmix; 0 for none.
        cpu: Train on the CPU even where there is a GPU.
        mixed_precision: Of the forward pass; if not given, what `accelerate` is configured to.
        channels_last: Memory format of images and weights; faster for hosts with convolutions on GPUs.
        compile: Compile model and teacher with `torch.compile`.
        seed: Of everything random: the same seed gives the same run.
        workers: Processes that read images, for each training process.
        checkpoint_every: Steps between checkpoints within an epoch; one is also written after every epoch.
        keep_checkpoints: How many of the last checkpoints are kept.
        log_with: Trackers of accelerate beside `metrics.jsonl`, with commas: tensorboard, wandb, mlflow, trackio, ...;
            or all that are installed.
    """

    epochs: int = 60
    batch_size: int = 256
    accumulate: int = 1
    optimizer: str = "adamw"
    lr: float = 1e-4
    min_lr: float = 1e-6
    warmup_epochs: float = 0.0
    scheduler: Scheduler = "cosine"
    weight_decay: float = 1e-3
    clip: float = 1.0
    ema: float = 0.0
    alpha: float = 0.6
    temperature: float = 1.0
    labels: bool = field(default=True, metadata={"off": "label-free"})
    label_smoothing: float = 0.0
    token_alpha: float = 0.0
    token_blocks: tuple[int, ...] = ()
    matrices: MatrixSchedule = "learnable+frozen"
    freeze_matrices_after: int | None = None
    matrix_lr_factor: float = 1.0
    crop_scale: tuple[float, float] = (0.35, 1.0)
    resize_scale: tuple[float, float] = (0.5, 2.0)
    hflip: float = 0.5
    color_jitter: float = 0.0
    auto_augment: str | None = None
    random_erasing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    cpu: bool = False
    mixed_precision: MixedPrecision | None = None
    channels_last: bool = field(default=False, metadata={"off": "channels-first"})
    compile: bool = False
    seed: int = 0
    workers: int = 2
    checkpoint_every: int = 500
    keep_checkpoints: int = 2
    log_with: str | None = None

    def __post_init__(self) -> None:
        check_choices(self)
        at_least_one = ("epochs", "batch_size", "accumulate", "checkpoint_every", "keep_checkpoints")
        rates = ("lr", "min_lr", "warmup_epochs", "weight_decay", "alpha", "token_alpha", "matrix_lr_factor")
        not_negative = (*rates, "clip", "color_jitter", "mixup", "cutmix", "workers", "seed", "freeze_matrices_after")
        for name in at_least_one:
            expect(self, name, getattr(self, name) >= 1, "1 or more")
        for name in not_negative:
            expect(self, name, (getattr(self, name) or 0) >= 0, "0 or more")
        for name in ("label_smoothing", "hflip", "random_erasing"):
            expect(self, name, 0 <= getattr(self, name) <= 1, "a share from 0 to 1")
        expect(self, "temperature", self.temperature > 0, "more than 0")
        expect(self, "ema", 0 <= self.ema < 1, "a decay between 0 and 1")
        shares = len(self.crop_scale) == 2 and 0 < self.crop_scale[0] <= self.crop_scale[1] <= 1
        expect(self, "crop_scale", shares, "two shares above 0, the smaller one first")
        multiples = len(self.resize_scale) == 2 and 0 < self.resize_scale[0] <= self.resize_scale[1]
        expect(self, "resize_scale", multiples, "two multiples above 0, the smaller one first")
        if self.batch_size % self.accumulate:
            raise PmvitError(
                f"expected a batch_size that accumulate divides; got {self.batch_size} and {self.accumulate}"
            )
        if not self.labels and (self.mixup or self.cutmix or self.label_smoothing):
            raise PmvitError(
                "labels=False leaves nothing to mix or smooth: mixup, cutmix and label_smoothing must be 0"
            )

    @property
    def learnable_epochs(self) -> int:
        """For how many epochs M and R learn."""
        if self.matrices == "frozen":
            return 0
        if self.matrices == "learnable":
            return self.epochs
        after = self.freeze_matrices_after
        return min(self.epochs, round(self.epochs * 2 / 3) if after is None else after)

    @property
    def needs_teacher(self) -> bool:
        """Whether a teacher would have any influence."""
        return self.alpha > 0 or self.token_alpha > 0 or not self.labels

    @classmethod
    def preset(cls, name: str, **options: "Unpack[FinetuneOptions]") -> "FinetuneConfig":
        """One of the presets, with other values where `options` say so."""
        if name not in PRESETS:
            raise PmvitError(f"expected one of the presets {', '.join(PRESETS)}; got {name!r}")
        known = {each.name for each in fields(cls)}
        if unknown := sorted(set(options) - known):
            raise PmvitError(f"unknown option {unknown[0]!r}; expected some of {', '.join(sorted(known))}")
        return replace(cls(), **{**PRESETS[name], **options})


# 60 epochs of AdamW at 1e-4 with weight decay 1e-3 in batches of 256, matrices learnable for 40 (the defaults), and
# alpha by model: section IV of the paper. It says nothing of augmentation: DeiT's own is used.
_DEIT_AUGMENTATION: dict[str, Any] = {
    "crop_scale": (0.08, 1.0),
    "auto_augment": "rand-m9-mstd0.5-inc1",
    "random_erasing": 0.25,
    "mixup": 0.8,
    "cutmix": 1.0,
    "label_smoothing": 0.1,
}
PRESETS: dict[str, dict[str, Any]] = {
    "deit_tiny": {**_DEIT_AUGMENTATION, "alpha": 0.4},
    "deit_small": {**_DEIT_AUGMENTATION, "alpha": 0.6},
    "mae_base": {**_DEIT_AUGMENTATION, "alpha": 0.8},
    "swin_tiny": {**_DEIT_AUGMENTATION, "alpha": 0.6},
    "segmenter": {"alpha": 1.0, "epochs": 40, "batch_size": 8, "color_jitter": 0.5},
    "calibrate": {  # a thousand images are few: more steps or a higher rate learn them by heart
        "labels": False,
        "epochs": 2,
        "batch_size": 25,
        "lr": 3e-5,
        "min_lr": 0.0,
        "warmup_epochs": 0.25,
        "weight_decay": 0.0,
        "matrices": "frozen",
        "checkpoint_every": 20,
    },
    "quick": {"alpha": 1.0, "epochs": 10, "batch_size": 32, "warmup_epochs": 0.5, "checkpoint_every": 50},
}
