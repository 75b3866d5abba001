"""What the plain blocks of timm are made of."""

from typing import Any

import torch
from timm.layers import Attention, AttentionRope, Mlp
from timm.models import beit, eva
from timm.models.vision_transformer import Block
from timm.models.vision_transformer_relpos import RelPosAttention, RelPosBlock
from torch import Tensor, nn

from pmvit.hosts.parts import AnyModule, PlainParts, Rotary, joined_bias, linear, plain_parts, rotary_of_patches
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
    attention, mlp = block.attn, unwrapped(block.mlp)
    is_usual = type(mlp) is Mlp and isinstance(mlp.fc1, nn.Linear) and isinstance(mlp.norm, nn.Identity)
    return plain_parts(
        block,
        attention,
        _qkv(attention),
        norms=("norm1", "norm2"),
        mlp_layers=("fc1", "act", "fc2") if is_usual else None,
        rotary=_rotary(attention, arguments.get("rope")),
        bias=_bias(attention, arguments),
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
    has_own = getattr(attention, "relative_position_bias_table", None) is not None
    own = attention._get_rel_pos_bias() if has_own else None
    return joined_bias(own, *(arguments.get(name) for name in ("attn_mask", "shared_rel_pos", "shared_rel_pos_bias")))
