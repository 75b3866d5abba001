"""The halves of a plain block as its library computes them, for the equal-token bound of a benchmark."""

import torch.nn.functional as F
from torch import Tensor, nn

from pmvit.hosts.parts import PlainParts
from pmvit.runtime.blocks.fold import Turn, multiplied


class AttentionHalf(nn.Module):
    """Tokens with the update of attention."""

    bias: Tensor | None

    def __init__(self, parts: PlainParts) -> None:
        super().__init__()
        self.norm, self.qkv = parts.norm1, nn.ModuleList(parts.qkv)
        self.query_norm, self.key_norm, self.attention_norm = parts.query_norm, parts.key_norm, parts.attention_norm
        self.projection = multiplied(parts.projection, parts.layer_scale1)
        self.heads, self.scale = parts.heads, parts.scale
        rotary, like = parts.rotary, parts.projection.weight
        self.turn = None if rotary is None else Turn(rotary, rotary.cos.shape[-2], like)
        self.register_buffer("bias", None if parts.bias is None else parts.bias.detach().to(like), persistent=False)

    def forward(self, tokens: Tensor, *_: object, **__: object) -> Tensor:
        """As a block is called; what is given beside the tokens is in the parts."""
        normed = self.norm(tokens)
        if len(self.qkv) == 1:
            qkv = self.qkv[0](normed).unflatten(-1, (3, *self.heads))
            query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        else:
            query, key, value = (layer(normed).unflatten(-1, self.heads).transpose(1, 2) for layer in self.qkv)
        for changes_query, changes_key in ((self.query_norm, self.key_norm), (self.turn, self.turn)):
            query = query if changes_query is None else changes_query(query)
            key = key if changes_key is None else changes_key(key)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=self.bias, scale=self.scale)
        attended = attended.transpose(1, 2).flatten(2)
        update: Tensor = self.projection(attended if self.attention_norm is None else self.attention_norm(attended))
        return tokens + update


class MlpHalf(nn.Module):
    """Tokens with the update of the MLP."""

    def __init__(self, parts: PlainParts) -> None:
        super().__init__()
        self.norm, self.mlp = parts.norm2, multiplied(parts.mlp, parts.layer_scale2)

    def forward(self, tokens: Tensor) -> Tensor:
        update: Tensor = self.mlp(self.norm(tokens))
        return tokens + update
