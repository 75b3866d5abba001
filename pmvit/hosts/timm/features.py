"""Adapter for timm's feature extractors: `features_only=True` on a plain vision transformer."""

from typing import Any

import timm
from timm.models._features import FeatureGetterNet, feature_take_indices
from torch import Tensor

from pmvit.hosts.host import register
from pmvit.hosts.timm.encoder import ENCODERS, OnTimmViT

Host = Any  # timm's models: nn.Modules whose attributes have no types


@register
class TimmFeatures(OnTimmViT):
    """The blocks stand in `model.model.blocks`; what comes out is a list of feature maps, one a block that is read."""

    family = "timm feature extractor (features_only=True on a plain ViT)"
    path = "model"
    returns_tensor = False

    def matches(self, model: Host) -> bool:
        return isinstance(model, FeatureGetterNet) and isinstance(model.model, self.classes)

    def blocks_read(self, model: Host) -> list[int]:
        taken, _ = feature_take_indices(len(model.model.blocks), model.out_indices)
        return [int(index) for index in taken]

    def gives_logits(self, model: Host) -> bool:
        return False

    def describe(self, model: Host, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
        return super().describe(model, {"features_only": True, **(arguments or {})})

    def plain(self, architecture: str) -> Host:
        return timm.create_model(architecture, features_only=True)

    def traits(self, model: Host) -> dict[str, Any]:
        return {**ENCODERS.traits(model.model), "out_indices": self.blocks_read(model)}


def select_weights(model: Host, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of a classifier's weights that a feature extractor has, under its names."""
    names = {name: f"{TimmFeatures.path}.{name}" for name in tensors}
    expected = model.state_dict()
    return {name: tensors[own] for own, name in names.items() if name in expected}
