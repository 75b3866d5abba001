"""A run of fine-tuning: what a step does, what an epoch ends with, and what survives a kill."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors import SafetensorError
from timm.data.mixup import Mixup
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn

from pmvit._modes import evaluation_mode
from pmvit.compress import load, load_tensors, save
from pmvit.data.batches import check_labels, unpack
from pmvit.data.seeding import seed_all, seed_for
from pmvit.data.training import BatchTransform, TrainingBatch, TrainingData
from pmvit.errors import PmvitError
from pmvit.evaluation import Evaluation, evaluate
from pmvit.evaluation.classification import pooled
from pmvit.models import adapter_for
from pmvit.progress import Bar
from pmvit.training.checkpoint import (
    Checkpoint,
    Checkpoints,
    join_tensors,
    prefixed,
    select,
    split_tensors,
)
from pmvit.training.config import FinetuneConfig
from pmvit.training.loss import finetune_loss, tapped_tokens
from pmvit.training.matrices import parameter_groups, set_learnable
from pmvit.training.metrics import MetricsLog, draw_curves
from pmvit.training.record import CHECKPOINTS, RunRecord
from pmvit.training.signals import StoppedError, StopSignals

LAST = "last"


@dataclass(frozen=True)
class Finetuned:
    """What came of a run.

    Attributes:
        steps: Steps done, those before a resume included.
        best_epoch: The epoch (from 1) after which validation was best; the last one without validation images.
        best: Validation after that epoch.
        last: Validation after the last epoch.
        broken: Training images that could not be read, and why.
    """

    steps: int
    best_epoch: int
    best: Evaluation | None
    last: Evaluation | None
    broken: dict[str, str] = field(default_factory=dict)


class Trainer:
    """Model, teacher, optimizer and schedule of a run, and what a step does to them.

    The number of steps done is all that changes beside the tensors: learning rate, epoch, place in the data and every
    random choice follow from it. A checkpoint is the tensors, that number and the best validation so far.
    """

    def __init__(
        self,
        model: nn.Module,
        teacher: nn.Module | None,
        data: TrainingData,
        config: FinetuneConfig,
        accelerator: Accelerator,
        folder: Path | None,
    ) -> None:
        self.model = model
        self.data = data
        self.config = config
        self.accelerator = accelerator
        self.folder = folder
        self.step = 0
        self.best: dict[str, Any] | None = None
        self.last: Evaluation | None = None
        self.steps_per_epoch = len(data) // config.accumulate
        if self.steps_per_epoch == 0:
            raise PmvitError(f"expected {config.accumulate} batches or more an epoch, one step; got {len(data)}")
        self._states = ExitStack()
        self._log: MetricsLog | None = None
        device = accelerator.device
        self.teacher = None
        if teacher is not None:
            self.teacher = teacher.to(device)
            self._states.enter_context(evaluation_mode(teacher))
        elif config.labels is False:
            raise PmvitError("labels=False learns from a teacher alone; got none")
        model.to(device)
        if config.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's types
        set_learnable(model, config.learnable_epochs > 0)
        self.tokens = self._tap(model)
        self.teacher_tokens = self._tap(self.teacher) if self.teacher is not None else {}
        groups = parameter_groups(model, config)
        self._trained = [parameter for group in groups for parameter in group["params"]]
        optimizer = _optimizer(groups, config)
        self.schedule, _ = create_scheduler_v2(
            optimizer,
            sched=config.scheduler,
            num_epochs=config.epochs,
            min_lr=config.min_lr,
            warmup_lr=config.lr / 100,
            warmup_epochs=config.warmup_epochs,  # type: ignore[arg-type]  # parts of an epoch are steps here
            decay_epochs=max(1, config.epochs // 3),
            decay_milestones=[round(config.epochs * share) for share in (0.6, 0.85)],
            step_on_epochs=False,
            updates_per_epoch=self.steps_per_epoch,
        )
        self.ema = ModelEmaV3(model, decay=config.ema, use_warmup=True) if config.ema else None
        prepared, self.optimizer = accelerator.prepare(model, optimizer)
        self._sync = prepared
        self._forward = torch.compile(prepared) if config.compile else prepared
        self._ask: Any = torch.compile(self.teacher) if config.compile and self.teacher is not None else self.teacher
        self._mix = self._mixup()
        data_config = adapter_for(model).data_config(model)
        self._finish_images = BatchTransform(data_config, config.random_erasing, device)

    @property
    def total_steps(self) -> int:
        return self.config.epochs * self.steps_per_epoch

    @property
    def evaluated(self) -> nn.Module:
        """The model whose weights count: the moving average if there is one."""
        return self.ema.module if self.ema is not None else self.model

    def _tap(self, model: nn.Module) -> dict[int, Tensor]:
        if not self.config.token_alpha or self.teacher is None:
            return {}
        return self._states.enter_context(tapped_tokens(model, self.config.token_blocks or (-1,)))

    def _mixup(self) -> Any:
        config = self.config
        if not (config.mixup or config.cutmix):
            return None
        num_classes = num_classes_of(self.model)
        if num_classes is None:
            raise PmvitError("mixup and cutmix need a classifier; this model has no classes")
        smoothing = config.label_smoothing
        return Mixup(config.mixup, config.cutmix, label_smoothing=smoothing, num_classes=num_classes)

    # --- a run ---

    def start(self, record: RunRecord) -> None:
        """Go on from the last checkpoint of the folder, if there is one, and begin to write there."""
        if self.folder is None:
            return
        checkpoints = self._checkpoints()
        if (checkpoint := checkpoints.read_latest()) is not None:
            self.restore(checkpoint)
            self._check_best()
        if self.accelerator.is_main_process:
            record.write(self.folder)
            self._log = MetricsLog(self.folder, self.step)
        if self.config.log_with is not None:
            self.accelerator.init_trackers("tensorboard" if self.config.log_with == "tensorboard" else "pmvit")
        self._record = record
        self.accelerator.wait_for_everyone()

    def run(self, validation: Any, progress: bool) -> Finetuned:
        show = progress and self.accelerator.is_main_process
        self._signals = StopSignals()
        with self._signals, Bar("fine-tune", self.total_steps, done=self.step, show=show) as bar:
            while self.step < self.total_steps:
                epoch = self.step // self.steps_per_epoch
                set_learnable(self.model, epoch < self.config.learnable_epochs)
                self._train(epoch, bar)
                self._end_epoch(epoch + 1, validation)
        return self._finish()

    def close(self) -> None:
        """Take everything off the model again that the run put on it."""
        self.data.close()
        if self._log is not None:
            self._log.close()
        self._states.close()
        set_learnable(self.model, True)
        self.accelerator.unwrap_model(self._sync, keep_fp32_wrapper=False)
        self.model.eval()
        for tracker in self.accelerator.trackers:
            tracker.finish()

    def _train(self, epoch: int, bar: Bar) -> None:
        """The steps of an epoch that are left to do."""
        done = self.step % self.steps_per_epoch
        self.model.train()
        with closing(self.data.epoch(epoch, done * self.config.accumulate)) as batches:
            for number in range(done, self.steps_per_epoch):
                begun = time.perf_counter()
                measured, images, received = self._step(epoch, number, batches)
                measured["images_per_second"] = round(images / (time.perf_counter() - begun), 1)
                self._write(step=self.step, epoch=epoch + 1, **measured)
                bar.advance(f"epoch {epoch + 1}/{self.config.epochs}, loss {measured['loss']:.3f}{self._validated()}")
                if number + 1 == self.steps_per_epoch:
                    return
                if received or self.step % self.config.checkpoint_every == 0:
                    self._checkpoint()
                if received:
                    self._stop(received)

    def _step(self, epoch: int, number: int, batches: Iterator[TrainingBatch]) -> tuple[dict[str, float], int, int]:
        """One update of the weights: what was measured, how many images it saw, and the signal that came, or 0."""
        passes = self.config.accumulate
        self.schedule.step_update(self.step)
        sums: dict[str, Tensor] = {}
        names: list[str] = []
        images = 0
        for index in range(passes):
            batch = next(batches)
            names += batch.names
            images += len(batch.images)
            seed_all(seed_for(self.config.seed, epoch, number * passes + index, self.accelerator.process_index))
            with nullcontext() if index == passes - 1 else self.accelerator.no_sync(self._sync):
                losses = self._losses(batch)
                self.accelerator.backward(losses["loss"] / passes)
            for name, value in losses.items():
                sums[name] = sums.get(name, 0.0) + value.detach().float() / passes
        self.accelerator.unscale_gradients()
        gradients = [parameter.grad for parameter in self._trained if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        measured, received = self._agree(sums)
        if not math.isfinite(measured["loss"]) or not self._is_usable(norm):
            self._diverged(epoch, names, sums["loss"], measured["loss"], float(norm))
        if self.config.clip:
            torch.nn.utils.clip_grads_with_norm_(self._trained, self.config.clip, norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        if self.ema is not None:
            self.ema.update(self.model, step=self.step)
        measured["gradient_norm"] = float(norm)
        measured["lr"] = self.optimizer.param_groups[0]["lr"]
        if self.optimizer.param_groups[-1]["name"] == "matrices":
            frozen = epoch >= self.config.learnable_epochs
            measured["matrix_lr"] = 0.0 if frozen else self.optimizer.param_groups[-1]["lr"]
        return measured, images * self.accelerator.num_processes, received

    def _losses(self, batch: TrainingBatch) -> dict[str, Tensor]:
        device = self.accelerator.device
        memory = torch.channels_last if self.config.channels_last else torch.contiguous_format
        images = self._finish_images(batch.images.to(device, non_blocking=True)).contiguous(memory_format=memory)
        labels = None
        if self.config.labels and batch.labels is not None:
            labels = batch.labels.to(device, non_blocking=True)
            if self._mix is not None:
                check_labels(labels, self._mix.num_classes)
                if len(images) % 2:
                    raise PmvitError(f"mixup and cutmix pair the images of a batch; got {len(images)}, an odd number")
                images, labels = self._mix(images.clone(), labels)
        taught = None
        if self.teacher is not None:
            with torch.inference_mode(), self.accelerator.autocast():
                taught = self._ask(images)
            taught = taught.clone()  # out of inference mode, so that the loss may keep it for its gradient
        with self.accelerator.autocast():
            logits = self._forward(images)
        if taught is not None and taught.shape != logits.shape:
            expected, got = tuple(logits.shape[1:]), tuple(taught.shape[1:])
            raise PmvitError(f"expected a teacher with outputs of shape {expected}, got {got}: is it another model's?")
        targets = {block: tokens.clone() for block, tokens in self.teacher_tokens.items()}
        return finetune_loss(self.config, logits, labels, taught, self.tokens, targets)

    def _agree(self, sums: dict[str, Tensor]) -> tuple[dict[str, float], int]:
        """Means over the processes, and the signal that any of them got."""
        received = self._signals.received
        if self.accelerator.num_processes == 1:
            return {name: float(value) for name, value in sums.items()}, received
        flag = torch.tensor(float(received), device=self.accelerator.device)
        gathered = self.accelerator.gather(torch.stack([*sums.values(), flag])[None])
        means = dict(zip(sums, gathered.mean(0).tolist(), strict=False))
        return means, int(gathered[:, -1].max())

    def _is_usable(self, norm: Tensor) -> bool:
        """Whether the gradient is finite; with a loss scaler, it is for the scaler to leave a step out."""
        return self.accelerator.scaler is not None or bool(torch.isfinite(norm))

    def _diverged(self, epoch: int, names: list[str], own_loss: Tensor, sum_of_losses: float, norm: float) -> None:
        mine = names if not math.isfinite(float(own_loss)) or math.isfinite(sum_of_losses) else []
        involved = gather_object(mine) if self.accelerator.num_processes > 1 else mine
        listed = ", ".join(involved[:8]) + (f" and {len(involved) - 8} more" if len(involved) > 8 else "")
        latest = self._checkpoints().latest() if self.folder is not None else None
        kept = f"the last good checkpoint is {latest}" if latest is not None else "there is no checkpoint yet"
        raise PmvitError(
            f"training diverged at step {self.step + 1} (epoch {epoch + 1}): the loss is {float(own_loss):.4g}, the "
            f"norm of its gradient {norm:.4g}, on {listed}; {kept}. Lower lr, or look at these images"
        )

    # --- the end of an epoch, and of the run ---

    def _end_epoch(self, epoch: int, validation: Any) -> None:
        if validation is not None:
            self.last = self._validate(validation)
            self._write(
                kind="epoch",
                step=self.step,
                epoch=epoch,
                **{name: value for name, value in asdict(self.last).items() if value is not None},
            )
        quality = self._quality()
        if self.best is None or quality is None or quality > self.best["quality"]:
            evaluation = asdict(self.last) if self.last is not None else None
            self.best = {"epoch": epoch, "quality": quality, "evaluation": evaluation}
            if quality is not None or self._at_end:
                self._write_on_main("the model", lambda folder: save(self.evaluated, folder))
        self._checkpoint()
        _, received = self._agree({})
        if received and not self._at_end:
            self._stop(received)

    @property
    def _at_end(self) -> bool:
        return self.step == self.total_steps

    def _validate(self, validation: Any) -> Evaluation:
        unlabelled = not self.config.labels or getattr(validation, "has_labels", True) is False
        batches = _Validation(validation, use_labels=self.config.labels)
        reference = self.teacher if unlabelled else None
        result = evaluate(self.evaluated, batches, reference=reference, progress=False)
        return pooled(gather_object([result])) if self.accelerator.num_processes > 1 else result

    def _validated(self) -> str:
        if self.last is None:
            return ""
        if self.last.top1 is not None:
            return f", top-1 {self.last.top1:.1%}"
        return f", KL {self.last.kl:.3f}" if self.last.kl is not None else ""

    def _quality(self) -> float | None:
        """What makes one validation better than another: more top-1, or without labels less divergence."""
        if self.last is None or self.last.top1 is not None:
            return None if self.last is None else self.last.top1
        return -self.last.kl if self.last.kl is not None else None

    def _finish(self) -> Finetuned:
        best = self.best or {"epoch": self.config.epochs, "evaluation": None}
        evaluation = Evaluation(**best["evaluation"]) if best["evaluation"] is not None else None
        result = Finetuned(self.step, best["epoch"], evaluation, self.last, dict(self.data.broken.files))
        if self.ema is not None:
            self.model.load_state_dict(self.ema.module.state_dict())
        self._write_on_main("the result", lambda folder: self._write_result(folder, result))
        return result

    def _write_result(self, folder: Path, result: Finetuned) -> None:
        save(self.evaluated, folder / LAST)
        draw_curves(folder)
        replace(self._record, result=asdict(result)).write(folder)

    # --- what survives a kill ---

    def _checkpoints(self) -> Checkpoints:
        if self.folder is None:
            raise PmvitError("a run without an output folder has no checkpoints")
        return Checkpoints(self.folder / CHECKPOINTS, self.config.keep_checkpoints)

    def _checkpoint(self) -> None:
        self._write_on_main("a checkpoint", lambda _folder: self._checkpoints().write(self.step, self.snapshot()))

    def _write_on_main(self, what: str, write: Callable[[Path], None]) -> None:
        """Let the first process write; if it cannot, all processes end with the same error."""
        failure: str | None = None
        if self.folder is not None and self.accelerator.is_main_process:
            try:
                write(self.folder)
            except PmvitError as error:
                failure = str(error)
            except (OSError, SafetensorError) as error:
                failure = f"could not write {what} to {self.folder} ({error}): make room there, then resume"
        if self.accelerator.num_processes > 1:
            failure = next((text for text in gather_object([failure]) if text is not None), None)
        if failure is not None:
            raise PmvitError(failure)

    def _check_best(self) -> None:
        """See that the best model so far was written whole; if not, let the next one take its place."""
        if self.folder is not None and self.best is not None and self.best["quality"] is not None:
            try:
                load(self.folder)
            except PmvitError:
                self.best = None

    def _stop(self, received: int) -> None:
        kept = f"checkpoint: {self._checkpoints().latest()}" if self.folder is not None else "nothing was written"
        raise StoppedError(f"stopped after step {self.step} of {self.total_steps}; {kept}", received)

    def snapshot(self) -> Checkpoint:
        """Everything that is needed to go on from here."""
        tensors: dict[str, Tensor] = {}
        optimizer = split_tensors(self.optimizer.optimizer.state_dict(), tensors)
        tensors = prefixed(tensors, "optimizer/") | prefixed(self.model.state_dict(), "model/")
        if self.ema is not None:
            tensors |= prefixed(self.ema.module.state_dict(), "ema/")
        scaler = self.accelerator.scaler.state_dict() if self.accelerator.scaler is not None else None
        last = asdict(self.last) if self.last is not None else None
        state = {
            "step": self.step,
            "steps_per_epoch": self.steps_per_epoch,
            "best": self.best,
            "last": last,
            "optimizer": optimizer,
            "scaler": scaler,
        }
        return Checkpoint(tensors, state)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go back to where a snapshot was taken."""
        tensors, state = checkpoint
        if state["steps_per_epoch"] != self.steps_per_epoch:
            raise PmvitError(
                f"the run had {state['steps_per_epoch']} steps an epoch, and would now have {self.steps_per_epoch}: "
                "resume it with the images, batches and processes it began with"
            )
        load_tensors(self.model, select(tensors, "model/"), "the checkpoint")
        if self.ema is not None:
            load_tensors(self.ema.module, select(tensors, "ema/"), "the checkpoint's moving average")
        self.optimizer.optimizer.load_state_dict(join_tensors(state["optimizer"], select(tensors, "optimizer/")))
        if self.accelerator.scaler is not None and state["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.step = state["step"]
        self.best = state["best"]
        self.last = Evaluation(**state["last"]) if state["last"] is not None else None

    def _write(self, **values: Any) -> None:
        if self._log is not None:
            self._log.write(values, self._checkpoints().latest)
        if self.config.log_with is not None:
            numbers = {name: value for name, value in values.items() if isinstance(value, (int, float))}
            self.accelerator.log(numbers, step=self.step)


def _optimizer(groups: list[dict[str, Any]], config: FinetuneConfig) -> torch.optim.Optimizer:
    try:
        return create_optimizer_v2(groups, opt=config.optimizer, lr=config.lr, weight_decay=0.0)
    except (KeyError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise PmvitError(f"expected one of timm's optimizers, got {config.optimizer!r} ({reason})") from None


def num_classes_of(model: nn.Module) -> int | None:
    return getattr(model, "num_classes", None) or None


class _Validation:
    """The batches to validate on, without their labels if these are not to be used."""

    def __init__(self, batches: Iterable[Any], use_labels: bool) -> None:
        self.batches = batches
        self.use_labels = use_labels

    @property
    def broken(self) -> Any:
        return getattr(self.batches, "broken", ())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches) if self.use_labels else (unpack(batch)[0] for batch in self.batches)
