"""Weights for a Segmenter: the published checkpoints, what pmvit saved, or an encoder's alone."""

from math import isqrt
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pmvit.errors import PmvitError
from pmvit.hosts.segmenter.model import DecoderKind, Segmenter

State = dict[str, Tensor]
PUBLISHED_EPS = 1e-5  # of every layer norm in the published models; timm's have 1e-6
HEADS = ("head.", "head_dist.", "fc_norm.", "pre_logits.")  # of an image classifier: nothing here reads them


class Traits(NamedTuple):
    """What a checkpoint says of the model it is for; `None` where it does not say."""

    classes: int | None
    decoder: DecoderKind | None
    norm_eps: float | None
    patches: int | None


def is_whole(state: State) -> bool:
    """Whether there is a decoder beside the encoder."""
    return any(name.startswith("decoder.") for name in state)


def read_traits(state: State) -> Traits:
    """Classes, decoder, layer norm and the number of patches of a checkpoint.

    A published checkpoint is told by the head of an image classifier that its encoder still has.
    """
    published = "encoder.head.weight" in state
    classes: int | None = None
    decoder: DecoderKind | None = None
    if "decoder.cls_emb" in state:
        classes, decoder = state["decoder.cls_emb"].shape[1], "mask"
    elif "decoder.head.weight" in state:
        classes, decoder = state["decoder.head.weight"].shape[0], "linear"
    elif is_whole(state):
        raise PmvitError(
            "expected a Segmenter checkpoint with a mask transformer (decoder.cls_emb) or a linear decoder "
            "(decoder.head.weight); got another decoder"
        )
    prefix = sum(f"encoder.{name}" in state for name in ("cls_token", "dist_token"))
    table = state.get("encoder.pos_embed")
    patches = None if table is None else table.shape[1] - prefix
    return Traits(classes, decoder, PUBLISHED_EPS if published else None, patches)


def image_side(traits: Traits, patch_size: tuple[int, int]) -> int | None:
    """The side of the square images that a checkpoint was trained on, if it was square ones."""
    if traits.patches is None or patch_size[0] != patch_size[1] or isqrt(traits.patches) ** 2 != traits.patches:
        return None
    return isqrt(traits.patches) * patch_size[0]


def fit(state: State, model: Segmenter) -> State:
    """The tensors of a checkpoint under the names and in the sizes of the model.

    The head of the classifier is left out, and the position embedding is resized as the published code does it. The
    weights of an encoder alone leave the decoder of the model as it is.
    """
    expected = model.state_dict()
    if not is_whole(state):
        bare = {name.removeprefix("encoder."): value for name, value in state.items()}
        state = {f"encoder.{name}": value for name, value in bare.items()}
        state |= {name: value for name, value in expected.items() if name.startswith("decoder.")}
    heads = tuple(f"encoder.{head}" for head in HEADS)
    fitted = {name: value for name, value in state.items() if name in expected or not name.startswith(heads)}
    table = fitted.get("encoder.pos_embed")
    if table is not None and "encoder.pos_embed" in expected:
        fitted["encoder.pos_embed"] = _resized(table, model, expected["encoder.pos_embed"].shape[1])
    return fitted


def _resized(table: Tensor, model: Segmenter, length: int) -> Tensor:
    """A position embedding of a square grid, for the grid of the model."""
    height, width = model.encoder.patch_embed.grid_size
    num_prefix = length - height * width
    prefix, patches = table[:, :num_prefix], table[:, num_prefix:]
    side = isqrt(patches.shape[1])
    if table.shape[1] == length or side**2 != patches.shape[1]:
        return table
    grid = patches.transpose(1, 2).unflatten(2, (side, side))
    grid = F.interpolate(grid.float(), size=(height, width), mode="bilinear").to(table.dtype)
    return torch.cat([prefix, grid.flatten(2).transpose(1, 2)], dim=1)
