"""Small models with decoders that read the grid."""

from typing import Any

import torch
from torch import Tensor, nn

from pmvit.hosts import host_of
from scripts.sweep import randomise
from scripts.sweep_dense import create_dpt, create_features
from scripts.sweep_models import reduced_hf

VIT = "vit_tiny_patch16_224"
NARROW: dict[str, Any] = {"img_size": (64, 96)}  # 4 x 6 patches
EOMT = {"num_labels": 3, "num_hidden_layers": 4, "num_blocks": 2, "num_queries": 5}


def dpt(**arguments: Any) -> Any:
    torch.manual_seed(0)
    model = create_dpt("test_vit", **{"classes": 3, **NARROW, **arguments})  # six blocks
    randomise(model)
    return model


def features(**arguments: Any) -> Any:
    torch.manual_seed(0)
    model = create_features(VIT, **{**NARROW, **arguments})
    randomise(model)
    return model


def eomt(masks: bool = True, **changes: Any) -> Any:
    torch.manual_seed(0)
    made: Any = reduced_hf("EomtForUniversalSegmentation", "EomtConfig", {**EOMT, **changes})
    randomise(made)
    made.attn_mask_probs.fill_(float(masks))
    return made


def images_for(model: nn.Module, count: int = 2) -> Tensor:
    size = host_of(model).input_size()
    return torch.randn(count, *size, generator=torch.Generator().manual_seed(1))


def masks_for(model: nn.Module, classes: int = 3) -> Tensor:
    height, width = host_of(model).input_size()[1:]
    return torch.randint(0, classes, (2, height, width), generator=torch.Generator().manual_seed(2))
