"""timm's usual block in its two halves, with what methods read in between: the one place that knows its attention."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Block = Any  # timm's: its attributes have no types


class Attended(NamedTuple):
    """What attention adds to the tokens, and what it is made of, each (batch, heads, tokens, ...).

    `maps` are the attention probabilities, (batch, heads, queries, keys), if they were asked for.
    """

    update: Tensor
    queries: Tensor
    keys: Tensor
    maps: Tensor | None = None


def queries_keys_values(block: Block, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What attention is computed of, each (batch, heads, tokens, width)."""
    attention = block.attn
    qkv = attention.qkv(block.norm1(tokens)).unflatten(-1, (3, attention.num_heads, attention.head_dim))
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return attention.q_norm(query), attention.k_norm(key), value


def attend(
    block: Block, tokens: Tensor, bias: Tensor | None = None, *, maps: bool = False, mask: Tensor | None = None
) -> Attended:
    """The first half of a plain block, up to its residual addition.

    Args:
        block: One for which `is_plain` is true.
        tokens: As the block gets them.
        bias: To add to the attention scores.
        maps: Compute the attention probabilities one by one, and return them; else attention is fused.
        mask: How much each key counts for each query, (batch, 1, queries, keys), before they are made to sum to one.
    """
    attention = block.attn
    query, key, value = queries_keys_values(block, tokens)
    found = None
    if maps or mask is not None:
        scores = query * attention.scale @ key.transpose(-2, -1)
        scores = scores if bias is None else scores + bias
        found = scores.softmax(-1) if mask is None else masked_softmax(scores, mask)
        attended = attention.attn_drop(found) @ value
    else:
        dropout = attention.attn_drop.p if attention.training else 0.0
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout)
    return Attended(finish(block, attended), query, key, found)


def attend_from(block: Block, tokens: Tensor, places: Tensor) -> Tensor:
    """What attention adds to the tokens at some places, the same in every image, that attend to all of them."""
    attention = block.attn
    batch, count, _ = tokens.shape
    normed = block.norm1(tokens)
    weight, bias = attention.qkv.weight, attention.qkv.bias
    split = len(weight) // 3  # queries first, then keys and values
    biases = (None, None) if bias is None else (bias[:split], bias[split:])
    query = F.linear(normed[:, places], weight[:split], biases[0])
    query = query.reshape(batch, len(places), attention.num_heads, attention.head_dim).transpose(1, 2)
    pair = F.linear(normed, weight[split:], biases[1])
    pair = pair.reshape(batch, count, 2, attention.num_heads, attention.head_dim)
    key, value = pair.permute(2, 0, 3, 1, 4).unbind(0)
    query, key = attention.q_norm(query), attention.k_norm(key)
    dropout = attention.attn_drop.p if attention.training else 0.0
    attended = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout)
    return finish(block, attended)


def finish(block: Block, attended: Tensor) -> Tensor:
    """What attention adds to the tokens, of (batch, heads, tokens, width) weighted values."""
    attention = block.attn
    joined = attended.transpose(1, 2).flatten(2)
    update: Tensor = block.drop_path1(block.ls1(attention.proj_drop(attention.proj(joined))))
    return update


def masked_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """The softmax over those keys that count, by how much they count; the mask may have a gradient."""
    weights = (scores - scores.amax(-1, keepdim=True)).exp() * mask
    return weights / weights.sum(-1, keepdim=True)


def class_attention(block: Block, attended: Attended) -> Tensor:
    """How much the class token attends to each token: (batch, tokens), the mean over the heads."""
    if attended.maps is not None:
        return attended.maps[:, :, 0].mean(1)
    scores: Tensor = attended.queries[:, :, :1] * block.attn.scale @ attended.keys.transpose(-2, -1)
    return scores.softmax(-1).mean(1).squeeze(1)


def mlp_update(block: Block, tokens: Tensor) -> Tensor:
    """The second half of a plain block, up to its residual addition."""
    output: Tensor = block.drop_path2(block.ls2(block.mlp(block.norm2(tokens))))
    return output


def run(block: Block, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """A plain block; how much keys count for queries is as `attend` has it."""
    tokens = tokens + attend(block, tokens, mask=mask).update
    return tokens + mlp_update(block, tokens)


def take(tokens: Tensor, places: Tensor) -> Tensor:
    """Of (batch, tokens, width), those at (batch, places)."""
    return tokens.gather(1, places[..., None].expand(-1, -1, tokens.shape[-1]))


def best(scores: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """The places of the highest of (batch, tokens) scores, and of the others, both in the order of the scores."""
    order = scores.argsort(dim=-1, descending=True)
    kept, rest = torch.tensor_split(order, [number], dim=1)
    return kept, rest
