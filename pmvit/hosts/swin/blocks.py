"""A Swin block on groups: window attention and MLP, with position biases and masks taken at the group centres.

What a Swin block does besides attention it does to each token by itself, so the whole block can run on groups. Rolling,
padding and parting the grid only say which tokens attend to each other: here that is a constant order of the groups.
"""

import math
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pmvit.errors import PmvitError
from pmvit.hosts.host import TokenLayout
from pmvit.hosts.parts import split_heads
from pmvit.prune_merge import PRUNED
from pmvit.windows import PADDING, Budget

MASKED = -100.0  # what hosts add to the attention scores of tokens of other regions


class Names(NamedTuple):
    """Where the parts of a host's Swin block are, as paths from the block; those of timm where nothing else is said.

    Attributes:
        attention: What attends.
        heads: The number of its heads.
        qkv: Query, key and value: one layer for the three of them, or three.
        projection: Behind attention.
        dropouts: How much is dropped of the attention map and of what is projected.
        bias: What holds position biases and where the one of each two places stands; in v2 also the scale of cosines.
        bias_network: What makes position biases in v2.
        norms: Of attention and of the MLP.
        mlp: The parts of the MLP, one behind the other.
        drop_paths: Of attention and of the MLP, empty if there is none.
        beside: What the block returns beside the tokens, in a tuple with them; `None` if it returns tokens alone.
    """

    attention: str = "attn"
    heads: str = "attn.num_heads"
    qkv: tuple[str, ...] = ("attn.qkv",)
    projection: str = "attn.proj"
    dropouts: tuple[str, str] = ("attn.attn_drop.p", "attn.proj_drop.p")
    bias: str = "attn"
    bias_network: str = "attn.cpb_mlp"
    norms: tuple[str, str] = ("norm1", "norm2")
    mlp: tuple[str, ...] = ("mlp",)
    drop_paths: tuple[str, str] = ("drop_path1", "drop_path2")
    beside: tuple[None, ...] | None = None

    def is_v2(self, block: nn.Module) -> bool:
        """Whether a block is of Swin v2: cosine attention, biases from a small network, normalisation last."""
        return hasattr(reduce(getattr, self.bias.split("."), block), "logit_scale")


class WindowBlock(nn.Module):
    """A host's block, run on the groups of a plan: (batch, groups, width) in and out.

    Every window has as many places; those its groups leave free hold padding (zeros, as the host pads).

    Args:
        host: The block; it is not changed.
        names: What it calls its parts.
        groups: The group of each token, `PRUNED` for none.
        centres: The token of each group.
        layout: The block's grid and windows.
        log_sizes: To add to the attention scores of each group, if any.

    Raises:
        PmvitError: If a group lies in two regions, or the windows do not keep as many tokens.
    """

    bias_index: Tensor
    extra_bias: Tensor | None
    bias: Tensor | None
    sources: Tensor | None
    places: Tensor | None

    def __init__(
        self,
        host: nn.Module,
        names: Names,
        groups: Tensor,
        centres: Tensor,
        layout: TokenLayout,
        log_sizes: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.host = host
        self.names = names
        self.is_v2 = names.is_v2(host)
        self.explicit = False  # attention written out, for runtimes that have no fused one
        self.inplace = False
        grid, windows = layout.grid, layout.windows
        if windows is None:
            raise TypeError("expected a layout with windows for a Swin block; got one without")
        token_places, regions = windows.places(grid), windows.regions(grid).flatten()
        _check_regions(groups, regions[token_places])
        chosen = _choose(token_places[centres], Budget.of(windows, grid), windows.slots(grid), regions)
        self.num_windows, self.window_groups = chosen.shape
        group_at = torch.full_like(regions, PADDING)
        group_at[token_places[centres]] = torch.arange(len(centres))
        sources = group_at[chosen].flatten()
        places = torch.empty_like(centres)
        places[sources[sources != PADDING]] = torch.nonzero(sources != PADDING).flatten()
        in_order = torch.equal(sources, torch.arange(len(centres)))
        index = self._part(names.bias).relative_position_index.cpu().view(windows.area, windows.area)
        inside = chosen % windows.area
        parameter = next(host.parameters())
        extra = _extra_bias(chosen, regions, windows.slots(grid), sources.view(chosen.shape), log_sizes)
        buffers = {
            "sources": None if in_order else torch.where(sources == PADDING, len(centres), sources),
            "places": None if in_order else places,
            "bias_index": index[inside[:, :, None], inside[:, None, :]],
            "extra_bias": None if extra is None else extra.to(parameter.dtype),
            "bias": None,
        }
        for name, buffer in buffers.items():
            self.register_buffer(name, None if buffer is None else buffer.to(parameter.device), persistent=False)

    def _part(self, path: str) -> Any:
        return reduce(getattr, path.split("."), self.host)

    def extra_repr(self) -> str:
        return f"{self.num_windows} windows of {self.window_groups}"

    def attention_bias(self) -> Tensor:
        """What is added to the attention scores, (windows, heads, places, places)."""
        holder = self._part(self.names.bias)
        if self.is_v2:
            values = self._part(self.names.bias_network)(holder.relative_coords_table)
            table = 16 * values.view(-1, self._part(self.names.heads)).sigmoid()
        else:
            table = holder.relative_position_bias_table
        bias: Tensor = table.t()[:, self.bias_index].transpose(0, 1)
        return bias if self.extra_bias is None else bias + self.extra_bias.to(bias.dtype)

    def freeze(self, *, explicit: bool, inplace: bool) -> None:
        """Get ready for inference alone, with the bias as a constant.

        Args:
            explicit: Write attention out, for runtimes that have no fused one.
            inplace: The input may be written to.
        """
        with torch.no_grad():
            self.bias = self.attention_bias().contiguous()
        self.inplace = inplace
        self.explicit = explicit

    def forward(self, groups: Tensor, *_: object, **__: object) -> Tensor:
        """The groups after the block; what a host says beside the tokens (grid, masks) is in the plan."""
        names = self.names
        for path, drop_path, run in zip(names.norms, names.drop_paths, (self._attend, self._mlp), strict=True):
            norm = self._part(path)
            update = norm(run(groups)) if self.is_v2 else run(norm(groups))
            groups = self._add(groups, self._part(drop_path)(update) if drop_path else update)
        return groups

    def _add(self, groups: Tensor, update: Tensor) -> Tensor:
        return groups.add_(update) if self.inplace else groups + update

    def _attend(self, groups: Tensor) -> Tensor:
        batch, _, width = groups.shape
        if self.sources is not None:
            groups = F.pad(groups, (0, 0, 0, 1)).index_select(1, self.sources)
        windows = groups.reshape(-1, self.window_groups, width)
        query, key, value = self._project(windows)
        bias = self.attention_bias() if self.bias is None else self.bias
        of_map, of_output = (self._part(path) if self.training else 0.0 for path in self.names.dropouts)
        if self.explicit:
            scores = (query @ key.transpose(-2, -1)).unflatten(0, (-1, self.num_windows)) + bias
            attended = scores.flatten(0, 1).softmax(-1) @ value
        else:
            mask = bias.to(query.dtype).repeat(batch, 1, 1, 1)
            attended = F.scaled_dot_product_attention(query, key, value, mask, dropout_p=of_map, scale=1.0)
        projected = self._part(self.names.projection)(attended.transpose(1, 2).flatten(2))
        output = F.dropout(projected, of_output, self.training).reshape(batch, -1, width)
        return output if self.places is None else output.index_select(1, self.places)

    def _project(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of (windows, tokens, width), each as (windows, heads, tokens, size of a head).

        The products of query and key are the attention scores: scaled, or cosines times a learned scale (v2).
        """
        heads, layers = self._part(self.names.heads), [self._part(path) for path in self.names.qkv]
        if len(layers) == 3:
            query, key, value = (layer(tokens).unflatten(-1, (heads, -1)).transpose(1, 2) for layer in layers)
        elif self.is_v2:
            query, key, value = split_heads(F.linear(tokens, layers[0].weight, self._qkv_bias(layers[0])), heads)
        else:
            query, key, value = split_heads(layers[0](tokens), heads)
        if not self.is_v2:
            return query * query.shape[-1] ** -0.5, key, value
        scale = self._part(self.names.bias).logit_scale.clamp(max=math.log(100.0)).exp()
        return F.normalize(query, dim=-1) * scale, F.normalize(key, dim=-1), value

    def _qkv_bias(self, layer: nn.Linear) -> Tensor | None:
        """Of Swin v2, where keys have none: beside the layer (timm), or in it whatever it says of keys."""
        attention = self._part(self.names.bias)
        if getattr(attention, "q_bias", None) is not None:
            return torch.cat([attention.q_bias, attention.k_bias, attention.v_bias])
        if layer.bias is None:
            return None
        third = layer.bias.numel() // 3
        return layer.bias * F.pad(layer.bias.new_zeros(third), (third, third), value=1.0)

    def _mlp(self, groups: Tensor) -> Tensor:
        for path in self.names.mlp:
            groups = self._part(path)(groups)
        return groups


def _check_regions(groups: Tensor, regions: Tensor) -> None:
    pairs = torch.stack([groups, regions])[:, groups != PRUNED].unique(dim=1)
    counts = torch.bincount(pairs[0])
    if (counts > 1).any():
        group = int(torch.nonzero(counts > 1)[0])
        raise PmvitError(
            f"expected groups inside one window and one region of its mask; group {group} lies in more: "
            "was the plan made for another window size?"
        )


def _choose(centres: Tensor, budget: Budget, slots: Tensor, regions: Tensor) -> Tensor:
    """The places at which each window is seen, (windows, places a window): all, or the centres and then padding."""
    num_windows, area = slots.shape
    kept = torch.bincount(centres // area, minlength=num_windows)
    count = budget.places(kept)
    if count is None:
        raise PmvitError(
            f"expected a plan that keeps as many tokens in each of {num_windows} windows of {area}; got "
            f"{int(kept.min())} to {int(kept.max())}: was the plan made for another window size?"
        )
    if count == area:
        return torch.arange(num_windows * area).view(num_windows, area)
    is_padding, of = slots == PADDING, regions.view_as(slots)
    number = ((of[:, :, None] == of[:, None, :]) & is_padding[:, None, :]).tril(-1).sum(-1)
    rank = torch.where(is_padding, number, area).flatten()  # by its number in its region: one of each region first
    rank[centres] = torch.arange(-len(centres), 0)
    chosen = rank.view_as(slots).argsort(dim=1, stable=True)[:, :count]
    return chosen + area * torch.arange(num_windows)[:, None]


def _extra_bias(
    chosen: Tensor, regions: Tensor, slots: Tensor, groups: Tensor, log_sizes: Tensor | None
) -> Tensor | None:
    """The mask between regions and the sizes of groups and padding, (windows, 1, places, places); `None` if zero."""
    of = regions[chosen]
    bias = torch.where(of[:, :, None] == of[:, None, :], 0.0, MASKED)
    if log_sizes is not None:
        is_padding = groups == PADDING
        there, here = (
            torch.bincount(some, minlength=int(regions.max()) + 1)
            for some in (regions[slots.flatten() == PADDING], of[is_padding])
        )
        of_padding = (there[of] / here[of].clamp(min=1)).clamp(min=1).log()
        sizes = torch.where(is_padding, of_padding, log_sizes.cpu().float()[groups.clamp(min=0)])
        bias = bias + sizes[:, None, :]
    return bias[:, None] if bias.any() else None
