"""What a model puts out, as one tensor, whatever its library returns: the one place where it is decided."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pmvit.errors import PmvitError
from pmvit.models.adapter import Adapter, find_adapter

# What stands for a model that returns several things: the first of these that there is.
NAMES = (
    "logits",
    "image_embeds",
    "pooler_output",
    "predicted_depth",
    "reconstruction",
    "feature_maps",
    "last_hidden_state",
)


def as_tensor(output: Any) -> Tensor:
    """The tensor that stands for what a model returned: logits, embedding, pooled output, features or tokens.

    Several feature maps become one row of numbers for each image.
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        found = next((output[name] for name in NAMES if output.get(name) is not None), None)
        if found is not None:
            return as_tensor(found)
    if isinstance(output, (tuple, list)) and output and all(isinstance(part, Tensor) for part in output):
        return torch.cat([part.flatten(1) for part in output], dim=1)
    names = ", ".join(output) if isinstance(output, Mapping) else type(output).__name__
    raise PmvitError(f"expected a model that returns a tensor or one of {', '.join(NAMES)}; got {names}")


def logits_of(output: Any) -> Tensor:
    """`as_tensor` with the classes in the last dimension, where segmentation has them in the second."""
    tensor = as_tensor(output)
    return tensor.movedim(1, -1) if tensor.dim() == 4 else tensor


def predict(model: nn.Module, images: Tensor) -> Tensor:
    """Run a model of any library on images: its logits, classes last, or what else it makes of them."""
    adapter = find_adapter(model)
    return logits_of(model(images) if adapter is None else adapter.call(model, images))


def gives_logits(model: nn.Module) -> bool:
    """Whether a model puts out scores of classes, and not an embedding or features."""
    adapter = find_adapter(model)
    return adapter is None or adapter.gives_logits(model)


class Predictor(nn.Module):
    """A model of a library that returns more than a tensor, as a module from images to a tensor."""

    def __init__(self, model: nn.Module, adapter: Adapter) -> None:
        super().__init__()
        self.model = model
        self.adapter = adapter

    def forward(self, images: Tensor) -> Tensor:
        return as_tensor(self.adapter.call(self.model, images))


def as_module(model: nn.Module) -> nn.Module:
    """The model itself if it maps images to a tensor, else a `Predictor` around it."""
    adapter = find_adapter(model)
    return model if adapter is None or adapter.returns_tensor else Predictor(model, adapter).train(model.training)
