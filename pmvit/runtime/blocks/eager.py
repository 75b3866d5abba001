"""A usual transformer block, and each half of it, in as few calls as can be, for in eager PyTorch every call costs."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pmvit.hosts.parts import PlainParts
from pmvit.runtime.blocks import packed
from pmvit.runtime.blocks.fold import check_images_alone, fused_qkv, output_layer, scaled_mlp


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
        self.width = (parts.projection.out_features,)
        self.epsilons = tuple(getattr(norm, "eps", 0.0) for norm in (parts.norm1, parts.norm2))
        for name, layer in layers.items():
            self.register_parameter(f"{name}_weight", layer.weight)
            self.register_parameter(f"{name}_bias", layer.bias)

    def writable(self, tokens: Tensor, arguments: dict[str, object]) -> Tensor:
        """The tokens, or a copy, where the result may be written."""
        if arguments:
            check_images_alone(arguments)
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
    mlp: Any = scaled_mlp(parts)
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
        layers = {"norm1": parts.norm1, "qkv": fused_qkv(parts), "output": output_layer(parts)}
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
