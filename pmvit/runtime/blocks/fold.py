"""The parts of a plain block with all that can be folded into the weights of another layer."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pmvit.errors import PmvitError
from pmvit.hosts.parts import PlainMlp, PlainParts


class Projections(NamedTuple):
    """Query (with the scale of the scores), key and value layers, and the output layer."""

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    output: nn.Linear


def linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A linear layer with these weights, for inference."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach().contiguous(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().contiguous(), requires_grad=False)
    return layer


def scaled(layer: nn.Linear, factors: Tensor | None) -> nn.Linear:
    """A linear layer and a factor for each number it gives, as one linear layer."""
    if factors is None:
        return layer
    return linear(layer.weight * factors[:, None], None if layer.bias is None else layer.bias * factors)


def fused_qkv(parts: PlainParts) -> nn.Linear:
    """Query, key and value of all heads in one layer."""
    if len(parts.qkv) == 1:
        return parts.qkv[0]
    biases: list[Tensor] = [
        torch.zeros(len(layer.weight)).to(layer.weight) if layer.bias is None else layer.bias for layer in parts.qkv
    ]
    has_bias = any(layer.bias is not None for layer in parts.qkv)
    return linear(torch.cat([layer.weight.detach() for layer in parts.qkv]), torch.cat(biases) if has_bias else None)


def output_layer(parts: PlainParts) -> nn.Linear:
    """What follows attention, with the layer scale."""
    return scaled(parts.projection, parts.layer_scale1)


def scaled_mlp(parts: PlainParts) -> nn.Module:
    """The MLP with its layer scale: a `PlainMlp` if it is one."""
    mlp, factors = parts.mlp, parts.layer_scale2
    if isinstance(mlp, PlainMlp):
        return mlp if factors is None else PlainMlp(mlp.expand, scaled(mlp.contract, factors))
    return mlp if factors is None else ScaledMlp(mlp, factors)


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

    The scale of the scores goes into the query's weights, unless heads are normalised first. The bias of the keys adds
    the same to all scores of a query, which changes no softmax, and is left out. That of the values adds the same to
    every output, for the weights of attention sum to one: it goes into the output layer.
    """
    scale = 1.0 if parts.norms_heads else parts.scale
    qkv, output = fused_qkv(parts), output_layer(parts)
    weights = qkv.weight.detach().chunk(3)
    biases = qkv.bias.detach().chunk(3) if qkv.bias is not None else (None, None, None)
    output_bias: Tensor | None = output.bias
    if biases[2] is not None:
        moved = output.weight.detach() @ biases[2]
        output_bias = moved if output_bias is None else output_bias + moved
    return Projections(
        linear(weights[0] * scale, None if biases[0] is None else biases[0] * scale),
        linear(weights[1], biases[1] if parts.norms_heads else None),
        linear(weights[2], None),
        linear(output.weight, output_bias),
    )


def check_images_alone(arguments: dict[str, Any]) -> None:
    """Raise `PmvitError` if a block that was rewritten for tokens alone is called with anything else."""
    if any(value is not None and value is not False for value in arguments.values()):
        raise PmvitError(
            f"expected images alone for a model that is optimised for inference; got {', '.join(arguments)} as well"
        )
