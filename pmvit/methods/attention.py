"""timm's usual block in its two halves, with what methods read in between: the one place that knows its attention."""

from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

Host = Any  # timm's modules: their attributes have no types


class Attended(NamedTuple):
    """What attention makes of tokens: the tokens with its output added, and the keys, (batch, heads, tokens, width)."""

    tokens: Tensor
    keys: Tensor


def attend(block: Host, tokens: Tensor, bias: Tensor | None = None) -> Attended:
    """The first half of a plain block; `bias` is added to the attention scores."""
    attention = block.attn
    batch, count, _ = tokens.shape
    qkv = attention.qkv(block.norm1(tokens)).reshape(batch, count, 3, attention.num_heads, attention.head_dim)
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    query, key = attention.q_norm(query), attention.k_norm(key)
    dropout = attention.attn_drop.p if attention.training else 0.0
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout)
    update = attention.proj_drop(attention.proj(attended.transpose(1, 2).reshape(batch, count, -1)))
    return Attended(tokens + block.drop_path1(block.ls1(update)), key)


def mlp(block: Host, tokens: Tensor) -> Tensor:
    """The second half of a plain block."""
    output: Tensor = tokens + block.drop_path2(block.ls2(block.mlp(block.norm2(tokens))))
    return output
