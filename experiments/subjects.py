"""What the experiments measure: classifiers with their images; what is slow is made when it is first asked for."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import cache, cached_property
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pmvit
from experiments.common import ORIGINAL, SEED, Row, Rows, Settings, bits
from pmvit.cli.demo_run import TUNING, TUNING_BATCH
from pmvit.config import FinetuneConfig
from pmvit.data.demo import demo_loader, demo_model
from pmvit.data.opening import open_loader
from pmvit.evaluation.classification import measure
from pmvit.loading import create_model
from pmvit.measuring import Scores

BATCH_SIZE = 50
CROP_SCALE = (0.35, 1.0)  # shares of an image that a random crop shows
TRAINED, TESTED = 500, 1000  # of the demo's images
AT: dict[str, Any] = {"keep": 0.6, "prune": 0.1}

Options = Mapping[str, Any]
Batches = list[tuple[Tensor, Tensor]]


class Subject(ABC):
    """A classifier, images to score and to measure on, and what is measured of it."""

    title: str
    model: nn.Module
    batches: Batches
    runs: Path | None = None  # where tunings are checkpointed, if they take long

    def __init__(self) -> None:
        self._scores: dict[str, Scores] = {}
        self._measured: dict[str, Row] = {}

    @abstractmethod
    def scored_images(self) -> Any:
        """Training images to score, in batches."""

    def scores(self, **options: Any) -> Scores:
        """The scores with these options of `score`, measured once."""
        recipe = json.dumps(options, sort_keys=True)
        if recipe not in self._scores:
            self._scores[recipe] = pmvit.measure(self.model, self.scored_images(), method="scored", **options)
        return self._scores[recipe]

    def compressed(self, plan: Options, score: Options | None = None) -> nn.Module:
        """The model with a plan, by options of `plan` and of `score`."""
        return pmvit.compress(self.model, pmvit.plan(self.scores(**(score or {})), **plan))

    @torch.inference_mode()
    def logits(self, model: nn.Module) -> Tensor:
        model.eval()
        return torch.cat([model(images) for images, _ in self.batches])

    @cached_property
    def reference(self) -> Tensor:
        return self.logits(self.model)

    def measure(self, model: nn.Module) -> Row:
        """What one row has: what the model costs, and what it makes of each image."""
        labels = torch.cat([labels for _, labels in self.batches])
        found = measure(self.reference if model is self.model else self.logits(model), labels, self.reference)
        return {
            "gflops": pmvit.flops(model).gflops,
            "correct": bits(found["top1"]),
            "agrees": bits(found["agreement"]),
            "kl": [float(f"{value:.3g}") for value in found["kl"].clamp(min=0).tolist()],
        }

    def key(self, variant: str, seed: int = SEED) -> Row:
        return {"subject": self.title, "variant": variant, "seed": seed}

    def add_original(self, rows: Rows) -> None:
        rows.add(self.key(ORIGINAL), lambda: self.measure(self.model))

    def add(self, rows: Rows, variant: str, plan: Options, score: Options | None = None) -> None:
        """Measure a variant that is not tuned."""
        recipe = json.dumps([plan, score or {}], sort_keys=True)
        rows.add(self.key(variant), lambda: self._once(recipe, lambda: self.compressed(plan, score)))

    def _once(self, recipe: str, make: Callable[[], nn.Module]) -> Row:
        """Measure what several experiments have in common once."""
        if recipe not in self._measured:
            self._measured[recipe] = self.measure(make())
        return self._measured[recipe]

    @abstractmethod
    def training(self, crop: bool) -> Any:
        """What `finetune` is shown, with random crops or without."""

    @abstractmethod
    def recipe(self, crop: bool) -> FinetuneConfig:
        """How it is tuned."""

    def add_tuned(
        self, rows: Rows, variant: str, plan: Options, tuning: Options, seed: int, crop: bool = False
    ) -> None:
        """Measure a variant that is tuned, with this seed."""
        config = replace(self.recipe(crop), seed=seed, **tuning)
        recipe = json.dumps([plan, asdict(config), crop], sort_keys=True)

        def tuned() -> nn.Module:
            model = self.compressed(plan)
            output = None if self.runs is None else self.runs / sha256((self.title + recipe).encode()).hexdigest()[:12]
            options = {"train": self.training(crop), "output": output, "resume": bool(output), **vars(config)}
            pmvit.finetune(model, teacher=self.model, **options)
            return model

        rows.add(self.key(variant, seed), lambda: self._once(recipe, tuned))


class FolderSubject(Subject):
    """A timm model and a folder with `train` and `val`."""

    runs = Path("runs/experiments")

    def __init__(self, name: str, data: Path, settings: Settings, stage: str) -> None:
        super().__init__()
        self.name = name
        self.data = data / "imagenet" if (data / "imagenet").is_dir() else data
        self.weights = data / "weights" / f"{name}.safetensors"
        self.settings = settings
        self.title = (
            f"{name}, {settings.images:,} images of {self.data.name}/val ({settings.scored:,} of train scored), {stage}"
        )

    @cached_property
    def model(self) -> nn.Module:  # type: ignore[override]  # made when asked for
        return create_model(self.name, self.weights if self.weights.is_file() else None)

    @cached_property
    def batches(self) -> Batches:  # type: ignore[override]  # read when asked for
        return self._first("val", self.settings.images)

    def scored_images(self) -> Batches:
        return self._first("train", self.settings.scored)

    def _first(self, half: str, count: int) -> Batches:
        if count < 1 or count % BATCH_SIZE:
            raise pmvit.PmvitError(f"expected a number of images in batches of {BATCH_SIZE}, got {count}")
        options: dict[str, Any] = {"batch_size": BATCH_SIZE, "shuffle": True, "seed": SEED, "workers": 0}
        return list(islice(open_loader(self.model, self.data / half, **options), count // BATCH_SIZE))

    def training(self, crop: bool) -> Path:
        return self.data / "train"

    def recipe(self, crop: bool) -> FinetuneConfig:
        scale = CROP_SCALE if crop else (1.0, 1.0)
        return FinetuneConfig(epochs=self.settings.epochs, alpha=1.0, crop_scale=scale)


class DemoSubject(Subject):
    """The small ViT and the Fashion-MNIST images that come with the package."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self.title = (
            f"the demo's ViT on Fashion-MNIST, {TESTED:,} test images, tuned for {settings.epochs} epochs on "
            f"{TRAINED:,} images"
        )

    @cached_property
    def model(self) -> nn.Module:  # type: ignore[override]  # made when asked for
        return demo_model()

    @cached_property
    def batches(self) -> Batches:  # type: ignore[override]  # read when asked for
        return demo_loader("test", count=TESTED)

    def scored_images(self) -> Batches:
        return demo_loader("train", count=TRAINED)

    def training(self, crop: bool) -> "ShuffledDemo":
        return ShuffledDemo(crop)

    def recipe(self, crop: bool) -> FinetuneConfig:
        return replace(TUNING, epochs=self.settings.epochs)


class ShuffledDemo:
    """The demo's training images in an order of every epoch's own, cropped at random or not.

    All is drawn from PyTorch's generator, which `finetune` seeds.
    """

    def __init__(self, crop: bool) -> None:
        ((self.images, self.labels),) = demo_loader("train", TRAINED, TRAINED)
        self.crop = crop

    def __len__(self) -> int:
        return TRAINED // TUNING_BATCH

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for chosen in torch.randperm(TRAINED).split(TUNING_BATCH):
            images = self.images[chosen]
            yield random_crops(images) if self.crop else images, self.labels[chosen]


def random_crops(images: Tensor) -> Tensor:
    """A square of each image, of a random share of it and at a random place, resized to the whole."""
    low, high = CROP_SCALE
    side = torch.empty(len(images)).uniform_(low, high).sqrt()
    centre = (1 - side)[:, None] * torch.empty(len(images), 2).uniform_(-1, 1)
    squares = torch.diag_embed(side[:, None].expand(-1, 2))
    places = F.affine_grid(torch.cat([squares, centre[..., None]], 2), list(images.shape), align_corners=False)
    return F.grid_sample(images, places, padding_mode="border", align_corners=False)


@cache
def untuned_subjects(settings: Settings) -> list[FolderSubject]:
    """The models that are measured as they are compressed."""
    return [FolderSubject(name, settings.data, settings, "not tuned") for name in settings.models]


@cache
def tuned_subject(settings: Settings) -> Subject:
    """What is tuned: the demo, or the first model on the user's images."""
    if settings.tune_data is None:
        return DemoSubject(settings)
    stage = f"tuned for {settings.epochs} epochs"
    return FolderSubject(settings.models[0], settings.tune_data, settings, stage)
