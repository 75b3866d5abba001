"""A run of fine-tuning: epochs of steps, what an epoch ends with, and what survives a kill."""

import json
import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors import SafetensorError
from timm.utils.random import random_seed
from torch import Tensor, nn

from pmvit._system import lost_processes, meet_processes
from pmvit.data.batches import TrainingBatch
from pmvit.data.seeding import seed_for
from pmvit.data.training import TrainingData
from pmvit.errors import PmvitError, PmvitWarning
from pmvit.evaluation.reference import Reference, named
from pmvit.evaluation.validation import AnyEvaluation, validate
from pmvit.files import config_from, fields_from
from pmvit.progress import Bar
from pmvit.saving.card import CardDetails
from pmvit.saving.commands import record_commands
from pmvit.saving.models import load, save
from pmvit.training.learner import Learner, set_learnable
from pmvit.training.metrics import FILE as METRICS
from pmvit.training.metrics import draw_curves, keep_metrics
from pmvit.training.record import CHECKPOINTS, Checkpoints, RunRecord
from pmvit.training.signals import StoppedError, StopSignals
from pmvit.training.trackers import start_trackers
from pmvit.wrapping import compression_of

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
    def from_json(cls, data: dict[str, Any], where: str = "the result of a run") -> "Finetuned":
        """The result that `asdict` made JSON data of."""
        return config_from(cls, data, where)


@dataclass(frozen=True)
class Best:
    """Validation after the best epoch (from 1) so far; without validation images it is the last one, and unknown."""

    epoch: int
    quality: float | None
    evaluation: AnyEvaluation | None


@dataclass(frozen=True)
class Place:
    """Where in a run a checkpoint was written, after so many steps."""

    step: int
    steps_per_epoch: int
    best: Best | None
    last: AnyEvaluation | None


class Trainer:
    """The steps of a run and its folder, if it has one.

    The number of steps done is all that changes beside the tensors: learning rate, epoch, place in the data and every
    random choice follow from it. A checkpoint is the tensors, that number and the best validation so far.
    """

    def __init__(
        self,
        model: nn.Module,
        teacher: nn.Module | Reference | None,
        data: TrainingData,
        accelerator: Accelerator,
        record: RunRecord,
        folder: Path | None,
    ) -> None:
        config = record.config
        self.data, self.config, self.accelerator, self.record, self.folder = data, config, accelerator, record, folder
        self.checkpoints = Checkpoints((folder or Path()) / CHECKPOINTS, config.keep_checkpoints)
        self.step = 0
        self.best: Best | None = None
        self.last: AnyEvaluation | None = None
        self.steps_per_epoch = len(data) // config.accumulate
        if self.steps_per_epoch == 0:
            raise PmvitError(f"expected {config.accumulate} batches or more per epoch, one step; got {len(data)}")
        self.total_steps = config.epochs * self.steps_per_epoch
        self.teacher = teacher
        self.learner = Learner(model, named(teacher)[0], config, accelerator, self.steps_per_epoch)
        self._signals = StopSignals()
        meet_processes(self._how_to_go_on)

    def run(self, validation: Any, progress: bool) -> Finetuned:
        """All steps, or those that are left after the last checkpoint of the folder; a trainer runs once."""
        show = progress and self.accelerator.is_main_process
        try:
            self._start()
            with self._signals, Bar("fine-tune", self.total_steps, done=self.step, show=show) as bar:
                while self.step < self.total_steps:
                    epoch = self.step // self.steps_per_epoch
                    self._train(epoch, bar)
                    self._end_epoch(epoch + 1, validation)
            return self._finish()
        except RuntimeError as error:
            if (lost := lost_processes()) is None:
                raise
            raise PmvitError(lost) from error
        finally:
            self.data.close()
            self.learner.close()
            for tracker in self.accelerator.trackers:
                tracker.finish()

    def _train(self, epoch: int, bar: Bar) -> None:
        """The steps of an epoch that are left to do."""
        set_learnable(self.learner.model, epoch < self.config.learnable_epochs)
        self.learner.model.train()
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
                self._stop_after(received)

    def _step(self, batches: Iterator[TrainingBatch]) -> tuple[dict[str, float], int]:
        """One update of the weights: what was measured, and the signal that came, or 0."""
        begun = time.perf_counter()
        learner, accelerator, passes = self.learner, self.accelerator, self.config.accumulate
        epoch, place = divmod(self.step, self.steps_per_epoch)
        rates = learner.schedule(self.step, epoch)
        means: dict[str, Tensor] = {}
        images, names = 0, []
        for number, batch in enumerate(islice(batches, passes)):
            random_seed(seed_for(self.config.seed, epoch, place * passes + number, accelerator.process_index))
            with nullcontext() if number == passes - 1 else accelerator.no_sync(learner.prepared):
                losses = learner.losses(batch)
                accelerator.backward(losses["loss"] / passes)
            for name, value in losses.items():
                means[name] = means.get(name, 0.0) + value.detach().float() / passes
            images += len(batch.images)
            names += batch.names
        accelerator.unscale_gradients()
        gradients = [parameter.grad for parameter in learner.trained if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        measured, received = self._agree(means)
        usable = accelerator.scaler is not None or bool(norm.isfinite())  # a loss scaler leaves a step out itself
        if not (math.isfinite(measured["loss"]) and usable):
            self._diverged(float(means["loss"]), measured["loss"], float(norm), names)
        learner.update(self.step, norm)
        self.step += 1
        speed = images * accelerator.num_processes / (time.perf_counter() - begun)
        return {**measured, "gradient_norm": float(norm), **rates, "images_per_second": round(speed, 1)}, received

    def _agree(self, values: dict[str, Tensor]) -> tuple[dict[str, float], int]:
        """Means over the processes, and the signal that any of them got."""
        flag = torch.tensor(float(self._signals.received), device=self.accelerator.device)
        gathered = self.accelerator.gather(torch.stack([*values.values(), flag])[None])
        return dict(zip(values, gathered.mean(0).tolist(), strict=False)), int(gathered[:, -1].max())

    def _diverged(self, own: float, loss: float, norm: float, names: list[str]) -> None:
        involved = gather_object(names if not math.isfinite(own) or math.isfinite(loss) else [])
        listed = ", ".join(involved[:8]) + (f" and {len(involved) - 8} more" if len(involved) > 8 else "")
        raise PmvitError(
            f"training diverged at step {self.step + 1} (epoch {self.step // self.steps_per_epoch + 1}): the loss is "
            f"{own:.4g}, the norm of its gradient {norm:.4g}, on {listed}; {self._kept()}. Lower lr, or check these "
            "images"
        )

    def _stop_after(self, received: int) -> None:
        if received:
            message = f"stopped after step {self.step} of {self.total_steps}; {self._kept()}"
            raise StoppedError(message, received)

    def _end_epoch(self, epoch: int, validation: Any) -> None:
        """Validate, save the model if it is the best so far, and write a checkpoint."""
        at_end, labels = self.step == self.total_steps, self.config.labels
        if validation is not None:
            has_labels = labels and getattr(validation, "has_labels", True)
            reference = None if has_labels else self.teacher
            self.last = validate(self.learner.evaluated, validation, reference=reference, use_labels=labels)
            known = {name: value for name, value in asdict(self.last).items() if value is not None}
            self._write(kind="epoch", step=self.step, epoch=epoch, **known)
        quality = self.last.quality if self.last is not None else None
        best = self.best.quality if self.best is not None else None
        if best is None or quality is None or quality > best:
            self.best = Best(epoch, quality, self.last)
            if quality is not None or at_end:
                self._write_on_main("the model", lambda folder: self._save(folder, self.last))
        self._checkpoint()
        self._stop_after(0 if at_end else self._agree({})[1])

    def _finish(self) -> Finetuned:
        best = self.best or Best(self.config.epochs, None, None)
        result = Finetuned(self.step, best.epoch, best.evaluation, self.last, dict(self.data.broken))
        self.learner.model.load_state_dict(self.learner.evaluated.state_dict())

        def write(folder: Path) -> None:
            self._save(folder / LAST, result.last)
            draw_curves(folder)
            replace(self.record, result=asdict(result)).write(folder)

        self._write_on_main("the result", write)
        return result

    def _save(self, folder: Path, evaluation: AnyEvaluation | None) -> None:
        """Save the model; its card says how it was tuned and how good it is."""
        started = {"command": self.record.command} if self.record.command else {}
        compression = compression_of(self.learner.model)
        tuned: str = compression.tuned[-1] if compression is not None else "fine-tuned"
        measured = {tuned: asdict(evaluation)} if evaluation is not None else {}
        how = {"calibrate" if tuned == "calibrated" else "finetune": asdict(self.config)}
        save(self.learner.evaluated, folder, card=CardDetails(measured, {**how, **started}))

    def _start(self) -> None:
        """Go on from the last checkpoint of the folder, if there is one, and begin to write there."""
        if self.folder is None:
            return
        if (place := self.restore()) is not None:
            if place.steps_per_epoch != self.steps_per_epoch:
                raise PmvitError(
                    f"the run had {place.steps_per_epoch} steps per epoch, and would now have "
                    f"{self.steps_per_epoch}: resume it with the images, batches and processes it began with"
                )
            self.step, self.best, self.last = place.step, place.best, place.last
            if self.best is not None and self.best.quality is not None:
                try:
                    load(self.folder)
                except PmvitError:  # the best model was not written whole: the next one takes its place
                    self.best = None
        if self.accelerator.is_main_process:
            self.record.write(self.folder)
            record_commands(self.folder)
            keep_metrics(self.folder, self.step)
        start_trackers(self.accelerator, self.config)
        self.accelerator.wait_for_everyone()

    def restore(self) -> Place | None:
        """Go back to the newest checkpoint that is whole, and say where that was; `None` if there is no checkpoint.

        One that is of other steps than these is left alone.
        """
        steps = self.checkpoints.steps()
        for step in reversed(steps):
            path = self.checkpoints.path(step)
            try:
                tensors, state = self.checkpoints.read(path)
                place = Place(**fields_from(Place, state, f"{path}: state", beside=("optimizer", "scaler")))
                if place.step != step:
                    raise PmvitError(f"{path}: expected the checkpoint of step {step}, got that of {place.step}")
                if place.steps_per_epoch == self.steps_per_epoch:
                    self.learner.restore(tensors, state)
            except PmvitError as error:
                if step == steps[0]:
                    raise PmvitError(f"{error}; there is no other checkpoint: remove it to start anew") from None
                if self.accelerator.is_main_process:
                    message = f"the run goes on from the checkpoint before {path.name}, which is damaged: {error}"
                    warnings.warn(message, PmvitWarning, stacklevel=2)
            else:
                return place
        return None

    def _checkpoint(self) -> None:
        """Write everything that is needed to go on from here."""
        place = asdict(Place(self.step, self.steps_per_epoch, self.best, self.last))
        what = f"the checkpoint of step {self.step}"
        self._write_on_main(what, lambda _: self.checkpoints.write(self.step, *self.learner.snapshot(place)))

    def _kept(self) -> str:
        """What there is to go on from, to end an error with."""
        steps = self.checkpoints.steps() if self.folder is not None else []
        return f"the last checkpoint, {self.checkpoints.path(steps[-1])}, is whole" if steps else "no checkpoint yet"

    def _how_to_go_on(self) -> str:
        how = f" with --resume {self.folder}, `calibrate` and `run` as before" if self.folder is not None else ""
        return f"{self._kept()}. Launch the same command again{how}"

    def _could_not(self, what: str, error: Exception) -> str:
        return f"could not write {what} ({error}); {self._kept()}. Make room in {self.folder}, then resume"

    def _write_on_main(self, what: str, write: Callable[[Path], None]) -> None:
        """Let the first process write; if it cannot, all processes end with the same error."""
        failure: str | None = None
        if self.folder is not None and self.accelerator.is_main_process:
            try:
                write(self.folder)
            except PmvitError as error:
                failure = str(error)
            except (OSError, SafetensorError) as error:
                failure = self._could_not(what, error)
        if (said := next(filter(None, gather_object([failure])), None)) is not None:
            raise PmvitError(said)

    def _write(self, **values: Any) -> None:
        """Write a line of metrics; each process that fails says so itself."""
        if self.folder is not None and self.accelerator.is_main_process:
            try:
                with (self.folder / METRICS).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(values) + "\n")
            except OSError as error:
                raise PmvitError(self._could_not(METRICS, error)) from None
        if self.accelerator.trackers:
            numbers = {name: value for name, value in values.items() if isinstance(value, (int, float))}
            self.accelerator.log(numbers, step=self.step)
