"""What pmvit has to know of a host's Swin block: its parts, under one set of names."""

import math
from abc import ABC, abstractmethod

import torch.nn.functional as F
from torch import Tensor, nn

from pmvit.hosts.host import AnyModule


class Recipe(ABC):
    """What a host's Swin block is made of. It has no state: every method is given the block.

    Attributes:
        post_norm: Whether a branch is normalised behind its layers (Swin v2) or before them.
        attention: The path of attention.
        without_tokens: Paths of the parts that do not run on tokens.
    """

    post_norm: bool = False
    attention: str = "attn"
    without_tokens: tuple[str, ...] = ()

    @abstractmethod
    def project(self, block: AnyModule, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of (windows, tokens, width), each as (windows, heads, tokens, size of a head).

        The products of query and key are the attention scores: scaled, and cosines where the host takes them.
        """

    @abstractmethod
    def output(self, block: AnyModule, attended: Tensor) -> Tensor:
        """The projection of what the heads say, (windows, tokens, width)."""

    @abstractmethod
    def bias_table(self, block: AnyModule) -> Tensor:
        """The position bias of each relative position and head."""

    @abstractmethod
    def bias_index(self, block: AnyModule) -> Tensor:
        """Where in the table the bias of each two places of a window stands, (area, area)."""

    @abstractmethod
    def norms(self, block: AnyModule) -> tuple[nn.Module, nn.Module]:
        """Those of attention and of the MLP."""

    @abstractmethod
    def mlp(self, block: AnyModule, tokens: Tensor) -> Tensor:
        """The MLP, without normalisation and shortcut."""

    def drop_paths(self, block: AnyModule) -> tuple[nn.Module, nn.Module]:
        """Those of attention and of the MLP."""
        return block.drop_path1, block.drop_path2

    def dropout(self, block: AnyModule) -> float:
        """Of the attention map, in training."""
        return float(block.attn.attn_drop.p)


class UsualBlock(Recipe):
    """A block whose parts are called as in Swin's own code: those of timm and torchvision."""

    def bias_table(self, block: AnyModule) -> Tensor:
        table: Tensor = block.attn.relative_position_bias_table
        return table

    def bias_index(self, block: AnyModule) -> Tensor:
        index: Tensor = block.attn.relative_position_index
        return index

    def norms(self, block: AnyModule) -> tuple[nn.Module, nn.Module]:
        return block.norm1, block.norm2

    def mlp(self, block: AnyModule, tokens: Tensor) -> Tensor:
        result: Tensor = block.mlp(tokens)
        return result


class UsualV2Block(UsualBlock):
    """The same of Swin v2: cosine attention, a position bias from a small network, normalisation last."""

    post_norm = True
    without_tokens = ("attn.cpb_mlp",)

    @abstractmethod
    def qkv_bias(self, block: AnyModule) -> Tensor | None:
        """That of queries, keys and values."""

    def project(self, block: AnyModule, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        attention = block.attn
        projected = F.linear(tokens, attention.qkv.weight, self.qkv_bias(block))
        query, key, value = split_heads(projected, attention.num_heads)
        return *cosine(query, key, attention.logit_scale), value

    def bias_table(self, block: AnyModule) -> Tensor:
        attention = block.attn
        values: Tensor = attention.cpb_mlp(attention.relative_coords_table).view(-1, attention.num_heads)
        return 16 * values.sigmoid()


def split_heads(qkv: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value out of one projection."""
    query, key, value = qkv.unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return query, key, value


def cosine(query: Tensor, key: Tensor, logit_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Query and key whose product is their cosine times a learned scale of at most 100 (Swin v2)."""
    scale = logit_scale.clamp(max=math.log(100.0)).exp()
    return F.normalize(query, dim=-1) * scale, F.normalize(key, dim=-1)
