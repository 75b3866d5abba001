"""One step of fine-tuning: what learns (model, optimizer, schedule, moving average), from what, and how."""

from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from itertools import islice
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from timm.data.mixup import Mixup
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn

from pmvit.config import FinetuneConfig
from pmvit.data.batches import check_labels
from pmvit.data.seeding import seed_all, seed_for
from pmvit.data.training import TrainingBatch
from pmvit.data.transforms import BatchTransform
from pmvit.errors import PmvitError
from pmvit.hosts import host_of
from pmvit.hosts.modes import evaluation_mode
from pmvit.hosts.outputs import as_module, gives_logits, logits_of
from pmvit.loading import num_classes_of
from pmvit.saving.models import load_tensors
from pmvit.training.checkpoint import Checkpoint, join_tensors, prefixed, select, split_tensors
from pmvit.training.loss import finetune_loss, tapped_tokens
from pmvit.training.matrices import parameter_groups, set_learnable
from pmvit.wrapping import TrainingPass, extra_loss


class Gradient(NamedTuple):
    """What the passes of a step gave, before the weights are changed.

    Attributes:
        losses: Their means, by name.
        norm: Of the gradient of all weights.
        images: How many images this process trained on.
        names: Which these were.
    """

    losses: dict[str, Tensor]
    norm: Tensor
    images: int
    names: list[str]


class Learner:
    """A model and what changes its weights: a step is `compute_gradient`, then `update`.

    Everything a step does follows from its number and the tensors here; how many are done is for the owner to know.
    """

    def __init__(
        self,
        model: nn.Module,
        teacher: nn.Module | None,
        config: FinetuneConfig,
        accelerator: Accelerator,
        steps_per_epoch: int,
    ) -> None:
        if teacher is None and not config.labels:
            raise PmvitError("labels=False learns from a teacher alone; got none")
        self._has_classes = gives_logits(model)
        if config.labels and not self._has_classes:
            raise PmvitError(f"a {type(model).__name__} has no classes to learn labels of: tune it with labels=False")
        self.model = model
        self.config = config
        self.accelerator = accelerator
        self.steps_per_epoch = steps_per_epoch
        self._until_closed = ExitStack()
        device = accelerator.device
        self._mix = self._mixup()
        self.teacher = teacher
        if teacher is not None:
            teacher.to(device)
            self._until_closed.enter_context(evaluation_mode(teacher))
        model.to(device)
        if config.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's types
        set_learnable(model, config.learnable_epochs > 0)
        self._tokens = self._tap(model)
        self._teacher_tokens = self._tap(teacher) if teacher is not None else {}
        groups = parameter_groups(model, config)
        self._trained = [parameter for group in groups for parameter in group["params"]]
        optimizer = _optimizer(groups, config)
        self._schedule = _scheduler(optimizer, config, steps_per_epoch)
        self._ema = ModelEmaV3(model, decay=config.ema, use_warmup=True) if config.ema else None
        self._prepared, self._optimizer = accelerator.prepare(as_module(model), optimizer)
        self._forward = torch.compile(self._prepared) if config.compile else self._prepared
        asked = as_module(teacher) if teacher is not None else None
        self._ask: Any = torch.compile(asked) if config.compile and asked is not None else asked
        data_config = host_of(model).data_config()
        self._finish_images = BatchTransform(data_config, config.random_erasing, device)

    @property
    def evaluated(self) -> nn.Module:
        """The model whose weights count: the moving average if there is one."""
        return self._ema.module if self._ema is not None else self.model

    def _tap(self, model: nn.Module) -> dict[int, Tensor]:
        if not self.config.token_alpha or self.teacher is None:
            return {}
        return self._until_closed.enter_context(tapped_tokens(model, self.config.token_blocks or (-1,)))

    def _mixup(self) -> Any:
        config = self.config
        if not (config.mixup or config.cutmix):
            return None
        num_classes = num_classes_of(self.model)
        if num_classes is None:
            raise PmvitError("mixup and cutmix need a classifier; this model has no classes")
        return Mixup(config.mixup, config.cutmix, label_smoothing=config.label_smoothing, num_classes=num_classes)

    def begin_epoch(self, epoch: int) -> None:
        """Let M and R learn, or stop them, as the schedule has it for this epoch (from 0)."""
        set_learnable(self.model, epoch < self.config.learnable_epochs)
        self.model.train()

    def compute_gradient(self, step: int, batches: Iterator[TrainingBatch]) -> Gradient:
        """Forward and backward on the next batches; `step` (from 0) sets learning rates and random numbers."""
        passes = self.config.accumulate
        epoch, place = divmod(step, self.steps_per_epoch)
        self._schedule.step_update(step)
        means: dict[str, Tensor] = {}
        images, names = 0, []
        for number, batch in enumerate(islice(batches, passes)):
            seed_all(seed_for(self.config.seed, epoch, place * passes + number, self.accelerator.process_index))
            with nullcontext() if number == passes - 1 else self.accelerator.no_sync(self._prepared):
                losses = self._losses(batch)
                self.accelerator.backward(losses["loss"] / passes)
            for name, value in losses.items():
                means[name] = means.get(name, 0.0) + value.detach().float() / passes
            images += len(batch.images)
            names += batch.names
        self.accelerator.unscale_gradients()
        gradients = [parameter.grad for parameter in self._trained if parameter.grad is not None]
        return Gradient(means, torch.nn.utils.get_total_norm(gradients), images, names)

    def update(self, step: int, norm: Tensor) -> None:
        """Clip the gradient, change the weights, and let the moving average follow."""
        if self.config.clip:
            torch.nn.utils.clip_grads_with_norm_(self._trained, self.config.clip, norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._ema is not None:
            self._ema.update(self.model, step=step + 1)

    def _losses(self, batch: TrainingBatch) -> dict[str, Tensor]:
        """The teacher's answer, the model's, and how far apart they are (Eq. 11)."""
        images, labels = self._inputs(batch)
        taught = None
        if self._ask is not None:
            with torch.inference_mode(), self.accelerator.autocast():
                taught = logits_of(self._ask(images))
            taught = taught.clone()  # out of inference mode, so that the loss may keep it for its gradient
        with self.accelerator.autocast():
            logits = logits_of(self._forward(images))
        if taught is not None and taught.shape != logits.shape:
            expected, got = tuple(logits.shape[1:]), tuple(taught.shape[1:])
            raise PmvitError(f"expected a teacher with outputs of shape {expected}, got {got}: is it another model's?")
        targets = {block: tokens.clone() for block, tokens in self._teacher_tokens.items()}
        losses = finetune_loss(
            self.config, logits, labels, taught, self._tokens, targets, has_classes=self._has_classes
        )
        extra = extra_loss(self.model, _last_pass(images, logits, labels, taught))
        return losses if extra is None else {**losses, "loss": losses["loss"] + extra, "method": extra}

    def _inputs(self, batch: TrainingBatch) -> tuple[Tensor, Tensor | None]:
        """Images and labels on the device, normalised, erased and mixed."""
        device = self.accelerator.device
        memory = torch.channels_last if self.config.channels_last else torch.contiguous_format
        images = self._finish_images(batch.images.to(device, non_blocking=True)).contiguous(memory_format=memory)
        if not self.config.labels or batch.labels is None:
            return images, None
        labels = batch.labels.to(device, non_blocking=True)
        if self._mix is None:
            return images, labels
        check_labels(labels, self._mix.num_classes)
        if len(images) % 2:
            raise PmvitError(f"mixup and cutmix pair the images of a batch; got {len(images)}, an odd number")
        mixed: tuple[Tensor, Tensor] = self._mix(images.clone(), labels)
        return mixed

    def is_finite(self, norm: Tensor) -> bool:
        """Whether the gradient can be used; with a loss scaler, it is for the scaler to leave a step out."""
        return self.accelerator.scaler is not None or bool(torch.isfinite(norm))

    def rates(self, step: int) -> dict[str, float]:
        """The learning rates of a step that was just done."""
        epoch = step // self.steps_per_epoch
        groups = self._optimizer.param_groups
        rates = {"lr": groups[0]["lr"]}
        if groups[-1]["name"] == "matrices":
            rates["matrix_lr"] = 0.0 if epoch >= self.config.learnable_epochs else groups[-1]["lr"]
        return rates

    def snapshot(self) -> Checkpoint:
        """Everything that is needed to go on from here, but the number of steps."""
        tensors: dict[str, Tensor] = {}
        optimizer = split_tensors(self._optimizer.optimizer.state_dict(), tensors)
        tensors = prefixed(tensors, "optimizer/") | prefixed(self.model.state_dict(), "model/")
        if self._ema is not None:
            tensors |= prefixed(self._ema.module.state_dict(), "ema/")
        scaler = self.accelerator.scaler.state_dict() if self.accelerator.scaler is not None else None
        return Checkpoint(tensors, {"optimizer": optimizer, "scaler": scaler})

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go back to where a snapshot was taken."""
        tensors, state = checkpoint
        load_tensors(self.model, select(tensors, "model/"), "the checkpoint")
        if self._ema is not None:
            load_tensors(self._ema.module, select(tensors, "ema/"), "the checkpoint's moving average")
        self._optimizer.optimizer.load_state_dict(join_tensors(state["optimizer"], select(tensors, "optimizer/")))
        if self.accelerator.scaler is not None and state["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])

    def finish(self) -> None:
        """Leave in the model the weights that count."""
        if self._ema is not None:
            self.model.load_state_dict(self._ema.module.state_dict())

    def close(self) -> None:
        """Take everything off the model again that was put on it."""
        self._until_closed.close()
        set_learnable(self.model, True)
        self.accelerator.unwrap_model(self._prepared, keep_fp32_wrapper=False)
        self.model.eval()


def _last_pass(images: Tensor, logits: Tensor, labels: Tensor | None, taught: Tensor | None) -> TrainingPass:
    """What a method may learn from: labels say what is right, or the teacher where there are none."""
    wanted = taught if labels is None else labels
    if wanted is not None and wanted.is_floating_point():
        wanted = wanted.argmax(-1)
    return TrainingPass(images, logits, logits.argmax(-1) if wanted is None else wanted)


def _optimizer(groups: list[dict[str, Any]], config: FinetuneConfig) -> torch.optim.Optimizer:
    try:
        return create_optimizer_v2(groups, opt=config.optimizer, lr=config.lr, weight_decay=0.0)
    except (KeyError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise PmvitError(f"expected one of timm's optimizers, got {config.optimizer!r} ({reason})") from None


def _scheduler(optimizer: torch.optim.Optimizer, config: FinetuneConfig, steps_per_epoch: int) -> Scheduler:
    scheduler: Scheduler
    scheduler, _ = create_scheduler_v2(
        optimizer,
        sched=config.scheduler,
        num_epochs=config.epochs,
        min_lr=config.min_lr,
        warmup_lr=config.lr / 100,
        warmup_epochs=config.warmup_epochs,  # type: ignore[arg-type]  # parts of an epoch are steps here
        decay_epochs=max(1, config.epochs // 3),
        decay_milestones=[round(config.epochs * share) for share in (0.6, 0.85)],
        step_on_epochs=False,
        updates_per_epoch=steps_per_epoch,
    )
    return scheduler
