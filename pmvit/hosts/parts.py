"""What a host's plain transformer block is made of, said in one way for all libraries."""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from pmvit.merged_mlp import unwrapped

AnyModule = Any  # a module of another library: an nn.Module whose attributes have no types
Gelu = Literal["none", "tanh"]  # how PyTorch approximates it
GELUS: dict[str, Gelu] = {"GELUActivation": "none", "GELUTanh": "tanh", "PytorchGELUTanh": "tanh"}  # by their class


class Rotary(NamedTuple):
    """A rotary position embedding of queries and keys, `x * cos + turned(x) * sin` for each of the block's tokens.

    Attributes:
        cos: For each token and dimension of a head, (tokens, head dimension) or (heads, tokens, head dimension).
        sin: Likewise.
        interleaved: Dimensions 2i and 2i + 1 are rotated together, so that `turned` is (-x1, x0, -x3, x2, ...).
            Otherwise dimensions i and i + half of them are, and it is (-x_half, ..., x0, ...).
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool


class PlainParts(NamedTuple):
    """A block `y = x + s1 * attend(norm1(x))`, `y + s2 * mlp(norm2(y))`, in evaluation mode.

    Attributes:
        norm1: Before attention.
        qkv: Query, key and value of all heads: one layer for the three of them, in this order, or three layers.
        heads: Number of heads, and the dimension of each.
        scale: Of the attention scores.
        projection: Behind attention.
        norm2: Before the MLP.
        mlp: The MLP; a `PlainMlp` where it is one.
        query_norm: Of each head's queries, if any.
        key_norm: Of each head's keys, if any.
        rotary: The position embedding of queries and keys, if any.
        bias: What is added to the attention scores, broadcast to (1, heads, queries, keys), if anything: of relative
            positions, of the sizes of groups.
        attention_norm: Between attention and projection, if any.
        layer_scale1: What the update of attention is multiplied with, if anything.
        layer_scale2: What the update of the MLP is multiplied with, if anything.
    """

    norm1: nn.Module
    qkv: tuple[nn.Linear, ...]
    heads: tuple[int, int]
    scale: float
    projection: nn.Linear
    norm2: nn.Module
    mlp: nn.Module
    query_norm: nn.Module | None = None
    key_norm: nn.Module | None = None
    rotary: Rotary | None = None
    bias: Tensor | None = None
    attention_norm: nn.Module | None = None
    layer_scale1: Tensor | None = None
    layer_scale2: Tensor | None = None


class PlainMlp(nn.Module):
    """Two linear layers with an activation between them, any elementwise one.

    Attributes:
        gelu: If the activation is one of PyTorch's GELUs, which.
    """

    def __init__(self, expand: AnyModule, activation: nn.Module, contract: AnyModule) -> None:
        super().__init__()
        self.expand, self.activation, self.contract = expand, activation, contract
        self.gelu = GELUS.get(type(activation).__name__)
        if isinstance(activation, nn.GELU):
            self.gelu = "none" if activation.approximate == "none" else "tanh"

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.contract(self.activation(self.expand(tokens)))
        return result


def plain_parts(
    block: AnyModule,
    attention: AnyModule,
    qkv: tuple[nn.Linear, ...],
    norms: tuple[str, str],
    mlp_layers: tuple[str, str, str] | None,
    rotary: Rotary | None = None,
    bias: Tensor | None = None,
) -> PlainParts:
    """What a block is made of; what is not said here has one of a few names in every library.

    Args:
        block: The block; its MLP is called `mlp`.
        attention: That of the block; `qkv`, `rotary` and `bias` are as in `PlainParts`.
        norms: The names of what normalises before attention and before the MLP.
        mlp_layers: The names of the first layer of the MLP, its activation and its last layer, if these are all of it.
    """
    projection: nn.Linear = _first(attention, "proj", "o_proj", "out_proj")
    num_heads = int(_first(attention, "num_heads", "num_attention_heads"))
    scale = _first(attention, "scale", "scaling")
    size = projection.in_features // num_heads
    mlp = unwrapped(block.mlp)
    return PlainParts(
        norm1=getattr(block, norms[0]),
        qkv=qkv,
        heads=(num_heads, size),
        scale=size**-0.5 if scale is None else float(scale),
        projection=projection,
        norm2=unwrapped(getattr(block, norms[1])),
        mlp=mlp if mlp_layers is None else PlainMlp(*(mlp.get_submodule(name) for name in mlp_layers)),
        query_norm=_unless_identity(_first(attention, "q_norm")),
        key_norm=_unless_identity(_first(attention, "k_norm")),
        rotary=rotary,
        bias=bias,
        attention_norm=_unless_identity(_first(attention, "norm")),
        layer_scale1=_layer_scale(block, 1),
        layer_scale2=_layer_scale(block, 2),
    )


def _first(module: AnyModule, *names: str) -> Any:
    """The first of these attributes that there is, `None` if there is none."""
    return next((found for name in names if (found := getattr(module, name, None)) is not None), None)


def _unless_identity(module: nn.Module | None) -> nn.Module | None:
    return None if isinstance(module, nn.Identity) else module


def _layer_scale(block: AnyModule, number: int) -> Tensor | None:
    scale = _first(_first(block, f"ls{number}", f"layer_scale{number}"), "gamma", "lambda1")
    if scale is None:
        scale = _first(block, f"gamma_{number}", f"lambda_{number}")
    return scale if isinstance(scale, Tensor) else None  # BEiT of transformers has a number where it scales nothing


def joined_bias(*biases: Tensor | None) -> Tensor | None:
    """The sum of those that there are, (1, heads or 1, queries or 1, keys)."""
    found = [bias[(None,) * (4 - bias.dim())] for bias in biases if bias is not None]
    return sum(found[1:], found[0]) if found else None


def rotary_of_patches(cos: Tensor, sin: Tensor, num_prefix: int, interleaved: bool) -> Rotary:
    """A rotary embedding of the patches alone: prefix tokens are not turned."""
    before = (*cos.shape[:-2], num_prefix, cos.shape[-1])
    return Rotary(
        torch.cat([cos.new_ones(before), cos], dim=-2), torch.cat([sin.new_zeros(before), sin], dim=-2), interleaved
    )


def inner_block(block: nn.Module) -> AnyModule:
    """The host's block inside what stands in its place: a wrapper, and what runs the block in it on groups."""
    while isinstance(inside := getattr(block, "block", None) or getattr(block, "host", None), nn.Module):
        block = inside
    return block


def split_heads(qkv: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value out of one projection of (batch, tokens, 3 * width), each with a dimension of heads."""
    query, key, value = qkv.unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return query, key, value


def linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A linear layer with these weights, for inference."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach().contiguous(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().contiguous(), requires_grad=False)
    return layer
