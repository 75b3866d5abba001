"""Swin architectures at reduced size for the sweep: few narrow blocks, the windows and shifts of the real ones."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import pmvit  # noqa: F401  # lets torchvision import

import timm  # isort: skip  # after pmvit

FAMILIES = {
    "swin_transformer": "timm Swin (shifted windows; each also with padding)",
    "swin_transformer_v2": "timm Swin v2 (cosine attention, continuous position bias; each also with padding)",
    "hf swin": "transformers: Swin, Swin v2 (each also with padding)",
    "torchvision swin": "torchvision: Swin, Swin v2 (each also with padding)",
}
PADDED = " padded"
HF = (
    *("SwinModel", "SwinForImageClassification", "SwinForMaskedImageModeling", "SwinBackbone"),
    *("Swinv2Model", "Swinv2ForImageClassification", "Swinv2Backbone", "UperNetForSemanticSegmentation"),
)
HF_SMALL: dict[str, Any] = {"embed_dim": 24, "depths": [2, 2], "num_heads": [1, 2], "window_size": 7, "patch_size": 4}


def makers(classes: int) -> list[tuple[str, str, Callable[[], nn.Module]]]:
    """Family, name and factory of each; each twice, once with an image whose grid is no multiple of the window."""
    found: list[tuple[str, str, Callable[[str, int], nn.Module]]] = [
        (family, name, create_reduced)
        for family in ("swin_transformer", "swin_transformer_v2")
        for name in timm.list_models(module=family)
    ]
    found += [("hf swin", name, create_hf) for name in HF]
    found += [("torchvision swin", name, create_torchvision) for name in ("swin", "swin_v2")]
    return [
        (family, name + how, partial(make, name + how, classes)) for family, name, make in found for how in ("", PADDED)
    ]


def create_hf(name: str, classes: int) -> nn.Module:
    """A model of transformers with two stages of two blocks."""
    import transformers

    host = name.removesuffix(PADDED)
    config = transformers.Swinv2Config if host.startswith("Swinv2") else transformers.SwinConfig
    arguments = {**HF_SMALL, "image_size": 100 if name.endswith(PADDED) else 56, "num_labels": classes}
    if host.startswith("UperNet") or host.endswith("Backbone"):
        arguments["out_features"] = ["stage1", "stage2"]
    if host.endswith("MaskedImageModeling"):
        arguments["encoder_stride"] = 8
    made: Any = config(**arguments)
    if host.startswith("UperNet"):
        labels: dict[str, Any] = {"num_labels": classes}  # of the base class, which says so nowhere
        made = transformers.UperNetConfig(
            backbone_config=made, hidden_size=24, pool_scales=[1, 2], use_auxiliary_head=False, **labels
        )
    model: nn.Module = getattr(transformers, host)(made)
    return model.eval()


def create_torchvision(name: str, classes: int) -> nn.Module:
    """A model of torchvision with two stages of two blocks."""
    from torchvision.models import swin_transformer as swin

    is_v2 = name.startswith("swin_v2")
    parts = {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2} if is_v2 else {}
    model: Any = swin.SwinTransformer([4, 4], 24, [2, 2], [1, 2], [7, 7], num_classes=classes, **parts)
    model.image_size = (84, 100) if name.endswith(PADDED) else (56, 56)
    result: nn.Module = model.eval()
    return result


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
