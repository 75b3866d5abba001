"""A plain transformer block, or one half of it, for graphs, and for blocks of which only some tokens are read."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pmvit.hosts.parts import PlainParts, linear
from pmvit.runtime.blocks.arguments import Half, TokensAlone
from pmvit.runtime.blocks.fold import Tables, Turn, norms_heads, scaled_mlp, split_projections, sum_of


class PartialBlock(TokensAlone):
    """A plain block, or one half of it, that computes its first `num_outputs` tokens, with keys and values of all.

    The tokens of all images are rows of one table wherever they need not be told apart: runtimes multiply tables.
    """

    attention: nn.Module | None
    mlp: nn.Module | None

    def __init__(
        self, parts: PlainParts, num_tokens: int, num_outputs: int, explicit: bool, half: Half | None = None
    ) -> None:
        super().__init__()
        self.num_tokens, self.num_outputs = num_tokens, num_outputs
        self.attention = self.mlp = None
        if half != "mlp":
            self.norm1 = parts.norm1
            if FewQueries.is_cheaper(parts, num_tokens, num_outputs):
                self.attention = FewQueries(parts, num_tokens, num_outputs)
            else:
                self.attention = SplitAttention(parts, num_tokens, num_outputs, explicit)
        if half != "attention":
            self.norm2, self.mlp = parts.norm2, scaled_mlp(parts)

    def forward(
        self,
        tokens: Tensor,
        *positional: object,
        image_bias: Tensor | None = None,
        image_turn: Tables | None = None,
        **named: object,
    ) -> Tensor:
        self.check(tokens, positional, named)
        width = tokens.shape[-1]
        rows = tokens.reshape(-1, width)
        if self.attention is not None and self.num_outputs < self.num_tokens:
            normed = self.norm1(tokens)  # not of rows, which OpenVINO in eight bits cannot turn into tokens again
            rows = tokens[:, : self.num_outputs].reshape(-1, width) + self.attention(normed, image_bias, image_turn)
        elif self.attention is not None:
            rows = rows + self.attention(self.norm1(rows), image_bias, image_turn)
        if self.mlp is not None:
            rows = rows + self.mlp(self.norm2(rows))
        return rows.view(-1, self.num_outputs, width)


def _bias_of_outputs(parts: PlainParts, num_outputs: int) -> Tensor | None:
    """What is added to the attention scores of the first queries."""
    return None if parts.bias is None else parts.bias.detach()[:, :, :num_outputs].to(parts.projection.weight)


class SplitAttention(nn.Module):
    """Attention for graphs: query, key and value are projected apart, so that no runtime has to take them out of one
    tensor again, and what can be folded into weights is (see `split_projections`).
    """

    bias: Tensor | None

    def __init__(self, parts: PlainParts, num_tokens: int, num_outputs: int, explicit: bool) -> None:
        super().__init__()
        self.num_tokens, self.num_outputs, self.explicit = num_tokens, num_outputs, explicit
        self.heads, self.attention_norm = parts.heads, parts.attention_norm
        self.query_norm, self.key_norm = parts.query_norm, parts.key_norm
        self.late_scale = parts.scale if norms_heads(parts) else None
        self.query, self.key, self.value, self.output = split_projections(parts)
        counts, like = (num_outputs, num_tokens), parts.projection.weight
        self.turn_query, self.turn_key = (
            None if parts.rotary is None else Turn(parts.rotary, count, like) for count in counts
        )
        self.register_buffer("bias", _bias_of_outputs(parts, num_outputs), persistent=False)

    def forward(self, normed: Tensor, image_bias: Tensor | None = None, image_turn: Tables | None = None) -> Tensor:
        bias = sum_of(self.bias, None if image_bias is None else image_bias[:, :, : self.num_outputs])
        asking = normed
        if self.num_outputs < self.num_tokens:
            width = normed.shape[-1]
            asking = normed[:, : self.num_outputs].reshape(-1, width)
            normed = normed.reshape(-1, width)
        query, key, value = (
            layer(read).view(-1, count, *self.heads).transpose(1, 2)
            for layer, read, count in (
                (self.query, asking, self.num_outputs),
                (self.key, normed, self.num_tokens),
                (self.value, normed, self.num_tokens),
            )
        )
        query = query if self.query_norm is None else self.query_norm(query)
        key = key if self.key_norm is None else self.key_norm(key)
        query = query if self.turn_query is None else self.turn_query(query, image_turn)
        key = key if self.turn_key is None else self.turn_key(key, image_turn)
        if self.late_scale is not None:
            query = query * self.late_scale
        if self.explicit:
            scores = query @ key.transpose(-2, -1)
            attended = (scores if bias is None else scores + bias).softmax(-1) @ value
        else:
            attended = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=1.0)
        attended = attended.transpose(1, 2).reshape(-1, self.heads[0] * self.heads[1])
        projected: Tensor = self.output(attended if self.attention_norm is None else self.attention_norm(attended))
        return projected


class FewQueries(nn.Module):
    """Attention of few queries, as of a class token: keys and values are never computed.

    The score of a key is `q W_k x`: with `q W_k` computed once a query, it is a product with the token `x` itself. The
    attended value is `sum a W_v x = W_v sum a x`: tokens are averaged first and projected once. Heads are told apart
    by a mask, so that both are products with a plain table of weights, which every runtime is good at.
    """

    mask: Tensor
    bias: Tensor | None

    def __init__(self, parts: PlainParts, num_tokens: int, num_outputs: int) -> None:
        super().__init__()
        self.num_outputs = num_outputs
        self.query, key, self.value, self.output = split_projections(parts)
        self.key = linear(key.weight.T, None)
        num_heads, size = parts.heads
        mask = torch.eye(num_heads).to(key.weight).repeat_interleave(size, dim=1)
        self.register_buffer("mask", mask[:, None], persistent=False)
        bias = _bias_of_outputs(parts, num_outputs)
        if bias is not None and (bias.shape[1] > 1 or bias.shape[2] > 1):
            bias = bias.expand(1, num_heads, num_outputs, num_tokens)
        self.register_buffer("bias", None if bias is None else bias.flatten(1, 2), persistent=False)

    @staticmethod
    def is_cheaper(parts: PlainParts, num_tokens: int, num_outputs: int) -> bool:
        """Whether it can be, and multiplies less than half of what keys and values of all tokens would take."""
        asking, width = parts.heads[0] * num_outputs, parts.projection.in_features
        is_linear = not norms_heads(parts) and parts.rotary is None and parts.attention_norm is None
        return is_linear and asking * (width + num_tokens) <= num_tokens * width / 2

    def forward(self, tokens: Tensor, image_bias: Tensor | None = None, _: Tables | None = None) -> Tensor:
        bias = sum_of(self.bias, None if image_bias is None else self._of_queries(image_bias))
        query = self.query(tokens[:, : self.num_outputs])
        asking = self.key((query[:, None] * self.mask).flatten(1, 2))
        scores = asking @ tokens.transpose(1, 2)
        averaged = (scores if bias is None else scores + bias).softmax(-1) @ tokens
        attended = self.value(averaged).unflatten(1, (len(self.mask), self.num_outputs)) * self.mask
        projected: Tensor = self.output(attended.sum(1)).flatten(0, 1)
        return projected

    def _of_queries(self, image_bias: Tensor) -> Tensor:
        """What each image adds to scores, (batch, heads, queries, keys), heads and queries in one dimension."""
        of_queries = image_bias[:, :, : self.num_outputs]
        return of_queries[:, 0, :1] if image_bias.shape[1] == 1 else of_queries.flatten(1, 2)
