"""Small models of Hugging Face transformers, one of each family."""

from typing import Any

import torch
from torch import Tensor, nn

from pmvit.hosts import host_of
from scripts.sweep import randomise
from scripts.sweep_models import reduced_hf

LABELS = {"num_labels": 7}
BIAS = {"use_relative_position_bias": True, "layer_scale_init_value": 0.1}
YOLOS = {"image_size": [96, 80], "num_detection_tokens": 5, "use_mid_position_embeddings": True}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "vit": ("ViTForImageClassification", "ViTConfig", LABELS),
    "deit": ("DeiTForImageClassificationWithTeacher", "DeiTConfig", LABELS),
    "beit": ("BeitForImageClassification", "BeitConfig", {**BIAS, **LABELS}),
    "data2vec": ("Data2VecVisionForImageClassification", "Data2VecVisionConfig", {**BIAS, **LABELS}),
    "dinov2": ("Dinov2ForImageClassification", "Dinov2Config", LABELS),
    "registers": ("Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersConfig", LABELS),
    "dinov3": ("DINOv3ViTModel", "DINOv3ViTConfig", {"num_register_tokens": 2}),
    "clip": ("CLIPVisionModelWithProjection", "CLIPVisionConfig", {}),
    "siglip": ("SiglipVisionModel", "SiglipVisionConfig", {}),
    "mae": ("ViTMAEModel", "ViTMAEConfig", {"mask_ratio": 0.0}),
    "yolos": ("YolosForObjectDetection", "YolosConfig", {**YOLOS, **LABELS}),
}
OTHERS = ("CLIPModel", "SiglipModel", "Dinov2Backbone", "BeitForSemanticSegmentation", "DPTForSemanticSegmentation")


def make(family: str, **more: Any) -> Any:
    torch.manual_seed(0)
    model, config, changes = FAMILIES[family]
    made: Any = reduced_hf(model, config, {**changes, **more})
    randomise(made)
    return made


def vit(**more: Any) -> Any:
    return make("vit", **more)


def images_for(model: nn.Module, count: int = 3) -> Tensor:
    size = host_of(model).input_size()
    return torch.randn(count, *size, generator=torch.Generator().manual_seed(1), dtype=next(model.parameters()).dtype)
