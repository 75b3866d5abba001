"""Small Swin Transformers for the tests: two stages of two narrow blocks each, with real windows and shifts."""

from typing import Any

import torch
from torch import Tensor, nn

import pmvit
from pmvit.hosts import host_of
from pmvit.measuring import Scores

import timm  # isort: skip  # after pmvit, which lets torchvision import
from torchvision.models import swin_transformer

V1, V2 = "swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"
HOSTS: dict[str, tuple[str, dict[str, Any]]] = {
    "v1": (V1, {"img_size": 112}),
    "v1 padded": (V1, {"img_size": (84, 100)}),
    "v1 always partitioned": (V1, {"img_size": 60, "always_partition": True, "strict_img_size": False}),
    "v2": (V2, {"img_size": 128}),
    "v2 padded": (V2, {"img_size": (88, 100), "strict_img_size": False}),
    "torchvision v1": ("torchvision", {"image_size": (112, 112)}),
    "torchvision v1 padded": ("torchvision", {"image_size": (84, 100)}),
    "torchvision v2 padded": ("torchvision v2", {"image_size": (100, 112)}),
}


def small_swin(host: str = "v1", **arguments: Any) -> Any:
    """Two stages of two narrow blocks each, the second shifted; real windows; random weights, none of them zero."""
    name, size = HOSTS[host]
    torch.manual_seed(0)
    model: Any
    defaults = {"embed_dim": 32, "depths": (2, 2), "num_heads": (2, 4), "num_classes": 7}
    if name.startswith("torchvision"):
        is_v2 = name.endswith("v2")
        parts = {"block": swin_transformer.SwinTransformerBlockV2, "downsample_layer": swin_transformer.PatchMergingV2}
        made_of = {**defaults, "patch_size": [4, 4], "window_size": [7, 7], **(parts if is_v2 else {}), **arguments}
        model = swin_transformer.SwinTransformer(**made_of)
        model.image_size = size["image_size"]
    else:
        model = timm.create_model(name, **{**defaults, **size, **arguments})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def images(model: nn.Module, count: int = 2) -> Tensor:
    size = host_of(model).input_size()
    return torch.randn(count, *size, generator=torch.Generator().manual_seed(0))


def scored(model: nn.Module, **options: Any) -> Scores:
    batches = [(images(model), torch.tensor([1, 2]))]
    scores: Scores = pmvit.measure(model, batches, method="scored", progress=False, **options)
    return scores


def compressed(host: str = "v1", learn: Any = "group", depths: Any = (2, 2), **options: Any) -> tuple[Any, Any]:
    model = small_swin(host, depths=depths, num_heads=(2, 4)[: len(depths)])
    made = pmvit.plan(
        pmvit.measure(model, [], method="scored", scorer="random"), **{"keep": 0.6, "prune": 0.1, **options}
    )
    return model, pmvit.compress(model, made, learn=learn)


def grids_of(model: nn.Module) -> tuple[tuple[int, ...], ...]:
    return tuple(layout.grid for layout in host_of(model).layouts())


def difference(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())
