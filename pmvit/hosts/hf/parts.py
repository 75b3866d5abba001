"""What the plain blocks of Hugging Face transformers are made of."""

from typing import Any, NamedTuple

from torch import Tensor, nn

from pmvit.hosts.host import AnyModule
from pmvit.hosts.parts import PlainMlp, PlainParts, Rotary, joined_bias, rotary_of_patches
from pmvit.merged_mlp import unwrapped


class Names(NamedTuple):
    """What a block calls its attention, what normalises before that, and what normalises before the MLP."""

    attention: str
    norm1: str
    norm2: str


AS_VIT = Names("attention", "layernorm_before", "layernorm_after")
AS_DINO = Names("attention", "norm1", "norm2")
AS_CLIP = Names("self_attn", "layer_norm1", "layer_norm2")
PLAIN = {  # by the class of the block; all normalise, attend, add; normalise, MLP, add
    "ViTLayer": AS_VIT,
    "ViTMSNLayer": AS_VIT,
    "ViTMAELayer": AS_VIT,
    "IJepaLayer": AS_VIT,
    "DeiTLayer": AS_VIT,
    "BeitLayer": AS_VIT,
    "PixioLayer": AS_VIT,
    "Dinov2Layer": AS_DINO,
    "Dinov2WithRegistersLayer": AS_DINO,
    "DINOv3ViTLayer": AS_DINO,
    "EomtLayer": AS_DINO,
    "EomtDinov3Layer": AS_DINO,
    "CLIPEncoderLayer": AS_CLIP,
    "MetaClip2EncoderLayer": AS_CLIP,
    "SiglipEncoderLayer": AS_CLIP,
}
MLPS = (("fc1", "activation_fn", "fc2"), ("up_proj", "act_fn", "down_proj"))


def parts_of(block: AnyModule, arguments: dict[str, Any], num_prefix: int) -> PlainParts | None:
    """What a block is made of that is called with these arguments; `None` if it is another kind of block."""
    names = PLAIN.get(type(block).__name__) if type(block).__module__.startswith("transformers.") else None
    if names is None:
        return None
    attention = getattr(block, names.attention)
    output = "o_proj" if hasattr(attention, "o_proj") else "out_proj"
    layers: list[AnyModule] = [getattr(attention, name, None) for name in ("q_proj", "k_proj", "v_proj", output)]
    if not all(type(layer) is nn.Linear for layer in layers):
        return None  # another version of transformers, or layers that somebody else wrapped
    *qkv, projection = layers
    return PlainParts(
        norm1=getattr(block, names.norm1),
        qkv=tuple(qkv),
        heads=(qkv[0].out_features // attention.head_dim, attention.head_dim),
        scale=float(attention.scaling if hasattr(attention, "scaling") else attention.scale),
        projection=projection,
        norm2=unwrapped(getattr(block, names.norm2)),
        mlp=_mlp(unwrapped(block.mlp)),
        rotary=_rotary(arguments.get("position_embeddings"), num_prefix),
        bias=_bias(block, arguments),
        layer_scale1=_layer_scale(block, 1),
        layer_scale2=_layer_scale(block, 2),
    )


def _rotary(embeddings: tuple[Tensor, Tensor] | None, num_prefix: int) -> Rotary | None:
    if embeddings is None:
        return None
    cos, sin = embeddings
    return rotary_of_patches(cos, sin, num_prefix, interleaved=False)


def _bias(block: AnyModule, arguments: dict[str, Any]) -> Tensor | None:
    own = None
    if getattr(block, "relative_position_bias", None) is not None:
        height, width = (side // block.patch_size for side in arguments["resolution"])
        interpolates = bool(arguments.get("interpolate_pos_encoding"))
        own = block.relative_position_bias((height, width), interpolates, dim_size=height * width + 1)
    return joined_bias(own, arguments.get("attention_mask"))


def _layer_scale(block: AnyModule, number: int) -> Tensor | None:
    scale: Tensor | None = getattr(getattr(block, f"layer_scale{number}", None), "lambda1", None)
    if scale is None:  # BEiT has a parameter of its own, or a number
        found = getattr(block, f"lambda_{number}", None)
        scale = found if isinstance(found, Tensor) else None
    return scale


def _mlp(mlp: AnyModule) -> nn.Module:
    for expand, activation, contract in MLPS:
        if hasattr(mlp, expand) and not hasattr(mlp, "gate_proj"):
            return PlainMlp(getattr(mlp, expand), getattr(mlp, activation), getattr(mlp, contract))
    result: nn.Module = mlp
    return result
