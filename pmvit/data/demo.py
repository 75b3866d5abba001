"""The built-in demo: a small ViT and a few thousand Fashion-MNIST images, shipped inside the package."""

import timm
from torch import nn

MEAN, STD = 0.2860, 0.3530  # of Fashion-MNIST's training images
ARCHITECTURE = "vit_tiny_patch16_224"
ARGUMENTS = {
    "img_size": 28,
    "patch_size": 2,
    "in_chans": 1,
    "embed_dim": 128,
    "depth": 6,
    "num_heads": 4,
    "num_classes": 10,
}


def create_demo_model() -> nn.Module:
    """Build the demo's ViT with random weights: 14 x 14 patches and a class token, 1.2 million parameters."""
    return timm.create_model(ARCHITECTURE, **ARGUMENTS)
