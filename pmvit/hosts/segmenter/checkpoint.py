"""Weights for a Segmenter: the published checkpoints, what pmvit saved, or an encoder's alone."""

from math import isqrt
from typing import Any

import torch
from timm.layers import resample_abs_pos_embed
from torch import Tensor

from pmvit.errors import PmvitError
from pmvit.hosts.segmenter.model import Segmenter, create_segmenter

State = dict[str, Tensor]
PUBLISHED_EPS = 1e-5  # of every layer norm in the published models; timm's have 1e-6
HEADS = ("head.", "head_dist.", "fc_norm.", "pre_logits.")  # of an image classifier: nothing here reads them


def is_whole(state: State) -> bool:
    """Whether there is a decoder beside the encoder."""
    return any(name.startswith("decoder.") for name in state)


def arguments_of(state: State, encoder: str, given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `create_segmenter`: those given, and what a checkpoint says where nothing else was said.

    A published checkpoint is told by the head of an image classifier that its encoder still has.
    """
    said: dict[str, Any] = {}
    if "decoder.cls_emb" in state:
        said = {"classes": state["decoder.cls_emb"].shape[1], "decoder": "mask"}
    elif "decoder.head.weight" in state:
        said = {"classes": state["decoder.head.weight"].shape[0], "decoder": "linear"}
    elif is_whole(state):
        raise PmvitError(
            "expected a Segmenter checkpoint with a mask transformer (decoder.cls_emb) or a linear decoder "
            "(decoder.head.weight); got another decoder"
        )
    if "encoder.head.weight" in state:
        said["norm_eps"] = PUBLISHED_EPS
    arguments = {**said, **given}
    if "encoder.pos_embed" in state and "image_size" not in given:  # square images, if patches are
        with torch.device("meta"):
            height, width = create_segmenter(encoder, **arguments).patch_size
        num_prefix = sum(f"encoder.{name}" in state for name in ("cls_token", "dist_token"))
        patches = state["encoder.pos_embed"].shape[1] - num_prefix
        if height == width and isqrt(patches) ** 2 == patches:
            arguments["image_size"] = isqrt(patches) * height
    return arguments


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
    table, own = (some.get("encoder.pos_embed") for some in (fitted, expected))
    if table is not None and own is not None and table.shape[1] != own.shape[1]:
        grid = model.encoder.patch_embed.grid_size
        num_prefix = own.shape[1] - grid[0] * grid[1]
        if isqrt(table.shape[1] - num_prefix) ** 2 == table.shape[1] - num_prefix:
            fitted["encoder.pos_embed"] = resample_abs_pos_embed(
                table, grid, num_prefix_tokens=num_prefix, interpolation="bilinear", antialias=False
            )
    return fitted
