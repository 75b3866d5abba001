"""What a model puts out, as one tensor, whatever its library returns: the one place where it is decided."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pmvit.errors import PmvitError
from pmvit.hosts.host import Host, find_host

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


LEAST = 1e-4  # what is added to the share of a class at a pixel: runtimes compute smaller ones differently

Parts = Tensor | tuple[Tensor, ...]


def parts_of(output: Any) -> Parts:
    """What stands for what a model returned: a tensor, or several feature maps."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        if output.get("masks_queries_logits") is not None:
            return pixel_scores(output["class_queries_logits"], output["masks_queries_logits"])
        found = next((output[name] for name in NAMES if output.get(name) is not None), None)
        if found is not None:
            return parts_of(found)
    if isinstance(output, (tuple, list)) and output and all(isinstance(part, Tensor) for part in output):
        return output[0] if len(output) == 1 else tuple(output)
    names = ", ".join(output) if isinstance(output, Mapping) else type(output).__name__
    raise PmvitError(f"expected a model that returns a tensor or one of {', '.join(NAMES)}; got {names}")


def pixel_scores(classes: Tensor, masks: Tensor) -> Tensor:
    """Logits of the classes of each pixel, (batch, classes, height, width), from queries.

    A query speaks for its classes where its mask is, as MaskFormer has it for semantic segmentation. What all queries
    say of a class at a pixel is a sum of probabilities: its logarithm is the logit. A class that is alone is told from
    nothing at one half.

    Args:
        classes: Logits of shape (batch, queries, classes + 1); the last one is that of no object.
        masks: Logits of shape (batch, queries, height, width).
    """
    shares = classes.softmax(-1)[..., :-1]
    said = torch.einsum("bqc,bqhw->bchw", shares, masks.sigmoid())
    return (said + LEAST).log() if said.shape[1] > 1 else said.logit(eps=LEAST)


def as_tensor(output: Any) -> Tensor:
    """The tensor that stands for what a model returned: logits, embedding, pooled output, features or tokens.

    Several feature maps become one row of numbers for each image.
    """
    parts = parts_of(output)
    return parts if isinstance(parts, Tensor) else torch.cat([part.flatten(1) for part in parts], dim=1)


def logits_of(output: Any) -> Tensor:
    """`as_tensor` with the classes in the last dimension, where segmentation has them in the second.

    One channel a pixel is the logit of the second of two classes; that of the first is 0.
    """
    tensor = as_tensor(output)
    if tensor.dim() != 4:
        return tensor
    tensor = tensor.movedim(1, -1)
    return tensor if tensor.shape[-1] > 1 else F.pad(tensor, (1, 0))


def predict(model: nn.Module, images: Tensor) -> Tensor:
    """Run a model of any library on images: its logits, classes last, or what else it makes of them."""
    host = find_host(model)
    if host is None:
        return logits_of(model(images))
    try:
        return logits_of(host.call(images))
    except (AssertionError, RuntimeError, ValueError):
        check_size(host, images)
        raise


def check_size(host: Host, images: Tensor) -> None:
    """Raise `PmvitError` if images are not of the one size that a model is measured at, or that a plan is for."""
    got, expected = tuple(images.shape[1:]), host.input_size()
    if got != expected:
        raise PmvitError(
            f"expected images of shape {expected}, as the model takes them; got {got}: bring the images to that size, "
            "or the model to theirs, by pmvit.compression.at_size or by img_size= when it is made"
        )


def gives_logits(model: nn.Module) -> bool:
    """Whether a model puts out scores of classes, and not an embedding or features."""
    host = find_host(model)
    return host is None or host.outputs().gives_logits


def num_classes_of(model: nn.Module) -> int | None:
    """How many classes a model tells apart; `None` if it is no classifier."""
    host = find_host(model)
    return getattr(model, "num_classes", None) or None if host is None else host.outputs().num_classes


class Predictor(nn.Module):
    """A model of a library that returns more than a tensor, as a module from images to a tensor.

    Args:
        model: The model.
        kind: The class of its host.
        apart: Return several feature maps as they are, not in one row.
    """

    def __init__(self, model: nn.Module, kind: type[Host], apart: bool = False) -> None:
        super().__init__()
        self.model = model
        self.kind = kind
        self.apart = apart

    def forward(self, images: Tensor) -> Parts:
        output = self.kind(self.model).call(images)
        return parts_of(output) if self.apart else as_tensor(output)


def as_module(model: nn.Module, apart: bool = False) -> nn.Module:
    """The model itself if it maps images to a tensor, else a `Predictor` around it."""
    host = find_host(model)
    if host is None or host.outputs().returns_tensor:
        return model
    return Predictor(model, type(host), apart).train(model.training)
