"""What the plain blocks of timm are made of."""

from typing import Any

import torch
from timm.layers import Attention, AttentionRope
from timm.layers import Mlp as TimmMlp
from timm.models import beit, eva
from timm.models.vision_transformer import Block
from timm.models.vision_transformer_relpos import RelPosAttention, RelPosBlock
from torch import Tensor, nn

from pmvit.hosts.host import AnyModule
from pmvit.hosts.parts import (
    PlainMlp,
    PlainParts,
    Rotary,
    joined_bias,
    linear,
    rotary_of_patches,
    unless_identity,
)
from pmvit.merged_mlp import unwrapped

# Each block and the kinds of attention it may have; all normalise, attend, add; normalise, MLP, add.
PLAIN = {
    Block: (Attention,),
    RelPosBlock: (RelPosAttention,),
    beit.Block: (beit.Attention,),
    eva.EvaBlock: (eva.EvaAttention, AttentionRope),
}


def is_plain(block: nn.Module) -> bool:
    """Whether a block is timm's usual one, of ViT and DeiT."""
    return type(block) is Block and _knows(block)


def _knows(block: AnyModule) -> bool:
    attention = getattr(block, "attn", None)
    shares_keys = getattr(attention, "num_kv_groups", 1) != 1
    has_gate = getattr(attention, "gate", None) is not None
    return type(attention) in PLAIN.get(type(block), ()) and not has_gate and not shares_keys


def parts_of(block: AnyModule, arguments: dict[str, Any]) -> PlainParts | None:
    """What a block is made of that is called with these arguments; `None` if it is another kind of block."""
    if not _knows(block) or arguments.get("is_causal"):
        return None
    attention = block.attn
    layers = _qkv(attention)
    num_heads = attention.num_heads
    return PlainParts(
        norm1=block.norm1,
        qkv=layers,
        heads=(num_heads, attention.proj.in_features // num_heads),
        scale=attention.scale,
        projection=attention.proj,
        norm2=unwrapped(block.norm2),
        mlp=_mlp(unwrapped(block.mlp)),
        query_norm=unless_identity(getattr(attention, "q_norm", None)),
        key_norm=unless_identity(getattr(attention, "k_norm", None)),
        rotary=_rotary(attention, arguments.get("rope")),
        bias=_bias(attention, arguments),
        attention_norm=unless_identity(getattr(attention, "norm", None)),
        layer_scale1=_layer_scale(block, 1),
        layer_scale2=_layer_scale(block, 2),
    )


def _qkv(attention: AnyModule) -> tuple[nn.Linear, ...]:
    if attention.qkv is None:
        return attention.q_proj, attention.k_proj, attention.v_proj
    if getattr(attention, "q_bias", None) is None:
        return (attention.qkv,)
    return (linear(attention.qkv.weight, torch.cat([attention.q_bias, attention.k_bias, attention.v_bias])),)


def _rotary(attention: AnyModule, rope: Tensor | None) -> Rotary | None:
    if rope is None:
        return None
    sin, cos = rope.chunk(2, dim=-1)
    return rotary_of_patches(cos, sin, attention.num_prefix_tokens, not getattr(attention, "rotate_half", False))


def _bias(attention: AnyModule, arguments: dict[str, Any]) -> Tensor | None:
    if getattr(attention, "rel_pos", None) is not None:  # it leaves out what blocks share, and counts groups itself
        return joined_bias(attention.rel_pos.get_bias())
    own = (
        attention._get_rel_pos_bias() if getattr(attention, "relative_position_bias_table", None) is not None else None
    )
    return joined_bias(own, *(arguments.get(name) for name in ("attn_mask", "shared_rel_pos", "shared_rel_pos_bias")))


def _layer_scale(block: AnyModule, number: int) -> Tensor | None:
    scale: Tensor | None = getattr(block, f"gamma_{number}", None)
    return getattr(getattr(block, f"ls{number}", None), "gamma", None) if scale is None else scale


def _mlp(mlp: AnyModule) -> nn.Module:
    is_usual = type(mlp) is TimmMlp and isinstance(mlp.fc1, nn.Linear) and isinstance(mlp.norm, nn.Identity)
    result: nn.Module = PlainMlp(mlp.fc1, mlp.act, mlp.fc2) if is_usual else mlp
    return result
