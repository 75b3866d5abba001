"""A usual transformer block, or one half of it, in as few calls as can be, for in eager PyTorch every call costs."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pmvit.hosts.parts import PlainMlp, PlainParts
from pmvit.runtime.blocks.arguments import Half
from pmvit.runtime.blocks.fold import Tables, Turn, fused_qkv, scaled, scaled_mlp, sum_of
from pmvit.runtime.blocks.packed import Packable


class FlatBlock(Packable):
    """A usual block, or one half, on all of its tokens: as few calls as can be, for a call costs more than some sums.

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

    def __init__(self, parts: PlainParts, num_tokens: int, inplace: bool, half: Half | None = None) -> None:
        super().__init__()
        self.inplace, self.attends, self.has_mlp = inplace, half != "mlp", half != "attention"
        self.num_outputs = self.num_tokens = num_tokens
        self.heads, self.scale = parts.heads, parts.scale
        self.width = (parts.projection.out_features,)
        self.epsilons = tuple(getattr(norm, "eps", 0.0) for norm in (parts.norm1, parts.norm2))
        if self.attends:
            self._hold_attention(parts)
        if self.has_mlp:
            self._hold_mlp(parts)

    def _hold(self, **layers: Any) -> None:
        """Make the weights of layers attributes of this module."""
        for name, layer in layers.items():
            self.register_parameter(f"{name}_weight", layer.weight)
            self.register_parameter(f"{name}_bias", layer.bias)

    def _hold_attention(self, parts: PlainParts) -> None:
        self._hold(norm1=parts.norm1, qkv=fused_qkv(parts), output=scaled(parts.projection, parts.layer_scale1))
        like, bias = self.output_weight, parts.bias
        if bias is not None:  # written out in full, it costs fused attention less than one row that is repeated
            bias = bias.detach().expand(1, bias.shape[1], self.num_tokens, self.num_tokens).to(like).contiguous()
        self.register_buffer("bias", bias, persistent=False)
        self.turn = None if parts.rotary is None else Turn(parts.rotary, self.num_tokens, like)
        self.packable += ("qkv_weight",)

    def _hold_mlp(self, parts: PlainParts) -> None:
        mlp = scaled_mlp(parts)
        self._hold(norm2=parts.norm2)
        self.mlp = None if isinstance(mlp, PlainMlp) else mlp
        if isinstance(mlp, PlainMlp):
            self._hold(expand=mlp.expand, contract=mlp.contract)
            self.activation, self.gelu = mlp.activation, mlp.gelu
            self.packable += ("expand_weight", "contract_weight")

    def forward(
        self,
        tokens: Tensor,
        *positional: object,
        image_bias: Tensor | None = None,
        image_turn: Tables | None = None,
        **named: object,
    ) -> Tensor:
        if positional or named:
            self.check(tokens, positional, named)
        if not (self.inplace and tokens.is_contiguous()):
            tokens = tokens.clone(memory_format=torch.contiguous_format)
        rows = tokens.view(-1, *self.width)
        if self.attends:
            self._add_attention(rows, image_bias, image_turn)
        if self.has_mlp:
            self._add_mlp(rows)
        return tokens

    def _add_attention(self, rows: Tensor, image_bias: Tensor | None, image_turn: Tables | None) -> None:
        normed = torch.layer_norm(rows, self.width, self.norm1_weight, self.norm1_bias, self.epsilons[0])
        qkv = self.linear(normed, self.qkv_weight, self.qkv_bias).view(-1, self.num_tokens, 3, *self.heads)
        qkv = qkv.permute(2, 0, 3, 1, 4)
        if self.turn is None:
            query, key, value = qkv.unbind(0)
        else:
            query, key = self.turn(qkv[:2], image_turn).unbind(0)
            value = qkv[2]
        bias = sum_of(self.bias, image_bias)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=self.scale)
        rows.add_(F.linear(attended.transpose(1, 2).reshape(rows.shape[0], -1), self.output_weight, self.output_bias))

    def _add_mlp(self, rows: Tensor) -> None:
        normed = torch.layer_norm(rows, self.width, self.norm2_weight, self.norm2_bias, self.epsilons[1])
        if self.mlp is not None:
            rows.add_(self.mlp(normed))
            return
        hidden = self.linear(normed, self.expand_weight, self.expand_bias, self.gelu)
        if self.gelu is None:
            hidden = self.activation(hidden)
        rows.add_(self.linear(hidden, self.contract_weight, self.contract_bias))
