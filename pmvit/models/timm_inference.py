"""timm's usual block, rewritten for inference: it computes the tokens that are read, and nothing else."""

from typing import Any

import torch.nn.functional as F
from timm.layers import Attention
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from pmvit.errors import PmvitError
from pmvit.models.adapter import Target

Host = Any  # timm's modules: their attributes have no types


def is_plain(block: nn.Module) -> bool:
    """Whether a block is timm's usual one: normalise, attend, add; normalise, MLP, add."""
    if not (type(block) is Block and type(block.attn) is Attention):
        return False
    attention: Host = block.attn
    has_gate = getattr(attention, "gate", None) is not None
    return not has_gate and isinstance(getattr(attention, "norm", nn.Identity()), nn.Identity)


class PartialBlock(nn.Module):
    """A plain block that computes its first `num_outputs` tokens, with keys and values of all."""

    bias: Tensor | None

    def __init__(self, block: Host, num_outputs: int, bias: Tensor | None, target: Target, inplace: bool) -> None:
        super().__init__()
        self.norm1, self.ls1, self.norm2, self.mlp, self.ls2 = (
            block.norm1,
            block.ls1,
            block.norm2,
            block.mlp,
            block.ls2,
        )
        self.attention: Host = block.attn if target == "eager" else SplitAttention(block.attn, target == "onnx")
        self.num_outputs = num_outputs
        self.inplace = inplace
        self.register_buffer("bias", None if bias is None else bias[None, None, None], persistent=False)

    def forward(self, tokens: Tensor, **arguments: object) -> Tensor:
        if any(value is not None and value is not False for value in arguments.values()):
            raise PmvitError(
                f"expected images alone for a model that is optimised for inference; got {', '.join(arguments)} as well"
            )
        normed = self.norm1(tokens)
        if self.num_outputs == tokens.shape[1]:
            attended = self.attention(normed, attn_mask=self.bias)
            add = Tensor.add_ if self.inplace else Tensor.add
        else:
            attended = self._attend_partly(normed)
            tokens = tokens[:, : self.num_outputs]
            add = Tensor.add
        tokens = add(tokens, self.ls1(attended))
        tokens = add(tokens, self.ls2(self.mlp(self.norm2(tokens))))
        return tokens

    def _attend_partly(self, tokens: Tensor) -> Tensor:
        attention = self.attention
        asking = tokens[:, : self.num_outputs]
        if isinstance(attention, SplitAttention):
            split: Tensor = attention(tokens, attn_mask=self.bias, asking=asking)
            return split
        heads = (attention.num_heads, attention.head_dim)
        size = attention.num_heads * attention.head_dim
        weight, bias = attention.qkv.weight, attention.qkv.bias
        biases = (None, None) if bias is None else (bias[:size], bias[size:])
        query = F.linear(asking, weight[:size], biases[0]).unflatten(-1, heads).transpose(1, 2)
        both = F.linear(tokens, weight[size:], biases[1]).unflatten(-1, (2, *heads))
        key, value = both.permute(2, 0, 3, 1, 4).unbind(0)
        query, key = attention.q_norm(query), attention.k_norm(key)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=self.bias)
        projected: Tensor = attention.proj(attended.transpose(1, 2).flatten(2))
        return projected


class SplitAttention(nn.Module):
    """Attention for graphs: query, key and value are projected apart, so that no runtime has to take them out of one
    tensor again, and what can be folded into weights is.

    The scale of the scores goes into the query's weights. The bias of the keys adds the same to all scores of a query,
    which changes no softmax, and is left out. That of the values adds the same to every output, for the weights of
    attention sum to one: it goes into the output projection.
    """

    def __init__(self, attention: Host, explicit: bool) -> None:
        super().__init__()
        self.heads = (attention.num_heads, attention.head_dim)
        self.explicit = explicit
        self.q_norm, self.k_norm = attention.q_norm, attention.k_norm
        is_normed = not (isinstance(self.q_norm, nn.Identity) and isinstance(self.k_norm, nn.Identity))
        weights = attention.qkv.weight.chunk(3)
        biases = attention.qkv.bias.chunk(3) if attention.qkv.bias is not None else (None, None, None)
        self.late_scale = attention.scale if is_normed else None
        scale = 1.0 if is_normed else attention.scale
        self.query = _linear(weights[0] * scale, None if biases[0] is None else biases[0] * scale)
        self.key = _linear(weights[1], biases[1] if is_normed else None)
        self.value = _linear(weights[2], None)
        output_bias = attention.proj.bias
        if biases[2] is not None:
            moved = attention.proj.weight @ biases[2]
            output_bias = moved if output_bias is None else output_bias + moved
        self.output = _linear(attention.proj.weight, output_bias)

    def forward(self, tokens: Tensor, attn_mask: Tensor | None = None, asking: Tensor | None = None) -> Tensor:
        asking = tokens if asking is None else asking
        query, key, value = (
            layer(read).unflatten(-1, self.heads).transpose(1, 2)
            for layer, read in ((self.query, asking), (self.key, tokens), (self.value, tokens))
        )
        query, key = self.q_norm(query), self.k_norm(key)
        if self.late_scale is not None:
            query = query * self.late_scale
        if self.explicit:
            scores = query @ key.transpose(-2, -1)
            attended = (scores if attn_mask is None else scores + attn_mask).softmax(-1) @ value
        else:
            attended = F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, scale=1.0)
        projected: Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return projected


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach().contiguous(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().contiguous(), requires_grad=False)
    return layer
