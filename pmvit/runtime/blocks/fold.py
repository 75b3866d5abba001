"""The parts of a plain block with all that can be folded into the weights of another layer."""

import torch
from torch import Tensor, nn

from pmvit.hosts.groups import bias_at_centres, select_tokens
from pmvit.hosts.parts import PlainMlp, PlainParts, Rotary, linear

Tables = tuple[Tensor, Tensor]  # cosines and sines of a rotary embedding, (batch, heads or 1, groups, head dimension)


def sum_of(bias: Tensor | None, image_bias: Tensor | None) -> Tensor | None:
    """What is added to attention scores: a bias that all images share, and one of each image (sizes of groups)."""
    return image_bias if bias is None else bias if image_bias is None else bias + image_bias


def norms_heads(parts: PlainParts) -> bool:
    """Whether queries or keys are normalised, so that nothing can be folded across."""
    return parts.query_norm is not None or parts.key_norm is not None


def scaled(layer: nn.Linear, factors: Tensor | None) -> nn.Linear:
    """A linear layer and a factor for each of its output channels, as one linear layer."""
    if factors is None:
        return layer
    return linear(layer.weight * factors[:, None], None if layer.bias is None else layer.bias * factors)


def fused_qkv(parts: PlainParts) -> nn.Linear:
    """Query, key and value of all heads in one layer."""
    if len(parts.qkv) == 1:
        return parts.qkv[0]
    weights, biases = ([getattr(layer, name) for layer in parts.qkv] for name in ("weight", "bias"))
    if all(bias is None for bias in biases):
        return linear(torch.cat(weights), None)
    zeros = [weight.new_zeros(len(weight)) for weight in weights]
    biases = [zero if bias is None else bias for zero, bias in zip(zeros, biases, strict=True)]
    return linear(torch.cat(weights), torch.cat(biases))


def scaled_mlp(parts: PlainParts) -> nn.Module:
    """The MLP with its layer scale: a `PlainMlp` if it is one."""
    mlp, factors = parts.mlp, parts.layer_scale2
    if isinstance(mlp, PlainMlp):
        return PlainMlp(mlp.expand, mlp.activation, scaled(mlp.contract, factors))
    return multiplied(mlp, factors)


def multiplied(module: nn.Module, factors: Tensor | None) -> nn.Module:
    """A module of any kind and a factor for each of its output channels, if there are factors."""
    return module if factors is None else Multiplied(module, factors)


class Multiplied(nn.Module):
    """What `multiplied` makes."""

    factors: Tensor

    def __init__(self, module: nn.Module, factors: Tensor) -> None:
        super().__init__()
        self.module = module
        self.register_buffer("factors", factors.detach(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.module(tokens) * self.factors
        return result


def split_projections(parts: PlainParts) -> tuple[nn.Linear, nn.Linear, nn.Linear, nn.Linear]:
    """The layers of query, key, value and output for graphs, with less to compute.

    The scale of the scores goes into the query's weights, unless queries are normalised. The bias of the keys adds the
    same to all scores of a query, which changes no softmax, and is left out, unless keys are normalised or turned. That
    of the values adds the same to every output, for the weights of attention sum to one: it goes into the output layer,
    unless a normalisation stands before it.
    """
    scale = 1.0 if norms_heads(parts) else parts.scale
    qkv, output = fused_qkv(parts), scaled(parts.projection, parts.layer_scale1)
    query, key, value = qkv.weight.chunk(3)
    biases: list[Tensor | None] = [None] * 3 if qkv.bias is None else [*qkv.bias.chunk(3)]
    if biases[0] is not None:
        biases[0] = biases[0] * scale
    if not norms_heads(parts) and parts.rotary is None:
        biases[1] = None
    if biases[2] is not None and parts.attention_norm is None:
        moved = output.weight @ biases[2]
        output, biases[2] = linear(output.weight, moved if output.bias is None else output.bias + moved), None
    return linear(query * scale, biases[0]), linear(key, biases[1]), linear(value, biases[2]), output


def in_order(parts: PlainParts, order: Tensor) -> PlainParts:
    """The parts for the block's tokens in another order; what belongs to a token goes along."""
    bias, rotary = parts.bias, parts.rotary
    if bias is not None:
        bias = bias_at_centres(bias, order.to(bias.device))
    if rotary is not None:
        order = order.to(rotary.cos.device)
        rotary = rotary._replace(cos=rotary.cos.index_select(-2, order), sin=rotary.sin.index_select(-2, order))
    return parts._replace(bias=bias, rotary=rotary)


class Turn(nn.Module):
    """Applies a rotary embedding to queries or keys of the first tokens, (..., heads, tokens, head dimension)."""

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

    def at_centres(self, centres: Tensor) -> "Tables":
        """The tables for groups that differ from image to image: each group has the position of its centre."""
        return select_tokens(self.cos, centres, -2), select_tokens(self.sin, centres, -2)

    def forward(self, heads: Tensor, image_turn: "Tables | None" = None) -> Tensor:
        cos, sin = self.cos, self.sin
        if image_turn is not None:
            cos, sin = (table[..., : heads.shape[-2], :] for table in image_turn)
        if self.interleaved:
            partners = heads.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        else:
            partners = torch.cat(heads.chunk(2, dim=-1)[::-1], dim=-1)
        turned: Tensor = heads * cos + partners * sin
        return turned
