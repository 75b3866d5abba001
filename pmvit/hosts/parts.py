"""What a host's plain transformer block is made of, and linear layers made of other linear layers."""

from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from pmvit.errors import PmvitError


class PlainParts(NamedTuple):
    """What a host's plain block is made of.

    Attributes:
        norm1: Before attention.
        qkv: Query, key and value of all heads, in this order.
        heads: Number of heads, numbers a head.
        scale: Of the attention scores.
        query_norm: Of each head's queries; an `nn.Identity` if there is none.
        key_norm: Of each head's keys, likewise.
        output: After attention, with any layer scale folded in.
        norm2: Before the MLP.
        mlp: The MLP, with any layer scale folded in where it is a `PlainMlp`.
    """

    norm1: nn.Module
    qkv: nn.Linear
    heads: tuple[int, int]
    scale: float
    query_norm: nn.Module
    key_norm: nn.Module
    output: nn.Linear
    norm2: nn.Module
    mlp: nn.Module

    @property
    def norms_heads(self) -> bool:
        return not (isinstance(self.query_norm, nn.Identity) and isinstance(self.key_norm, nn.Identity))


class PlainMlp(nn.Module):
    """Two linear layers with an exact GELU between them."""

    def __init__(self, expand: nn.Linear, contract: nn.Linear) -> None:
        super().__init__()
        self.expand = expand
        self.contract = contract

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.contract(F.gelu(self.expand(tokens)))
        return result


def check_images_alone(arguments: dict[str, Any]) -> None:
    if any(value is not None and value is not False for value in arguments.values()):
        raise PmvitError(
            f"expected images alone for a model that is optimised for inference; got {', '.join(arguments)} as well"
        )


def scaled(layer: nn.Linear, factors: Tensor) -> nn.Linear:
    """A linear layer and a factor for each number it gives, as one linear layer."""
    return linear(layer.weight * factors[:, None], None if layer.bias is None else layer.bias * factors)


def linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A linear layer with these weights."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach().contiguous(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().contiguous(), requires_grad=False)
    return layer


def split_projections(parts: PlainParts, scale: float) -> tuple[nn.Linear, Tensor, Tensor, nn.Linear]:
    """The scaled query layer, weights of keys and of values, and the output layer with what the values' bias adds."""
    weights = parts.qkv.weight.detach().chunk(3)
    biases = parts.qkv.bias.detach().chunk(3) if parts.qkv.bias is not None else (None, None, None)
    query = linear(weights[0] * scale, None if biases[0] is None else biases[0] * scale)
    output_bias: Tensor | None = parts.output.bias
    if biases[2] is not None:
        moved = parts.output.weight.detach() @ biases[2]
        output_bias = moved if output_bias is None else output_bias + moved
    return query, weights[1], weights[2], linear(parts.output.weight, output_bias)
