"""timm's usual block in its two halves, with what methods read in between: the one place that knows its attention."""

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pmvit.adaptive import take as take

Block = Any  # timm's: its attributes have no types


class Attended(NamedTuple):
    """What attention adds to the tokens, and what it is made of, each (batch, heads, tokens, ...).

    `maps` are the attention probabilities, (batch, heads, queries, keys); empty if they were not asked for.
    """

    update: Tensor
    queries: Tensor
    keys: Tensor
    maps: Tensor = torch.empty(0)


def queries_keys_values(block: Block, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What attention is computed of, each (batch, heads, tokens, width)."""
    parts = block.attn.qkv(block.norm1(tokens)).chunk(3, dim=-1)
    query, key, value = (part.unflatten(-1, (block.attn.num_heads, -1)).transpose(1, 2) for part in parts)
    return block.attn.q_norm(query), block.attn.k_norm(key), value


def project(block: Block, normed: Tensor, part: Literal[0, 1, 2]) -> Tensor:
    """The queries (0), keys (1) or values (2) of normed tokens alone."""
    attention = block.attn
    bias = None if attention.qkv.bias is None else attention.qkv.bias.chunk(3)[part]
    projected = F.linear(normed, attention.qkv.weight.chunk(3)[part], bias)
    projected = projected.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)
    result: Tensor = projected if part == 2 else (attention.q_norm, attention.k_norm)[part](projected)
    return result


def fused(block: Block, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
    """The values that queries find, (batch, heads, queries, width), by PyTorch's fused attention."""
    dropout = block.attn.attn_drop.p if block.attn.training else 0.0
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout)


def finish(block: Block, attended: Tensor) -> Tensor:
    """What attention adds to the tokens, of (batch, heads, tokens, width) weighted values."""
    attention = block.attn
    joined = attended.transpose(1, 2).flatten(2)
    update: Tensor = block.drop_path1(block.ls1(attention.proj_drop(attention.proj(joined))))
    return update


def attend(
    block: Block, tokens: Tensor, bias: Tensor | None = None, *, maps: bool = False, mask: Tensor | None = None
) -> Attended:
    """The first half of a plain block, up to its residual addition; fused, if `maps` need not be returned.

    A bias is added to the attention scores. A mask says how much each key counts for each query, (batch, 1, queries,
    keys), before they are made to sum to one; it may have a gradient.
    """
    query, key, value = queries_keys_values(block, tokens)
    if not maps and mask is None:
        return Attended(finish(block, fused(block, query, key, value, bias)), query, key)
    scores = query * block.attn.scale @ key.transpose(-2, -1)
    scores = scores if bias is None else scores + bias
    if mask is None:
        found = scores.softmax(-1)
    else:
        weights = (scores - scores.amax(-1, keepdim=True)).exp() * mask
        found = weights / weights.sum(-1, keepdim=True)
    return Attended(finish(block, block.attn.attn_drop(found) @ value), query, key, found)


def class_attention(block: Block, attended: Attended, bias: Tensor | None = None) -> Tensor:
    """How much the class token attends to each token: (batch, tokens), the mean over the heads."""
    scores: Tensor = attended.queries[:, :, :1] * block.attn.scale @ attended.keys.transpose(-2, -1)
    return (scores if bias is None else scores + bias).softmax(-1).mean(1).squeeze(1)


def mlp_update(block: Block, tokens: Tensor) -> Tensor:
    """The second half of a plain block, up to its residual addition."""
    output: Tensor = block.drop_path2(block.ls2(block.mlp(block.norm2(tokens))))
    return output


def best(scores: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """The places of the highest of (batch, tokens) scores, and of the others, both in the order of the scores."""
    kept, rest = torch.tensor_split(scores.argsort(dim=-1, descending=True), [number], dim=1)
    return kept, rest
