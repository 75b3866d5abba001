"""Swin architectures at reduced size for the sweep: few narrow blocks, the windows and shifts of the real ones."""

from typing import Any

import torch
from torch import nn

import pmvit  # noqa: F401  # lets torchvision import

import timm  # isort: skip  # after pmvit

FAMILIES = {
    "swin_transformer": "Swin (shifted windows; each also with padding)",
    "swin_transformer_v2": "Swin v2 (cosine attention, continuous position bias; each also with padding)",
}
PADDED = " padded"


def architectures() -> list[tuple[str, str]]:
    """(family, architecture) pairs; each twice, once with an image whose grid is no multiple of the window."""
    names = [(family, name) for family in FAMILIES for name in timm.list_models(module=family)]
    return [(family, name + how) for family, name in names for how in ("", PADDED)]


def create_reduced(name: str, classes: int) -> nn.Module:
    """Create an architecture with three stages of two blocks and a grid of about two by two windows."""
    architecture = name.removesuffix(PADDED)
    with torch.device("meta"):
        full: Any = timm.create_model(architecture)
    windows = [tuple(stage.blocks[0].window_size) for stage in full.layers][:3]
    missing = (3, 1) if name.endswith(PADDED) else (0, 0)
    sides = tuple(
        patch * (2 * window - less)
        for patch, window, less in zip(full.patch_embed.patch_size, windows[0], missing, strict=True)
    )
    model: nn.Module = timm.create_model(
        architecture,
        img_size=sides,
        depths=(2, 2, 2),
        embed_dim=24,
        num_heads=(1, 2, 3),
        window_size=windows[0] if len(set(windows)) == 1 else windows,
        num_classes=classes,
        strict_img_size=not name.endswith(PADDED),
    )
    return model.eval()
