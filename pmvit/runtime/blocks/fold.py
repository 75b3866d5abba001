"""The parts of a plain block with all that can be folded into the weights of another layer."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from pmvit.hosts.parts import PlainMlp, PlainParts, Rotary, linear


class Projections(NamedTuple):
    """Query (with the scale of the scores), key and value layers, and the output layer."""

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    output: nn.Linear


def sum_of(bias: Tensor | None, image_bias: Tensor | None) -> Tensor | None:
    """What is added to attention scores: of every image, and of each image (the sizes of its groups)."""
    return image_bias if bias is None else bias if image_bias is None else bias + image_bias


def norms_heads(parts: PlainParts) -> bool:
    """Whether queries or keys are normalised, so that nothing can be folded across."""
    return parts.query_norm is not None or parts.key_norm is not None


def scaled(layer: nn.Linear, factors: Tensor | None) -> nn.Linear:
    """A linear layer and a factor for each number it gives, as one linear layer."""
    if factors is None:
        return layer
    return linear(layer.weight * factors[:, None], None if layer.bias is None else layer.bias * factors)


def fused_qkv(parts: PlainParts) -> nn.Linear:
    """Query, key and value of all heads in one layer."""
    if len(parts.qkv) == 1:
        return parts.qkv[0]
    weights = [layer.weight.detach() for layer in parts.qkv]
    biases = [
        weight.new_zeros(len(weight)) if layer.bias is None else layer.bias.detach()
        for layer, weight in zip(parts.qkv, weights, strict=True)
    ]
    has_bias = any(layer.bias is not None for layer in parts.qkv)
    return linear(torch.cat(weights), torch.cat(biases) if has_bias else None)


def output_layer(parts: PlainParts) -> nn.Linear:
    """What follows attention, with the layer scale."""
    return scaled(parts.projection, parts.layer_scale1)


def scaled_mlp(parts: PlainParts) -> nn.Module:
    """The MLP with its layer scale: a `PlainMlp` if it is one."""
    mlp, factors = parts.mlp, parts.layer_scale2
    if factors is None:
        return mlp
    if isinstance(mlp, PlainMlp):
        return PlainMlp(mlp.expand, mlp.activation, scaled(mlp.contract, factors))
    return ScaledMlp(mlp, factors)


class ScaledMlp(nn.Module):
    """An MLP of any kind and a factor for each number it gives."""

    factors: Tensor

    def __init__(self, mlp: nn.Module, factors: Tensor) -> None:
        super().__init__()
        self.mlp = mlp
        self.register_buffer("factors", factors.detach(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.mlp(tokens) * self.factors
        return result


def split_projections(parts: PlainParts) -> Projections:
    """The layers of attention for graphs, with less to compute.

    The scale of the scores goes into the query's weights, unless queries are normalised. The bias of the keys adds the
    same to all scores of a query, which changes no softmax, and is left out, unless keys are normalised or turned. That
    of the values adds the same to every output, for the weights of attention sum to one: it goes into the output layer,
    unless a normalisation stands before it.
    """
    scale = 1.0 if norms_heads(parts) else parts.scale
    qkv, output = fused_qkv(parts), output_layer(parts)
    weights = qkv.weight.detach().chunk(3)
    biases = qkv.bias.detach().chunk(3) if qkv.bias is not None else (None, None, None)
    keeps_key_bias = norms_heads(parts) or parts.rotary is not None
    moves_value_bias = biases[2] is not None and parts.attention_norm is None
    output_bias: Tensor | None = output.bias
    if biases[2] is not None and moves_value_bias:
        moved = output.weight.detach() @ biases[2]
        output_bias = moved if output_bias is None else output_bias + moved
    return Projections(
        linear(weights[0] * scale, None if biases[0] is None else biases[0] * scale),
        linear(weights[1], biases[1] if keeps_key_bias else None),
        linear(weights[2], None if moves_value_bias else biases[2]),
        linear(output.weight, output_bias),
    )


def in_order(parts: PlainParts, order: Tensor) -> PlainParts:
    """The parts for the block's tokens in another order; what belongs to a token goes along."""
    bias, rotary = parts.bias, parts.rotary
    if bias is not None:
        order = order.to(bias.device)
        for dim in (-2, -1):
            bias = bias if bias.shape[dim] == 1 else bias.index_select(dim, order)
    if rotary is not None:
        order = order.to(rotary.cos.device)
        rotary = rotary._replace(cos=rotary.cos.index_select(-2, order), sin=rotary.sin.index_select(-2, order))
    return parts._replace(bias=bias, rotary=rotary)


class Turn(nn.Module):
    """Turns queries or keys of the first tokens, (..., heads, tokens, numbers), by a rotary embedding."""

    cos: Tensor
    sin: Tensor

    def __init__(self, rotary: Rotary, num_tokens: int, like: Tensor) -> None:
        super().__init__()
        self.interleaved = rotary.interleaved
        signs = rotary.sin.new_tensor([-1.0, 1.0])
        size = rotary.sin.shape[-1] // 2
        signs = signs.repeat(size) if rotary.interleaved else signs.repeat_interleave(size)
        for name, table in (("cos", rotary.cos), ("sin", rotary.sin * signs)):
            self.register_buffer(name, table[..., :num_tokens, :].to(like).contiguous(), persistent=False)

    def forward(self, heads: Tensor) -> Tensor:
        if self.interleaved:
            partners = heads.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        else:
            partners = torch.cat(heads.chunk(2, dim=-1)[::-1], dim=-1)
        turned: Tensor = heads * self.cos + partners * self.sin
        return turned
