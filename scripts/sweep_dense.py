"""Readers of the grid at reduced size for the sweep: timm's feature extractors, DPT of segmentation_models_pytorch."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

import pmvit  # noqa: F401  # lets torchvision import

import timm  # isort: skip  # after pmvit

FAMILIES = {
    "timm features": "timm with `features_only=True`: one of each kind",
    "smp dpt": "segmentation_models_pytorch: DPT on timm's, one of each kind",
}
ENCODERS = (  # a class token, two prefix tokens, none, relative position bias for each block, rotary embedding, a stem
    *("vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "vit_base_patch16_siglip_224"),
    *("vit_relpos_small_patch16_224", "beit_base_patch16_224", "vit_small_patch16_dinov3", "vit_tiny_r_s16_p8_224"),
)
SMALL: dict[str, Any] = {"img_size": 96, "embed_dim": 48, "num_heads": 3}


def makers(classes: int) -> list[tuple[str, str, Callable[[], nn.Module]]]:
    """Family, name and factory of each."""
    features = [("timm features", name, partial(create_features, name)) for name in ENCODERS]
    return [*features, *(("smp dpt", name, partial(create_dpt, name, classes=classes)) for name in ENCODERS)]


def create_features(name: str, **arguments: Any) -> nn.Module:
    """Four narrow blocks on 6 x 6 patches, of which two are read."""
    settings = {**SMALL, "depth": 4, "out_indices": (1, 3), **arguments}
    model: nn.Module = timm.create_model(name, features_only=True, **settings)
    return model.eval()


def create_dpt(name: str, **arguments: Any) -> nn.Module:
    """A DPT with a small decoder on twelve narrow blocks and 6 x 6 patches."""
    import segmentation_models_pytorch as smp

    decoder = {"decoder_intermediate_channels": (8, 8, 8, 8), "decoder_fusion_channels": 8}
    model: nn.Module = smp.DPT(f"tu-{name}", encoder_weights=None, **{**SMALL, **decoder, **arguments})
    return model.eval()
