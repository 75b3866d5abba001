"""What the training loop costs beside the computation: data, logging and checkpoints over bare steps.

    python -m benchmarks.loop

A run of `finetune` on a folder of images is held up after every other step, and as many bare steps (the same model,
teacher, optimizer and batch size; one batch, in memory) are timed before it goes on. What counts is the sum of all
times, so that a checkpoint every fifty steps is in it.
"""

import copy
import json
import os
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from PIL import Image
from torch import nn

import pmvit
from pmvit._system import keep_freed_memory
from pmvit.config import FinetuneConfig
from pmvit.data.batches import TrainingBatch
from pmvit.data.training import TrainingData
from pmvit.data.transforms import BatchTransform
from pmvit.hosts import host_of
from pmvit.loading import create_model
from pmvit.numbers.bootstrap import bootstrap, mean
from pmvit.training.learner import parameter_groups
from pmvit.training.loss import finetune_loss
from pmvit.training.record import RunRecord
from pmvit.training.run import training_data
from pmvit.training.trainer import Trainer

import timm  # isort: skip  # after pmvit, which lets torchvision import

DATA = Path(os.environ.get("PMVIT_DATA", "../shared/data"))
STEPS = 2
CONFIG = FinetuneConfig.preset("quick", workers=1, cpu=True, warmup_epochs=0)


class BareSteps:
    """Forward, backward, clipping and update, and nothing else."""

    def __init__(self, model: nn.Module, teacher: nn.Module) -> None:
        self.model = copy.deepcopy(model).train()
        self.teacher = copy.deepcopy(teacher).eval()
        self.optimizer = torch.optim.AdamW(parameter_groups(self.model, CONFIG), lr=1e-6)

    def run(self, batch: TrainingBatch, count: int) -> float:
        begun = time.perf_counter()
        for _ in range(count):
            with torch.inference_mode():
                taught = self.teacher(batch.images)
            finetune_loss(CONFIG, self.model(batch.images), batch.labels, taught.clone())["loss"].backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), CONFIG.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return time.perf_counter() - begun


class HeldUp:
    """Training data that times the loop it feeds, and bare steps in between."""

    def __init__(self, data: TrainingData, bare: BareSteps, steps: int) -> None:
        self.data = data
        self.bare = bare
        self.steps = steps
        self.finish = BatchTransform(host_of(bare.model).data_config(), 0.0, torch.device("cpu"))
        self.broken = data.broken
        self.times: dict[str, list[float]] = {"loop": [], "bare": []}

    def __len__(self) -> int:
        return self.steps

    def epoch(self, number: int, skip: int) -> Generator[TrainingBatch, None, None]:
        begun = time.perf_counter()
        for place, batch in zip(range(self.steps), self.data.epoch(number, skip), strict=False):
            yield batch
            if (place + 1) % STEPS == 0:
                self.times["loop"].append(time.perf_counter() - begun)
                ready = batch._replace(images=self.finish(batch.images))
                self.times["bare"].append(self.bare.run(ready, STEPS))
                begun = time.perf_counter()

    def close(self) -> None:
        self.data.close()


def pictures(folder: Path) -> Path:
    """Oxford Pets, or random pictures of the same size where they are not at hand."""
    if (DATA / "pets" / "images" / "train").is_dir():
        return DATA / "pets" / "images" / "train"
    for number in range(64):
        path = folder / "images" / str(number % 2) / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((300, 232), 64).convert("RGB").save(path)
    return folder / "images"


def ratio_of_sums(times: torch.Tensor, seconds: torch.Tensor) -> torch.Tensor:
    """How many times longer the loop takes than the bare steps."""
    loop, bare = mean(times, seconds).unbind(1)
    return loop / bare


def measure(rounds: int) -> dict[str, Any]:
    """The ratio of the loop to bare steps; the first two rounds warm up."""
    keep_freed_memory()  # as `finetune` does
    weights = DATA / "weights" / "vit_tiny_patch16_224.safetensors"
    name = "vit_tiny_patch16_224"
    model = create_model(name, weights, num_classes=37) if weights.exists() else timm.create_model(name, num_classes=37)
    small = pmvit.compress(model, pmvit.plan(pmvit.measure(model, [], method="scored", scorer="random"), keep=0.6))
    with tempfile.TemporaryDirectory() as folder:
        data = training_data(small, pictures(Path(folder)), CONFIG, (0, 1), None)
        held_up = HeldUp(data, BareSteps(small, model), (rounds + 2) * STEPS)
        config = FinetuneConfig(**{**vars(CONFIG), "epochs": 1})
        record = RunRecord.of(small, model, config, {})
        images, output = cast("TrainingData", held_up), Path(folder) / "run"
        Trainer(small, model, images, Accelerator(cpu=True), record, output).run(None, progress=False)
    times = {what: seconds[2:] for what, seconds in held_up.times.items()}
    ratio = bootstrap(torch.tensor([times["loop"], times["bare"]]).T, ratio_of_sums)
    return {**ratio._asdict(), "times": times}


if __name__ == "__main__":
    print(json.dumps(measure(rounds=40)))
