"""What learns (model, optimizer, schedule, moving average), from what, and the loss of a batch."""

from contextlib import ExitStack
from typing import Any

import torch
from accelerate import Accelerator
from timm.data.mixup import Mixup
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn

from pmvit.config import FinetuneConfig
from pmvit.data.batches import TrainingBatch, check_labels
from pmvit.data.transforms import BatchTransform
from pmvit.errors import PmvitError, first_line
from pmvit.hosts import host_of
from pmvit.hosts.making import one_line
from pmvit.hosts.modes import evaluation_mode
from pmvit.hosts.outputs import as_module, gives_logits, logits_of, num_classes_of
from pmvit.prune_merge import TokenMatrices
from pmvit.saving.models import load_tensors
from pmvit.training.loss import finetune_loss, tapped_tokens
from pmvit.training.record import Checkpoint, join_tensors, select, split_tensors
from pmvit.wrapping import TrainingPass, extra_loss


class Learner:
    """A model and what changes its weights; those that count are `evaluated`'s, the moving average if there is one."""

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
        self.model, self.teacher, self.config, self.accelerator = model, teacher, config, accelerator
        self._mix: Any = None
        if config.mixup or config.cutmix:
            num_classes = num_classes_of(model)
            if num_classes is None:
                raise PmvitError("mixup and cutmix need a classifier; this model has no classes")
            smoothing = config.label_smoothing
            self._mix = Mixup(config.mixup, config.cutmix, label_smoothing=smoothing, num_classes=num_classes)
        self._until_closed = ExitStack()
        self._ask: Any = None
        if teacher is not None:
            self._until_closed.enter_context(evaluation_mode(teacher))
            asked = as_module(teacher.to(accelerator.device))
            self._ask = torch.compile(asked) if config.compile else asked
        model.to(accelerator.device)
        if config.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's types
        set_learnable(model, config.learnable_epochs > 0)
        self._tokens: dict[int, Tensor] = {}
        self._teacher_tokens: dict[int, Tensor] = {}
        if config.token_alpha and teacher is not None:
            taps = [tapped_tokens(each, config.token_blocks or (-1,)) for each in (model, teacher)]
            self._tokens, self._teacher_tokens = map(self._until_closed.enter_context, taps)
        groups = parameter_groups(model, config)
        self.trained = [parameter for group in groups for parameter in group["params"]]
        try:
            optimizer = create_optimizer_v2(groups, opt=config.optimizer, lr=config.lr, weight_decay=0.0)
        except (KeyError, ValueError, RuntimeError) as error:
            raise PmvitError(
                f"expected one of timm's optimizers, got {config.optimizer!r} ({first_line(error)})"
            ) from None
        self._schedule, _ = create_scheduler_v2(
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
        self._ema = ModelEmaV3(model, decay=config.ema, use_warmup=True) if config.ema else None
        self.evaluated: nn.Module = model if self._ema is None else self._ema.module
        self.prepared, self._optimizer = accelerator.prepare(as_module(model), optimizer)
        self._forward = torch.compile(self.prepared) if config.compile else self.prepared
        self._finish_images = BatchTransform(host_of(model).data_config(), config.random_erasing, accelerator.device)

    def losses(self, batch: TrainingBatch) -> dict[str, Tensor]:
        """The teacher's answer, the model's, and how far apart they are (Eq. 11): `loss` and its parts."""
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
        losses = finetune_loss(self.config, logits, labels, taught, self._tokens, targets, self._has_classes)
        wanted = taught if labels is None else labels  # labels say what is right, or the teacher where there are none
        if wanted is None or wanted.is_floating_point():
            wanted = (logits if wanted is None else wanted).argmax(-1)
        extra = extra_loss(self.model, TrainingPass(images, logits, wanted))
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

    def schedule(self, step: int, epoch: int) -> dict[str, float]:
        """Set the learning rates of a step (from 0), and say which they are."""
        self._schedule.step_update(step)
        groups = self._optimizer.param_groups
        rates = {"lr": groups[0]["lr"]}
        if groups[-1]["name"] == "matrices":
            rates["matrix_lr"] = 0.0 if epoch >= self.config.learnable_epochs else groups[-1]["lr"]
        return rates

    def update(self, step: int, norm: Tensor) -> None:
        """Clip the gradient, which has this norm, change the weights, and let the moving average follow."""
        if self.config.clip:
            torch.nn.utils.clip_grads_with_norm_(self.trained, self.config.clip, norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._ema is not None:
            self._ema.update(self.model, step=step + 1)

    def snapshot(self, place: dict[str, Any]) -> Checkpoint:
        """Everything that is needed to go on from here, the place in the run included."""
        named: dict[str, dict[str, Tensor]] = {"optimizer": {}, "model": self.model.state_dict()}
        optimizer = split_tensors(self._optimizer.optimizer.state_dict(), named["optimizer"])
        if self._ema is not None:
            named["ema"] = self._ema.module.state_dict()
        tensors = {f"{part}/{name}": value for part, values in named.items() for name, value in values.items()}
        scaler = self.accelerator.scaler.state_dict() if self.accelerator.scaler is not None else None
        return tensors, {**place, "optimizer": optimizer, "scaler": scaler}

    def restore(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Go back to where a snapshot was taken."""
        load_tensors(self.model, select(tensors, "model/"), "the checkpoint")
        if self._ema is not None:
            load_tensors(self._ema.module, select(tensors, "ema/"), "the checkpoint's moving average")
        with one_line("the checkpoint's state of the optimizer does not fit"):
            self._optimizer.optimizer.load_state_dict(join_tensors(state["optimizer"], select(tensors, "optimizer/")))
            if self.accelerator.scaler is not None and state["scaler"] is not None:
                self.accelerator.scaler.load_state_dict(state["scaler"])

    def close(self) -> None:
        """Take everything off the model again that was put on it."""
        self._until_closed.close()
        set_learnable(self.model, True)
        self.accelerator.unwrap_model(self.prepared, keep_fp32_wrapper=False)
        self.model.eval()


def matrix_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The weights of M and R of every compressed block."""
    wrappers = [module for module in model.modules() if isinstance(module, TokenMatrices)]
    return [weights for module in wrappers for weights in (module.merge_weights, module.reconstruct_weights)]


def parameter_groups(model: nn.Module, config: FinetuneConfig) -> list[dict[str, Any]]:
    """Weights with decay, those without (biases, norms, what the host says), and M and R; each group has a `name`.

    The schedule sets the learning rate of every group: that of a group is the scheduled one times its `lr_scale`.
    """
    matrices = matrix_parameters(model)
    own_group = {id(parameter) for parameter in matrices}
    exempt: set[str] = set(getattr(model, "no_weight_decay", set)())
    learning = [(n, p) for n, p in model.named_parameters() if id(p) not in own_group and p.requires_grad]
    decayed = [parameter for name, parameter in learning if parameter.ndim >= 2 and name not in exempt]
    free = [parameter for name, parameter in learning if parameter.ndim < 2 or name in exempt]
    groups = [
        {"name": "weights", "params": decayed, "weight_decay": config.weight_decay, "lr_scale": 1.0},
        {"name": "no decay", "params": free, "weight_decay": 0.0, "lr_scale": 1.0},
        {"name": "matrices", "params": matrices, "weight_decay": 0.0, "lr_scale": config.matrix_lr_factor},
    ]
    return [group for group in groups if group["params"]]


def set_learnable(model: nn.Module, learnable: bool) -> None:
    """Let M and R learn, or stop them (Table VII): a frozen matrix has no gradient, so that no optimizer touches it."""
    for parameter in matrix_parameters(model):
        parameter.requires_grad_(learnable)
        if not learnable:
            parameter.grad = None
