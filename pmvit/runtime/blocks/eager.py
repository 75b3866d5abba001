"""A usual transformer block, and each half of it, in as few calls as can be, for in eager PyTorch every call costs."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pmvit.hosts.parts import PlainMlp, PlainParts
from pmvit.runtime.blocks.fold import Turn, fused_qkv, norms_heads, output_layer, scaled_mlp, sum_of
from pmvit.runtime.blocks.packed import Packable


class Flat(Packable):
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
    turn: nn.Module | None
    mlp: nn.Module | None

    def __init__(self, parts: PlainParts, num_tokens: int, inplace: bool) -> None:
        super().__init__()
        self.inplace = inplace
        self.num_outputs = self.num_tokens = num_tokens
        self.heads = parts.heads
        self.scale = parts.scale
        self.width = (parts.projection.out_features,)
        self.epsilons = tuple(getattr(norm, "eps", 0.0) for norm in (parts.norm1, parts.norm2))

    def hold(self, **layers: Any) -> None:
        """Make the weights of layers attributes of this module."""
        for name, layer in layers.items():
            self.register_parameter(f"{name}_weight", layer.weight)
            self.register_parameter(f"{name}_bias", layer.bias)

    def hold_attention(self, parts: PlainParts) -> None:
        self.hold(norm1=parts.norm1, qkv=fused_qkv(parts), output=output_layer(parts))
        like, bias = self.output_weight, parts.bias
        if bias is not None:  # written out in full, it costs fused attention less than one row that is repeated
            bias = bias.detach().expand(1, bias.shape[1], self.num_tokens, self.num_tokens).to(like).contiguous()
        self.register_buffer("bias", bias, persistent=False)
        self.turn = None if parts.rotary is None else Turn(parts.rotary, self.num_tokens, like)
        self.packable += ("qkv_weight",)

    def hold_mlp(self, parts: PlainParts) -> None:
        mlp = scaled_mlp(parts)
        self.hold(norm2=parts.norm2)
        self.mlp = None if isinstance(mlp, PlainMlp) else mlp
        if isinstance(mlp, PlainMlp):
            self.hold(expand=mlp.expand, contract=mlp.contract)
            self.activation, self.gelu = mlp.activation, mlp.gelu
            self.packable += ("expand_weight", "contract_weight")

    def writable(self, tokens: Tensor, positional: tuple[object, ...], named: dict[str, object]) -> Tensor:
        """The tokens, or a copy, where the result may be written."""
        if positional or named:
            self.check(tokens, positional, named)
        if self.inplace and tokens.is_contiguous():
            return tokens
        return tokens.clone(memory_format=torch.contiguous_format)

    def add_attention(self, rows: Tensor, image_bias: Tensor | None = None) -> None:
        normed = torch.layer_norm(rows, self.width, self.norm1_weight, self.norm1_bias, self.epsilons[0])
        qkv = self.linear(normed, self.qkv_weight, self.qkv_bias).view(-1, self.num_tokens, 3, *self.heads)
        qkv = qkv.permute(2, 0, 3, 1, 4)
        if self.turn is None:
            query, key, value = qkv.unbind(0)
        else:
            query, key = self.turn(qkv[:2]).unbind(0)
            value = qkv[2]
        bias = sum_of(self.bias, image_bias)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=self.scale)
        rows.add_(F.linear(attended.transpose(1, 2).reshape(rows.shape[0], -1), self.output_weight, self.output_bias))

    def add_mlp(self, rows: Tensor) -> None:
        normed = torch.layer_norm(rows, self.width, self.norm2_weight, self.norm2_bias, self.epsilons[1])
        if self.mlp is not None:
            rows.add_(self.mlp(normed))
            return
        if self.gelu is not None:
            hidden = self.linear_gelu(normed, self.expand_weight, self.expand_bias, self.gelu)
        else:
            hidden = self.activation(self.linear(normed, self.expand_weight, self.expand_bias))
        rows.add_(self.linear(hidden, self.contract_weight, self.contract_bias))


def attention_is_usual(parts: PlainParts) -> bool:
    """Whether the classes here know the attention of a block."""
    return isinstance(parts.norm1, nn.LayerNorm) and not norms_heads(parts) and parts.attention_norm is None


def mlp_is_usual(parts: PlainParts) -> bool:
    """Whether the classes here know what stands before the MLP of a block."""
    return isinstance(parts.norm2, nn.LayerNorm)


class FlatAttention(Flat):
    """The attention of a usual block, for all of its tokens."""

    def __init__(self, parts: PlainParts, num_tokens: int, inplace: bool) -> None:
        super().__init__(parts, num_tokens, inplace)
        self.hold_attention(parts)

    def forward(self, tokens: Tensor, *positional: object, **named: object) -> Tensor:
        tokens = self.writable(tokens, positional, named)
        self.add_attention(tokens.view(-1, *self.width))
        return tokens


class FlatMlp(Flat):
    """The MLP of a usual block."""

    def __init__(self, parts: PlainParts, num_tokens: int, inplace: bool) -> None:
        super().__init__(parts, num_tokens, inplace)
        self.hold_mlp(parts)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = self.writable(tokens, (), {})
        self.add_mlp(tokens.view(-1, *self.width))
        return tokens


class FlatBlock(Flat):
    """A usual block on all of its tokens."""

    def __init__(self, parts: PlainParts, num_tokens: int, inplace: bool) -> None:
        super().__init__(parts, num_tokens, inplace)
        self.hold_attention(parts)
        self.hold_mlp(parts)

    def forward(self, tokens: Tensor, *positional: object, image_bias: Tensor | None = None, **named: object) -> Tensor:
        tokens = self.writable(tokens, positional, named)
        rows = tokens.view(-1, *self.width)
        self.add_attention(rows, image_bias)
        self.add_mlp(rows)
        return tokens
