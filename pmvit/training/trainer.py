"""A run of fine-tuning: epochs of steps, what an epoch ends with, and what survives a kill."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors import SafetensorError
from torch import Tensor, nn

from pmvit.config import FinetuneConfig
from pmvit.data.training import TrainingBatch, TrainingData
from pmvit.errors import PmvitError
from pmvit.evaluation.validation import AnyEvaluation, evaluation_from, validate
from pmvit.progress import Bar
from pmvit.saving.card import CardDetails
from pmvit.saving.models import load, save
from pmvit.training.checkpoint import Checkpoint, Checkpoints
from pmvit.training.learner import Gradient, Learner
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
    best: AnyEvaluation | None
    last: AnyEvaluation | None
    broken: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Finetuned":
        """The result that `asdict` made JSON data of."""
        return cls(**{**data, "best": _evaluation(data["best"]), "last": _evaluation(data["last"])})


class Trainer:
    """The steps of a run and its folder, if it has one.

    The number of steps done is all that changes beside the tensors: learning rate, epoch, place in the data and every
    random choice follow from it. A checkpoint is the tensors, that number and the best validation so far.

    Args:
        model: What learns.
        teacher: What it learns from beside labels, if anything.
        data: The training batches of this process.
        config: How to fine-tune.
        accelerator: Device, precision and the other processes.
        record: What the run is, to be written to the folder.
        folder: Where checkpoints, metrics and the models go; `None` to keep nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        teacher: nn.Module | None,
        data: TrainingData,
        config: FinetuneConfig,
        accelerator: Accelerator,
        record: RunRecord,
        folder: Path | None,
    ) -> None:
        self.data = data
        self.config = config
        self.accelerator = accelerator
        self.record = record
        self.folder = folder
        self.step = 0
        self.best: dict[str, Any] | None = None
        self.last: AnyEvaluation | None = None
        self.steps_per_epoch = len(data) // config.accumulate
        if self.steps_per_epoch == 0:
            raise PmvitError(f"expected {config.accumulate} batches or more per epoch, one step; got {len(data)}")
        self.learner = Learner(model, teacher, config, accelerator, self.steps_per_epoch)
        self._signals = StopSignals()
        self._log: MetricsLog | None = None

    @property
    def total_steps(self) -> int:
        return self.config.epochs * self.steps_per_epoch

    def run(self, validation: Any, progress: bool) -> Finetuned:
        """All steps, or those that are left after the last checkpoint of the folder; a trainer runs once."""
        show = progress and self.accelerator.is_main_process
        try:
            self._start()
            with self._signals, Bar("fine-tune", self.total_steps, done=self.step, show=show) as bar:
                while self.step < self.total_steps:
                    epoch = self.step // self.steps_per_epoch
                    self.learner.begin_epoch(epoch)
                    self._train(epoch, bar)
                    self._end_epoch(epoch + 1, validation)
            return self._finish()
        finally:
            self._close()

    def _start(self) -> None:
        """Go on from the last checkpoint of the folder, if there is one, and begin to write there."""
        if self.folder is None:
            return
        if (checkpoint := self._checkpoints().read_latest()) is not None:
            self._restore(checkpoint)
        if self.accelerator.is_main_process:
            self.record.write(self.folder)
            self._log = MetricsLog(self.folder, self.step)
        if self.config.log_with is not None:
            self.accelerator.init_trackers("tensorboard" if self.config.log_with == "tensorboard" else "pmvit")
        self.accelerator.wait_for_everyone()

    def _close(self) -> None:
        """Let go of the workers, the files and the model."""
        self.data.close()
        if self._log is not None:
            self._log.close()
        self.learner.close()
        for tracker in self.accelerator.trackers:
            tracker.finish()

    # --- an epoch ---

    def _train(self, epoch: int, bar: Bar) -> None:
        """The steps of an epoch that are left to do."""
        done = self.step % self.steps_per_epoch
        with closing(self.data.epoch(epoch, done * self.config.accumulate)) as batches:
            for number in range(done, self.steps_per_epoch):
                measured, received = self._step(batches)
                self._write(step=self.step, epoch=epoch + 1, **measured)
                validated = f", {self.last.headline}" if self.last is not None else ""
                bar.advance(f"epoch {epoch + 1}/{self.config.epochs}, loss {measured['loss']:.3f}{validated}")
                if number + 1 == self.steps_per_epoch:
                    return  # the end of the epoch has a checkpoint of its own
                if received or self.step % self.config.checkpoint_every == 0:
                    self._checkpoint()
                if received:
                    self._stop(received)

    def _step(self, batches: Iterator[TrainingBatch]) -> tuple[dict[str, float], int]:
        """One update of the weights: what was measured, and the signal that came, or 0."""
        begun = time.perf_counter()
        gradient = self.learner.compute_gradient(self.step, batches)
        measured, received = self._agree(gradient.losses)
        if not (math.isfinite(measured["loss"]) and self.learner.is_finite(gradient.norm)):
            self._diverged(gradient, measured["loss"])
        self.learner.update(self.step, gradient.norm)
        measured.update(gradient_norm=float(gradient.norm), **self.learner.rates(self.step))
        self.step += 1
        images = gradient.images * self.accelerator.num_processes
        measured["images_per_second"] = round(images / (time.perf_counter() - begun), 1)
        return measured, received

    def _agree(self, sums: dict[str, Tensor]) -> tuple[dict[str, float], int]:
        """Means over the processes, and the signal that any of them got."""
        received = self._signals.received
        if self.accelerator.num_processes == 1:
            return {name: float(value) for name, value in sums.items()}, received
        flag = torch.tensor(float(received), device=self.accelerator.device)
        gathered = self.accelerator.gather(torch.stack([*sums.values(), flag])[None])
        means = dict(zip(sums, gathered.mean(0).tolist(), strict=False))
        return means, int(gathered[:, -1].max())

    def _diverged(self, gradient: Gradient, loss: float) -> None:
        own = float(gradient.losses["loss"])
        names = gradient.names if not math.isfinite(own) or math.isfinite(loss) else []
        involved = gather_object(names) if self.accelerator.num_processes > 1 else names
        listed = ", ".join(involved[:8]) + (f" and {len(involved) - 8} more" if len(involved) > 8 else "")
        latest = self._checkpoints().latest() if self.folder is not None else None
        kept = f"the last good checkpoint is {latest}" if latest is not None else "there is no checkpoint yet"
        raise PmvitError(
            f"training diverged at step {self.step + 1} (epoch {self.step // self.steps_per_epoch + 1}): the loss is "
            f"{own:.4g}, the norm of its gradient {float(gradient.norm):.4g}, on {listed}; {kept}. Lower lr, or check "
            "these images"
        )

    # --- the end of an epoch, and of the run ---

    def _end_epoch(self, epoch: int, validation: Any) -> None:
        """Validate, save the model if it is the best so far, and write a checkpoint."""
        at_end = self.step == self.total_steps
        if validation is not None:
            self.last = self._validate(validation)
            known = {name: value for name, value in asdict(self.last).items() if value is not None}
            self._write(kind="epoch", step=self.step, epoch=epoch, **known)
        quality = self.last.quality if self.last is not None else None
        best = self.best["quality"] if self.best is not None else None
        if best is None or quality is None or quality > best:
            self.best = {"epoch": epoch, "quality": quality, "evaluation": _data(self.last)}
            if quality is not None or at_end:
                self._write_on_main("the model", lambda folder: self._save(folder, self.last))
        self._checkpoint()
        _, received = self._agree({})
        if received and not at_end:
            self._stop(received)

    def _validate(self, validation: Any) -> AnyEvaluation:
        unlabelled = not self.config.labels or getattr(validation, "has_labels", True) is False
        reference = self.learner.teacher if unlabelled else None
        return validate(self.learner.evaluated, validation, reference=reference, use_labels=self.config.labels)

    def _finish(self) -> Finetuned:
        best = self.best or {"epoch": self.config.epochs, "evaluation": None}
        broken = dict(self.data.broken.files)
        result = Finetuned(self.step, best["epoch"], _evaluation(best["evaluation"]), self.last, broken)
        self.learner.finish()
        self._write_on_main("the result", lambda folder: self._write_result(folder, result))
        return result

    def _save(self, folder: Path, evaluation: AnyEvaluation | None) -> None:
        """Save the model; its card says how it was tuned and how good it is."""
        started = {"command": self.record.command} if self.record.command else {}
        measured = {"tuned": asdict(evaluation)} if evaluation is not None else {}
        save(self.learner.evaluated, folder, card=CardDetails(measured, {"finetune": asdict(self.config), **started}))

    def _write_result(self, folder: Path, result: Finetuned) -> None:
        self._save(folder / LAST, result.last)
        draw_curves(folder)
        replace(self.record, result=asdict(result)).write(folder)

    # --- what survives a kill ---

    def _checkpoints(self) -> Checkpoints:
        if self.folder is None:
            raise PmvitError("a run without an output folder has no checkpoints")
        return Checkpoints(self.folder / CHECKPOINTS, self.config.keep_checkpoints)

    def _checkpoint(self) -> None:
        self._write_on_main("a checkpoint", lambda _folder: self._checkpoints().write(self.step, self._snapshot()))

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

    def _stop(self, received: int) -> None:
        kept = f"checkpoint: {self._checkpoints().latest()}" if self.folder is not None else "nothing was written"
        raise StoppedError(f"stopped after step {self.step} of {self.total_steps}; {kept}", received)

    def _snapshot(self) -> Checkpoint:
        """Everything that is needed to go on from here."""
        tensors, learning = self.learner.snapshot()
        place = {"step": self.step, "steps_per_epoch": self.steps_per_epoch}
        return Checkpoint(tensors, {**place, "best": self.best, "last": _data(self.last), **learning})

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Go back to where a snapshot was taken."""
        state = checkpoint.state
        if state["steps_per_epoch"] != self.steps_per_epoch:
            raise PmvitError(
                f"the run had {state['steps_per_epoch']} steps per epoch, and would now have {self.steps_per_epoch}: "
                "resume it with the images, batches and processes it began with"
            )
        self.learner.restore(checkpoint)
        self.step, self.best, self.last = state["step"], state["best"], _evaluation(state["last"])
        if self.folder is not None and self.best is not None and self.best["quality"] is not None:
            try:
                load(self.folder)
            except PmvitError:  # the best model was not written whole: the next one takes its place
                self.best = None

    def _write(self, **values: Any) -> None:
        if self._log is not None:
            self._log.write(values, self._checkpoints().latest)
        if self.config.log_with is not None:
            numbers = {name: value for name, value in values.items() if isinstance(value, (int, float))}
            self.accelerator.log(numbers, step=self.step)


def _data(evaluation: AnyEvaluation | None) -> dict[str, Any] | None:
    return asdict(evaluation) if evaluation is not None else None


def _evaluation(data: dict[str, Any] | None) -> AnyEvaluation | None:
    return evaluation_from(data) if data is not None else None
