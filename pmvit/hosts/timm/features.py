"""timm's feature extractors: `features_only=True` on a plain vision transformer."""

from typing import Any

import timm
from timm.models._features import FeatureGetterNet, feature_take_indices
from torch import Tensor, nn

from pmvit.hosts.host import AnyModule, Outputs, register
from pmvit.hosts.timm.encoder import OnTimmViT


@register
class TimmFeatures(OnTimmViT):
    """The blocks stand in `model.model.blocks`; what comes out is a list of feature maps, one a block that is read."""

    key = "timm-features"
    family = "timm feature extractor (features_only=True on a plain ViT)"
    path = "model"

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        return isinstance(model, FeatureGetterNet) and isinstance(model.model, cls.classes)

    def blocks_read(self) -> list[int]:
        taken, _ = feature_take_indices(len(self.encoder.model.blocks), self.model.out_indices)
        return [int(index) for index in taken]

    def outputs(self) -> Outputs:
        return Outputs(gives_logits=False, returns_tensor=False)

    def describe(self, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
        return super().describe({"features_only": True, **(arguments or {})})

    @classmethod
    def plain(cls, architecture: str) -> nn.Module:
        model: nn.Module = timm.create_model(architecture, features_only=True)
        return model

    def traits(self) -> dict[str, Any]:
        return {**self.encoder.traits(), "out_indices": self.blocks_read()}


def select_weights(model: AnyModule, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of a classifier's weights that a feature extractor has, under its names."""
    names = {name: f"{TimmFeatures.path}.{name}" for name in tensors}
    expected = model.state_dict()
    return {name: tensors[own] for own, name in names.items() if name in expected}
