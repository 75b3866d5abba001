"""A plain transformer block, rewritten for inference: normalise, attend, add; normalise, MLP, add, and nothing else.

A host's block is taken apart into `PlainParts` and put together again in one of two forms: `FlatBlock` for eager
PyTorch, where every call costs, and `PartialBlock` for graphs and for blocks of which only some tokens are read. Where
attention and MLP run on different tokens, each half stands by itself, in the same two forms.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pmvit.errors import PmvitError
from pmvit.models import packed
from pmvit.models.adapter import Half, Target


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


def inference_block(
    parts: PlainParts,
    num_tokens: int,
    num_outputs: int,
    bias: Tensor | None,
    target: Target,
    inplace: bool,
    half: Half | None = None,
) -> nn.Module:
    """The form of a block or of one half that is cheapest where it runs; see `Adapter.inference_block`."""
    attention_is_usual = isinstance(parts.norm1, nn.LayerNorm) and not parts.norms_heads
    mlp_is_usual = isinstance(parts.norm2, nn.LayerNorm) and isinstance(parts.mlp, PlainMlp)
    is_usual = (attention_is_usual or half == "mlp") and (mlp_is_usual or half == "attention")
    if target == "eager" and num_outputs == num_tokens and is_usual:
        if half == "mlp":
            return FlatMlp(parts, num_tokens, inplace)
        return (FlatBlock if half is None else FlatAttention)(parts, num_tokens, bias, inplace)
    if half == "mlp":
        return PartialMlp(parts, num_outputs)
    kind = PartialBlock if half is None else PartialAttention
    return kind(parts, num_tokens, num_outputs, bias, explicit=target == "onnx")


def _check_images_alone(arguments: dict[str, Any]) -> None:
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


class Flat(packed.Packable):
    """For eager PyTorch: as few calls as can be, for a call costs more than some of the sums.

    The tokens of all images are the rows of one table, which is written to. The weights are attributes of the module
    itself. Both halves of a block are methods here, so that a whole block is not two modules to call.
    """

    norm1_weight: Tensor | None
    norm1_bias: Tensor | None
    qkv_weight: Tensor
    qkv_bias: Tensor | None
    output_weight: Tensor
    output_bias: Tensor | None
    norm2_weight: Tensor | None
    norm2_bias: Tensor | None
    expand_weight: Tensor
    expand_bias: Tensor | None
    contract_weight: Tensor
    contract_bias: Tensor | None
    bias: Tensor | None

    def __init__(self, parts: PlainParts, num_tokens: int, inplace: bool, layers: dict[str, Any]) -> None:
        super().__init__()
        self.inplace = inplace
        self.num_outputs = self.num_tokens = num_tokens
        self.heads = parts.heads
        self.scale = parts.scale
        self.width = (parts.output.out_features,)
        self.epsilons = tuple(getattr(norm, "eps", 0.0) for norm in (parts.norm1, parts.norm2))
        for name, layer in layers.items():
            self.register_parameter(f"{name}_weight", layer.weight)
            self.register_parameter(f"{name}_bias", layer.bias)

    def writable(self, tokens: Tensor, arguments: dict[str, object]) -> Tensor:
        """The tokens, or a copy, where the result may be written."""
        if arguments:
            _check_images_alone(arguments)
        if self.inplace and tokens.is_contiguous():
            return tokens
        return tokens.clone(memory_format=torch.contiguous_format)

    def add_attention(self, rows: Tensor) -> None:
        normed = torch.layer_norm(rows, self.width, self.norm1_weight, self.norm1_bias, self.epsilons[0])
        qkv = self.linear(normed, self.qkv_weight, self.qkv_bias).view(-1, self.num_tokens, 3, *self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=self.bias, scale=self.scale)
        rows.add_(F.linear(attended.transpose(1, 2).reshape(rows.shape[0], -1), self.output_weight, self.output_bias))

    def add_mlp(self, rows: Tensor) -> None:
        normed = torch.layer_norm(rows, self.width, self.norm2_weight, self.norm2_bias, self.epsilons[1])
        hidden = self.linear_gelu(normed, self.expand_weight, self.expand_bias)
        rows.add_(self.linear(hidden, self.contract_weight, self.contract_bias))


def _mlp_layers(parts: PlainParts) -> dict[str, Any]:
    mlp: Any = parts.mlp
    return {"norm2": parts.norm2, "expand": mlp.expand, "contract": mlp.contract}


class FlatAttention(Flat):
    """The attention of a usual block, for all of its tokens."""

    packable: tuple[str, ...] = ("qkv_weight",)

    def __init__(
        self,
        parts: PlainParts,
        num_tokens: int,
        bias: Tensor | None,
        inplace: bool,
        others: dict[str, Any] | None = None,
    ) -> None:
        layers = {"norm1": parts.norm1, "qkv": parts.qkv, "output": parts.output}
        super().__init__(parts, num_tokens, inplace, {**layers, **(others or {})})
        # Written out in full, it costs fused attention less than one row that is repeated.
        bias = None if bias is None else bias.expand(1, 1, num_tokens, num_tokens).contiguous()
        self.register_buffer("bias", bias, persistent=False)
        self.pack()

    def forward(self, tokens: Tensor, **arguments: object) -> Tensor:
        tokens = self.writable(tokens, arguments)
        self.add_attention(tokens.view(-1, *self.width))
        return tokens


class FlatMlp(Flat):
    """The MLP of a usual block."""

    packable = ("expand_weight", "contract_weight")

    def __init__(self, parts: PlainParts, num_tokens: int, inplace: bool) -> None:
        super().__init__(parts, num_tokens, inplace, _mlp_layers(parts))
        self.pack()

    def forward(self, tokens: Tensor, **arguments: object) -> Tensor:
        tokens = self.writable(tokens, arguments)
        self.add_mlp(tokens.view(-1, *self.width))
        return tokens


class FlatBlock(FlatAttention):
    """A usual block on all of its tokens."""

    packable = FlatAttention.packable + FlatMlp.packable

    def __init__(self, parts: PlainParts, num_tokens: int, bias: Tensor | None, inplace: bool) -> None:
        super().__init__(parts, num_tokens, bias, inplace, _mlp_layers(parts))

    def forward(self, tokens: Tensor, **arguments: object) -> Tensor:
        tokens = self.writable(tokens, arguments)
        rows = tokens.view(-1, *self.width)
        self.add_attention(rows)
        self.add_mlp(rows)
        return tokens


class PartialAttention(nn.Module):
    """The attention of a plain block for its first `num_outputs` tokens, with keys and values of all.

    The tokens of all images are rows of one table wherever they need not be told apart: runtimes multiply tables.
    """

    def __init__(
        self, parts: PlainParts, num_tokens: int, num_outputs: int, bias: Tensor | None, explicit: bool
    ) -> None:
        super().__init__()
        self.norm1 = parts.norm1
        self.num_tokens = num_tokens
        self.num_outputs = num_outputs
        if FewQueries.is_cheaper(parts, num_tokens, num_outputs):
            self.attention: nn.Module = FewQueries(parts, num_tokens, num_outputs, bias)
        else:
            self.attention = SplitAttention(parts, num_tokens, num_outputs, bias, explicit)

    def attend(self, tokens: Tensor) -> Tensor:
        """The outputs of all images as rows."""
        width = tokens.shape[-1]
        rows = tokens.reshape(-1, width)
        normed = self.norm1(rows)
        if self.num_outputs < self.num_tokens:
            rows = tokens[:, : self.num_outputs].reshape(-1, width)
        attended: Tensor = rows + self.attention(normed)
        return attended

    def forward(self, tokens: Tensor, **arguments: object) -> Tensor:
        _check_images_alone(arguments)
        return self.attend(tokens).view(-1, self.num_outputs, tokens.shape[-1])


class PartialMlp(nn.Module):
    """The MLP of a plain block."""

    def __init__(self, parts: PlainParts, num_tokens: int) -> None:
        super().__init__()
        self.norm2, self.mlp = parts.norm2, parts.mlp
        self.num_outputs = self.num_tokens = num_tokens

    def forward(self, tokens: Tensor, **arguments: object) -> Tensor:
        _check_images_alone(arguments)
        rows = tokens.reshape(-1, tokens.shape[-1])
        outputs: Tensor = rows + self.mlp(self.norm2(rows))
        return outputs.view(tokens.shape)


class PartialBlock(PartialAttention):
    """A plain block that computes its first `num_outputs` tokens, with keys and values of all."""

    def __init__(
        self, parts: PlainParts, num_tokens: int, num_outputs: int, bias: Tensor | None, explicit: bool
    ) -> None:
        super().__init__(parts, num_tokens, num_outputs, bias, explicit)
        self.norm2, self.mlp = parts.norm2, parts.mlp

    def forward(self, tokens: Tensor, **arguments: object) -> Tensor:
        _check_images_alone(arguments)
        rows = self.attend(tokens)
        outputs: Tensor = rows + self.mlp(self.norm2(rows))
        return outputs.view(-1, self.num_outputs, tokens.shape[-1])


class SplitAttention(nn.Module):
    """Attention for graphs: query, key and value are projected apart, so that no runtime has to take them out of one
    tensor again, and what can be folded into weights is.

    The scale of the scores goes into the query's weights. The bias of the keys adds the same to all scores of a query,
    which changes no softmax, and is left out. That of the values adds the same to every output, for the weights of
    attention sum to one: it goes into the output projection.
    """

    bias: Tensor | None

    def __init__(
        self, parts: PlainParts, num_tokens: int, num_outputs: int, bias: Tensor | None, explicit: bool
    ) -> None:
        super().__init__()
        self.num_tokens = num_tokens
        self.num_outputs = num_outputs
        self.heads = parts.heads
        self.explicit = explicit
        self.query_norm, self.key_norm = parts.query_norm, parts.key_norm
        self.late_scale = parts.scale if parts.norms_heads else None
        query, key, value, self.output = split_projections(parts, 1.0 if parts.norms_heads else parts.scale)
        key_bias = parts.qkv.bias.chunk(3)[1] if parts.norms_heads and parts.qkv.bias is not None else None
        self.query, self.key, self.value = query, linear(key, key_bias), linear(value, None)
        self.register_buffer("bias", None if bias is None else bias[None, None, None], persistent=False)

    def forward(self, normed: Tensor) -> Tensor:
        asking = normed
        if self.num_outputs < self.num_tokens:
            width = normed.shape[-1]
            asking = normed.view(-1, self.num_tokens, width)[:, : self.num_outputs].reshape(-1, width)
        query, key, value = (
            layer(read).view(-1, count, *self.heads).transpose(1, 2)
            for layer, read, count in (
                (self.query, asking, self.num_outputs),
                (self.key, normed, self.num_tokens),
                (self.value, normed, self.num_tokens),
            )
        )
        query, key = self.query_norm(query), self.key_norm(key)
        if self.late_scale is not None:
            query = query * self.late_scale
        if self.explicit:
            scores = query @ key.transpose(-2, -1)
            attended = (scores if self.bias is None else scores + self.bias).softmax(-1) @ value
        else:
            attended = F.scaled_dot_product_attention(query, key, value, attn_mask=self.bias, scale=1.0)
        projected: Tensor = self.output(attended.transpose(1, 2).reshape(-1, self.heads[0] * self.heads[1]))
        return projected


class FewQueries(nn.Module):
    """Attention of few queries, as of a class token: keys and values are never computed.

    The score of a key is `q W_k x`: with `q W_k` computed once a query, it is a product with the token `x` itself. The
    attended value is `sum a W_v x = W_v sum a x`: tokens are averaged first and projected once. Heads are told apart
    by a mask, so that both are products with a plain table of weights, which every runtime is good at.
    """

    mask: Tensor
    bias: Tensor | None

    def __init__(self, parts: PlainParts, num_tokens: int, num_outputs: int, bias: Tensor | None) -> None:
        super().__init__()
        self.num_tokens = num_tokens
        self.num_outputs = num_outputs
        self.query, key, value, self.output = split_projections(parts, parts.scale)
        self.key, self.value = linear(key.T, None), linear(value, None)
        num_heads, size = parts.heads
        mask = torch.eye(num_heads, dtype=key.dtype, device=key.device).repeat_interleave(size, dim=1)
        self.register_buffer("mask", mask[:, None], persistent=False)
        self.register_buffer("bias", None if bias is None else bias[None, None], persistent=False)

    @staticmethod
    def is_cheaper(parts: PlainParts, num_tokens: int, num_outputs: int) -> bool:
        """Whether it multiplies less than half of what keys and values of all tokens would take."""
        asking, width = parts.heads[0] * num_outputs, parts.output.in_features
        return not parts.norms_heads and asking * (width + num_tokens) <= num_tokens * width / 2

    def forward(self, normed: Tensor) -> Tensor:
        tokens = normed.view(-1, self.num_tokens, normed.shape[-1])
        query = self.query(tokens[:, : self.num_outputs])
        asking = self.key((query[:, None] * self.mask).flatten(1, 2))
        scores = asking @ tokens.transpose(1, 2)
        averaged = (scores if self.bias is None else scores + self.bias).softmax(-1) @ tokens
        attended = self.value(averaged).unflatten(1, (len(self.mask), self.num_outputs)) * self.mask
        projected: Tensor = self.output(attended.sum(1)).flatten(0, 1)
        return projected


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
