"""timm's usual block, taken apart for inference."""

from typing import Any

from timm.layers import Attention
from timm.layers import Mlp as TimmMlp
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from pmvit.hosts.parts import PlainMlp, PlainParts, scaled
from pmvit.merged_mlp import unwrapped

Host = Any  # timm's modules: their attributes have no types


def is_plain(block: nn.Module) -> bool:
    """Whether a block is timm's usual one: normalise, attend, add; normalise, MLP, add."""
    if not (type(block) is Block and type(block.attn) is Attention):
        return False
    attention: Host = block.attn
    has_gate = getattr(attention, "gate", None) is not None
    return not has_gate and isinstance(getattr(attention, "norm", nn.Identity()), nn.Identity)


def parts_of(block: Host) -> PlainParts:
    """What a block is made of for which `is_plain` is true."""
    attention = block.attn
    output: Host = attention.proj
    mlp: Host = unwrapped(block.mlp)
    if not isinstance(block.ls1, nn.Identity):
        output = scaled(output, block.ls1.gamma)
    is_usual = type(mlp) is TimmMlp and isinstance(mlp.fc1, nn.Linear) and isinstance(mlp.norm, nn.Identity)
    if is_usual and isinstance(mlp.act, nn.GELU) and mlp.act.approximate == "none":
        contract = mlp.fc2 if isinstance(block.ls2, nn.Identity) else scaled(mlp.fc2, block.ls2.gamma)
        mlp = PlainMlp(mlp.fc1, contract)
    else:
        mlp = nn.Sequential(mlp, block.ls2)
    return PlainParts(
        norm1=block.norm1,
        qkv=attention.qkv,
        heads=(attention.num_heads, attention.head_dim),
        scale=attention.scale,
        query_norm=attention.q_norm,
        key_norm=attention.k_norm,
        output=output,
        norm2=unwrapped(block.norm2),
        mlp=mlp,
    )


class AttentionHalf(nn.Module):
    """The first line of a block's own forward."""

    def __init__(self, block: Host) -> None:
        super().__init__()
        self.norm, self.attn, self.scale, self.drop = block.norm1, block.attn, block.ls1, block.drop_path1

    def forward(self, tokens: Tensor, **arguments: Any) -> Tensor:
        result: Tensor = tokens + self.drop(self.scale(self.attn(self.norm(tokens), **arguments)))
        return result


class MlpHalf(nn.Module):
    """The second one."""

    def __init__(self, block: Host) -> None:
        super().__init__()
        self.norm, self.mlp, self.scale, self.drop = (
            unwrapped(block.norm2),
            unwrapped(block.mlp),
            block.ls2,
            block.drop_path2,
        )

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = tokens + self.drop(self.scale(self.mlp(self.norm(tokens))))
        return result
