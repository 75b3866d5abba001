"""A Swin block on groups: window attention and MLP, with position biases and masks taken at the group centres.

What a Swin block does besides attention it does to each token by itself, so the whole block can run on groups. Rolling,
padding and parting the grid only say which tokens attend to each other: here that is a constant order of the groups.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pmvit.errors import PmvitError
from pmvit.hosts.host import TokenLayout
from pmvit.hosts.swin.recipe import Recipe
from pmvit.prune_merge import PRUNED, PruneMerge
from pmvit.windows import PADDING, Budget

MASKED = -100.0  # what hosts add to the attention scores of tokens of other regions


class WindowBlock(nn.Module):
    """A host's block, run on the groups of a plan: (batch, groups, width) in and out.

    Every window has as many places; those its groups leave free hold padding (zeros, as the host pads).

    Args:
        host: The block; it is not changed.
        recipe: What it is made of.
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
        recipe: Recipe,
        groups: Tensor,
        centres: Tensor,
        layout: TokenLayout,
        log_sizes: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.host = host
        self.recipe = recipe
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
        index = recipe.bias_index(host).cpu().view(windows.area, windows.area)
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

    def extra_repr(self) -> str:
        return f"{self.num_windows} windows of {self.window_groups}"

    def attention_bias(self) -> Tensor:
        """What is added to the attention scores, (windows, heads, places, places)."""
        table = self.recipe.bias_table(self.host)
        bias = table.t()[:, self.bias_index].transpose(0, 1)
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
        host, recipe = self.host, self.recipe
        norm1, norm2 = recipe.norms(host)
        drop1, drop2 = recipe.drop_paths(host)
        attended = norm1(self._attend(groups)) if recipe.post_norm else self._attend(norm1(groups))
        groups = self._add(groups, drop1(attended))
        update = norm2(recipe.mlp(host, groups)) if recipe.post_norm else recipe.mlp(host, norm2(groups))
        return self._add(groups, drop2(update))

    def _add(self, groups: Tensor, update: Tensor) -> Tensor:
        return groups.add_(update) if self.inplace else groups + update

    def _attend(self, groups: Tensor) -> Tensor:
        batch, _, width = groups.shape
        if self.sources is not None:
            groups = F.pad(groups, (0, 0, 0, 1)).index_select(1, self.sources)
        windows = groups.reshape(-1, self.window_groups, width)
        query, key, value = self.recipe.project(self.host, windows)
        bias = self.attention_bias() if self.bias is None else self.bias
        dropout = self.recipe.dropout(self.host) if self.training else 0.0
        if self.explicit:
            scores = (query @ key.transpose(-2, -1)).unflatten(0, (-1, self.num_windows)) + bias
            attended = scores.flatten(0, 1).softmax(-1) @ value
        else:
            mask = bias.to(query.dtype).repeat(batch, 1, 1, 1)
            attended = F.scaled_dot_product_attention(query, key, value, mask, dropout_p=dropout, scale=1.0)
        output = self.recipe.output(self.host, attended.transpose(1, 2).flatten(2)).reshape(batch, -1, width)
        return output if self.places is None else output.index_select(1, self.places)


def window_block(wrapper: PruneMerge, recipe: Recipe, layout: TokenLayout) -> WindowBlock:
    """The block that a compressed one runs instead of its host's."""
    groups = torch.full((wrapper.num_patches,), PRUNED)
    counts = torch.diff(wrapper.merge_offsets.cpu(), append=torch.tensor([wrapper.merge_columns.numel()]))
    groups[wrapper.merge_columns.cpu()] = torch.repeat_interleave(torch.arange(wrapper.num_groups), counts)
    return WindowBlock(wrapper.block, recipe, groups, wrapper.centres.cpu(), layout, wrapper.log_sizes)


def whole_block(host: nn.Module, recipe: Recipe, layout: TokenLayout) -> WindowBlock:
    """The host's block on all tokens, in the order of the grid."""
    tokens = torch.arange(layout.num_patches)
    return WindowBlock(host, recipe, tokens, tokens, layout)


def _check_regions(groups: Tensor, regions: Tensor) -> None:
    is_member = groups != PRUNED
    lowest, highest = (
        torch.zeros(int(groups.max()) + 1, dtype=torch.long).scatter_reduce(
            0, groups[is_member], regions[is_member], how, include_self=False
        )
        for how in ("amin", "amax")
    )
    if (lowest != highest).any():
        group = int(torch.nonzero(lowest != highest)[0])
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
    padding = torch.nonzero(slots.flatten() == PADDING).flatten()
    padding = padding[torch.argsort(_number_within(regions[padding]), stable=True)]  # one of each region first
    candidates = torch.cat([centres, padding])
    candidates = candidates[torch.argsort(candidates // area, stable=True)]
    return candidates[_number_within(candidates // area) < count].view(num_windows, count)


def _number_within(keys: Tensor) -> Tensor:
    """Which of those with its key each entry is, in their order."""
    order = torch.argsort(keys, stable=True)
    counts = torch.bincount(keys)
    number = torch.empty_like(order)
    number[order] = torch.arange(len(order)) - (counts.cumsum(0) - counts)[keys[order]]
    return number


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
