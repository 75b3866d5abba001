"""The built-in demo: a small ViT and a few thousand Fashion-MNIST images, shipped inside the package."""

from pathlib import Path
from typing import Any, cast

import timm
from safetensors.torch import load_file
from torch import Tensor, nn

DEMO = "demo"  # what the model and its images are called where a name or a path is asked for
FOLDER = Path(__file__).with_name(DEMO)
CLASSES = ("T-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
MEAN, STD = 0.2860, 0.3530  # of Fashion-MNIST's training images


def create_demo_model() -> nn.Module:
    """Build the demo's ViT with random weights: 14 x 14 patches and a class token, 1.2 million parameters."""
    sizes: dict[str, Any] = {"img_size": 28, "patch_size": 2, "in_chans": 1, "embed_dim": 128, "depth": 6}
    model: Any = timm.create_model("vit_tiny_patch16_224", num_heads=4, num_classes=len(CLASSES), **sizes)
    model.pretrained_cfg.update(mean=(MEAN,), std=(STD,), crop_pct=1.0, label_names=CLASSES)
    return cast("nn.Module", model)


def demo_model() -> nn.Module:
    """The demo's ViT with its trained weights, in evaluation mode."""
    model = create_demo_model()
    model.load_state_dict(load_file(FOLDER / "vit.safetensors"))  # float16 on disk, float32 in the model
    return model.eval()


def demo_images(half: str, count: int | None = None) -> tuple[Tensor, Tensor]:
    """The first images of the `train` or `test` half, as bytes (count, 28, 28), and their labels."""
    arrays = load_file(FOLDER / "images.safetensors")
    return arrays[f"{half}_images"][:count], arrays[f"{half}_labels"][:count].long()


def demo_loader(half: str, batch_size: int = 250, count: int | None = None) -> list[tuple[Tensor, Tensor]]:
    """Batches of the demo's images, prepared for its model, with their labels."""
    images, labels = demo_images(half, count)
    prepared = (images[:, None].float() / 255 - MEAN) / STD
    return list(zip(prepared.split(batch_size), labels.split(batch_size), strict=True))
