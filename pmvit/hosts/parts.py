"""What a host's plain transformer block is made of, said in one way for all libraries."""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn


class PlainParts(NamedTuple):
    """A block `y = x + s1 * attend(norm1(x))`, `y + s2 * mlp(norm2(y))`, in evaluation mode.

    Attributes:
        norm1: Before attention.
        qkv: Query, key and value of all heads: one layer for the three of them, in this order, or three layers.
        heads: Number of heads, and numbers in each.
        scale: Of the attention scores.
        query_norm: Of each head's queries; an `nn.Identity` if there is none.
        key_norm: Of each head's keys, likewise.
        projection: Behind attention.
        layer_scale1: What the update of attention is multiplied with, if anything.
        norm2: Before the MLP.
        mlp: The MLP; a `PlainMlp` where it is one.
        layer_scale2: What the update of the MLP is multiplied with, if anything.
    """

    norm1: nn.Module
    qkv: tuple[nn.Linear, ...]
    heads: tuple[int, int]
    scale: float
    query_norm: nn.Module
    key_norm: nn.Module
    projection: nn.Linear
    layer_scale1: Tensor | None
    norm2: nn.Module
    mlp: nn.Module
    layer_scale2: Tensor | None

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
