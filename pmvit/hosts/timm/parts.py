"""What the plain blocks of timm are made of."""

from timm.layers import Attention
from timm.layers import Mlp as TimmMlp
from timm.models.vision_transformer import Block
from torch import nn

from pmvit.hosts.host import AnyModule
from pmvit.hosts.parts import PlainMlp, PlainParts
from pmvit.merged_mlp import unwrapped


def is_plain(block: nn.Module) -> bool:
    """Whether a block is timm's usual one: normalise, attend, add; normalise, MLP, add."""
    if not (type(block) is Block and type(block.attn) is Attention):
        return False
    attention: AnyModule = block.attn
    has_gate = getattr(attention, "gate", None) is not None
    return not has_gate and isinstance(getattr(attention, "norm", nn.Identity()), nn.Identity)


def parts_of(block: AnyModule) -> PlainParts | None:
    """What a block is made of for which `is_plain` is true."""
    if not is_plain(block):
        return None
    attention = block.attn
    return PlainParts(
        norm1=block.norm1,
        qkv=(attention.qkv,),
        heads=(attention.num_heads, attention.head_dim),
        scale=attention.scale,
        query_norm=attention.q_norm,
        key_norm=attention.k_norm,
        projection=attention.proj,
        layer_scale1=getattr(block.ls1, "gamma", None),
        norm2=unwrapped(block.norm2),
        mlp=_mlp(unwrapped(block.mlp)),
        layer_scale2=getattr(block.ls2, "gamma", None),
    )


def _mlp(mlp: AnyModule) -> nn.Module:
    is_usual = type(mlp) is TimmMlp and isinstance(mlp.fc1, nn.Linear) and isinstance(mlp.norm, nn.Identity)
    if is_usual and isinstance(mlp.act, nn.GELU) and mlp.act.approximate == "none":
        return PlainMlp(mlp.fc1, mlp.fc2)
    result: nn.Module = mlp
    return result
