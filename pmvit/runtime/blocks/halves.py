"""The halves of a plain block as its library computes them, for the equal-token bound of a benchmark."""

import torch.nn.functional as F
from torch import Tensor, nn

from pmvit.hosts.parts import PlainParts
from pmvit.runtime.blocks.fold import Turn


class _Half(nn.Module):
    """Tokens with one of the two updates of a block."""

    layer_scale: Tensor | None

    def __init__(self, layer_scale: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("layer_scale", None if layer_scale is None else layer_scale.detach(), persistent=False)

    def add(self, tokens: Tensor, update: Tensor) -> Tensor:
        return tokens + (update if self.layer_scale is None else update * self.layer_scale)


class AttentionHalf(_Half):
    """Tokens with the update of attention."""

    bias: Tensor | None

    def __init__(self, parts: PlainParts) -> None:
        super().__init__(parts.layer_scale1)
        self.norm, self.qkv, self.projection = parts.norm1, nn.ModuleList(parts.qkv), parts.projection
        self.query_norm, self.key_norm, self.attention_norm = parts.query_norm, parts.key_norm, parts.attention_norm
        self.heads, self.scale = parts.heads, parts.scale
        rotary, like = parts.rotary, parts.projection.weight
        self.turn = None if rotary is None else Turn(rotary, rotary.cos.shape[-2], like)
        self.register_buffer("bias", None if parts.bias is None else parts.bias.detach().to(like), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        normed = self.norm(tokens)
        if len(self.qkv) == 1:
            qkv = self.qkv[0](normed).unflatten(-1, (3, *self.heads))
            query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        else:
            query, key, value = (layer(normed).unflatten(-1, self.heads).transpose(1, 2) for layer in self.qkv)
        query = query if self.query_norm is None else self.query_norm(query)
        key = key if self.key_norm is None else self.key_norm(key)
        if self.turn is not None:
            query, key = self.turn(query), self.turn(key)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=self.bias, scale=self.scale)
        attended = attended.transpose(1, 2).flatten(2)
        attended = attended if self.attention_norm is None else self.attention_norm(attended)
        return self.add(tokens, self.projection(attended))


class MlpHalf(_Half):
    """Tokens with the update of the MLP."""

    def __init__(self, parts: PlainParts) -> None:
        super().__init__(parts.layer_scale2)
        self.norm, self.mlp = parts.norm2, parts.mlp

    def forward(self, tokens: Tensor) -> Tensor:
        return self.add(tokens, self.mlp(self.norm(tokens)))
