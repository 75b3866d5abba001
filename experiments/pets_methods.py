"""Oxford Pets: methods at equal FLOPs, all tuned alike with self-distillation on a CPU, from one tuned ViT-Tiny.

    python -m experiments.pets_methods

Images and weights come from the folder that PMVIT_DATA names (`pets/images/{train,test}`, `weights`). Every run is
checkpointed below `runs/pets_methods`, so that the command can be stopped and started again; rows land in
`pets_methods.json` as they are measured, in the order of `RUNS`: what matters most comes first. Accuracy is that of the
last epoch: nothing is selected on the test images. A run takes about twenty minutes on two cores.
"""

from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import pmvit
from experiments.common import ORIGINAL, Row, Rows
from experiments.paired import answers, logits
from experiments.pets import DATA, EPOCHS, TEST, TRAIN, test_loader
from pmvit.config.measuring import Measurement
from pmvit.data.loaders import create_loader
from pmvit.data.sources import open_source
from pmvit.hosts import host_of
from pmvit.loading import create_model
from pmvit.measuring import Measured, measure_by, measure_config, read_measured
from pmvit.methods import Evit, Pitome, Tome
from pmvit.methods.base import Method
from pmvit.methods.budget import method_for
from pmvit.training.metrics import read_metrics

from timm.layers import set_fused_attn  # isort: skip  # after pmvit, which lets torchvision import

NAME = "pets_methods"
RESULTS = Path(__file__).with_suffix(".json")
FOLDER = Path("runs") / NAME
RECIPE = pmvit.FinetuneConfig.preset("quick", epochs=EPOCHS, workers=1, mixed_precision="bf16")
LONGER = "original, tuned on"
PLANS: dict[str, Measurement] = {"adaptive": "adaptive", "measured": "measured", "scored": "scored"}
METHODS: dict[str, type[Method]] = {"tome": Tome, "evit": Evit, "pitome": Pitome}
COMPRESSED, TUNED = "compressed", "tuned"


class Run(NamedTuple):
    """A model to tune: what it is made by, the GFLOPs it may cost, and the seed of the tuning."""

    method: str
    gflops: float | None
    seed: int = 0

    @property
    def folder(self) -> Path:
        return FOLDER / f"{self.method.replace(', ', '-').replace(' ', '-')}-{self.gflops}-{self.seed}"

    def key(self, stage: str) -> Row:
        seed = self.seed if stage == TUNED else 0
        return {"method": self.method, "gflops": self.gflops, "stage": stage, "seed": seed}


ORIGINAL_RUN = Run(ORIGINAL, None)
RUNS = (
    Run("adaptive", 0.73),
    Run("tome", 0.73),
    Run("evit", 0.73),
    Run("measured", 0.73),
    Run("adaptive", 0.86),
    Run("tome", 0.86),
    Run("adaptive", 0.73, 1),
    Run("tome", 0.73, 1),
    Run("scored", 0.73),
    Run(LONGER, None),
    Run("pitome", 0.73),
    Run("evit", 0.73, 1),
    Run("evit", 0.86),
    Run("adaptive", 0.73, 2),
    Run("tome", 0.73, 2),
    Run("evit", 0.73, 2),
)


class Pets:
    """The tuned original, and what the methods make of it."""

    @cached_property
    def original(self) -> nn.Module:
        """ViT-Tiny fine-tuned to the breeds, without a teacher."""
        torch.manual_seed(0)
        weights = DATA / "weights" / "vit_tiny_patch16_224.safetensors"
        return tuned(create_model("vit_tiny_patch16_224", weights, num_classes=37), None, ORIGINAL_RUN)

    @cached_property
    def labels(self) -> Tensor:
        return torch.cat([labels for _, labels in test_loader(self.original)])

    @cached_property
    def reference(self) -> Tensor:
        """The logits of the original."""
        return logits(self.original, test_loader(self.original))

    def make(self, run: Run) -> nn.Module:
        """The model of a run, not tuned."""
        if run.gflops is None:
            return pmvit.load(ORIGINAL_RUN.folder / "last")
        if run.method in METHODS:
            return pmvit.compress(self.original, method_for(self.original, METHODS[run.method], run.gflops))
        options: dict[str, Any] = {"prune": 0.1} if run.method == "scored" else {}
        plan = pmvit.plan(self._source(PLANS[run.method]), gflops=run.gflops, **options)
        return pmvit.compress(self.original, plan)

    def _source(self, method: Measurement) -> Measured:
        """What plans are made from: measured on training images, and kept for a run that goes on."""
        path = FOLDER / (f"{method}.safetensors" if method == "adaptive" else f"{method}.json")
        if not path.exists():
            config = host_of(self.original).data_config()
            loader = create_loader(open_source(TRAIN, 37), config, batch_size=32, workers=1, shuffle=True)
            measure_by(measure_config(self.original, method, {}), self.original, loader).save(path)
        return read_measured(path)

    def row(self, model: nn.Module) -> Row:
        """What a model says of each test image."""
        found = answers(logits(model, test_loader(model)), self.labels, self.reference)
        return {"gflops": pmvit.flops(model).gflops, **found}

    def compressed(self, run: Run) -> Row:
        return self.row(self.make(run))

    def tuned(self, run: Run) -> Row:
        """What a run ends with, and its accuracy after every epoch."""
        model = self.original if run == ORIGINAL_RUN else tuned(self.make(run), self.original, run)
        curve = [line["top1"] for line in read_metrics(run.folder) if line.get("kind") == "epoch"]
        return {**self.row(model), "curve": curve}


def tuned(model: nn.Module, teacher: nn.Module | None, run: Run) -> nn.Module:
    """The model after the last epoch, for the same recipe."""
    options: dict[str, Any] = {**vars(RECIPE), "seed": run.seed}
    pmvit.finetune(model, teacher=teacher, train=TRAIN, val=TEST, output=run.folder, resume=True, **options)
    return pmvit.load(run.folder / "last")


def measure(rows: Rows) -> None:
    """Measure the rows that are not there yet and write them one by one."""
    set_fused_attn(False)  # on CPUs, training in bfloat16 takes less time without
    pets = Pets()
    rows.add(ORIGINAL_RUN.key(TUNED), partial(pets.tuned, ORIGINAL_RUN))
    for run in RUNS:
        if run.gflops is not None:
            rows.add(run.key(COMPRESSED), partial(pets.compressed, run))
        rows.add(run.key(TUNED), partial(pets.tuned, run))


def main() -> None:
    measure(Rows(RESULTS))


if __name__ == "__main__":
    main()
