"""What the tests share: the real weights and images, and small models."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

import pmvit
from pmvit.data.folder import image_folder
from pmvit.loading import create_model
from pmvit.models import adapter_for

import timm  # isort: skip  # after pmvit, which lets torchvision import

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
    config = adapter_for(deit_tiny).data_config(deit_tiny)
    loader = image_folder(DATA / "imagenet/train", config, num_classes=1000, batch_size=16, workers=0, shuffle=True)
    return [batch for batch, _ in zip(loader, range(4), strict=False)]


@pytest.fixture(scope="session")
def deit_scores(deit_tiny: nn.Module, train_batches: list[tuple[torch.Tensor, torch.Tensor]]) -> pmvit.Scores:
    return pmvit.score(deit_tiny, train_batches, progress=False)


def small_vit(name: str = "vit_tiny_patch16_224", **arguments: object) -> nn.Module:
    """A ViT of three narrow blocks on 6 x 6 patches, random weights, none of them zero."""
    torch.manual_seed(0)
    defaults = {"img_size": 96, "embed_dim": 48, "depth": 3, "num_heads": 3, "num_classes": 7}
    model: nn.Module = timm.create_model(name, **{**defaults, **arguments})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


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
