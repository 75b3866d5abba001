"""What the tests share: the real weights and images, and small models."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

import pmvit
from pmvit.data.loaders import create_loader
from pmvit.data.sources import open_source
from pmvit.hosts import host_of
from pmvit.loading import create_model
from pmvit.measuring import Scores
from pmvit.planning import Plan
from tests.helpers import make_pictures, small_vit

DATA = Path(os.environ.get("PMVIT_DATA", Path(__file__).parents[2] / "shared" / "data"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not DATA.is_dir():
        for item in items:
            if "data" in item.keywords:
                item.add_marker(pytest.mark.skip(reason=f"no real weights and images at {DATA} (PMVIT_DATA)"))


@pytest.fixture(scope="session")
def data() -> Path:
    return DATA


@pytest.fixture(scope="session")
def deit_tiny() -> nn.Module:
    """DeiT-Tiny with its ImageNet weights; tests do not change it."""
    return create_model("deit_tiny_patch16_224", DATA / "weights" / "deit_tiny_patch16_224.safetensors")


@pytest.fixture(scope="session")
def train_batches(deit_tiny: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """64 ImageNet training images in four batches."""
    config = host_of(deit_tiny).data_config()
    loader = create_loader(open_source(DATA / "imagenet/train", 1000), config, batch_size=16, workers=0, shuffle=True)
    return [batch for batch, _ in zip(loader, range(4), strict=False)]


@pytest.fixture(scope="session")
def deit_scores(deit_tiny: nn.Module, train_batches: list[tuple[torch.Tensor, torch.Tensor]]) -> Scores:
    return pmvit.measure(deit_tiny, train_batches, method="scored", progress=False)


@pytest.fixture(scope="session")
def vit_tiny() -> nn.Module:
    """ViT-Tiny with its ImageNet weights; tests do not change it."""
    return create_model("vit_tiny_patch16_224", DATA / "weights" / "vit_tiny_patch16_224.safetensors").float()


@pytest.fixture(scope="session")
def real_images(vit_tiny: nn.Module) -> torch.Tensor:
    """Eight ImageNet training images, prepared for ViT-Tiny."""
    config = host_of(vit_tiny).data_config()
    loader = create_loader(open_source(DATA / "imagenet/train"), config, batch_size=8, workers=0, shuffle=True)
    images: torch.Tensor = next(iter(loader))[0]
    return images


@pytest.fixture(scope="session")
def vit_tiny_plan(vit_tiny: nn.Module, real_images: torch.Tensor) -> Plan:
    """A plan at keep 0.6 for ViT-Tiny and for the same model in other libraries."""
    return pmvit.plan(
        pmvit.measure(vit_tiny, [real_images], method="scored", loss="predicted", progress=False), keep=0.6, prune=0.1
    )


@pytest.fixture
def small_model() -> nn.Module:
    return small_vit()


@pytest.fixture(scope="session")
def small_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 3, 96, 96, generator=generator), torch.randint(0, 7, (4,), generator=generator))
        for _ in range(3)
    ]


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """64 images in 7 class folders, coloured by class so that there is something to learn."""
    return make_pictures(tmp_path / "pictures")
