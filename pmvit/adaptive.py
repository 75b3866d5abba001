"""Plans that adapt to the image, the idea in one file: the plan says how many tokens merge, the image says which.

Before some blocks a *step* merges r of the patch tokens; r is a constant of the plan, so that all shapes are. That a
token joins another is taken to cost

    c(a, b) = sqrt(s_a) |P^T (x_a - x_b)|^2

with `s` the number of patches that a token stands for and `P` (width x 32) a square root of the second moment of the
output's gradient at the tokens that enter this block (see `pmvit.measuring.metric`): a distance in the metric of the
output. Tokens that look different but matter alike are cheap. Ward's linkage, `s_a s_b / (s_a + s_b)` in place of the
root, keeps less and takes longer.

In a step, every patch token looks for the nearest among the tokens that stand before it. The r for which joining that
is cheapest go, and each of them joins the nearest before it of those that stay. These stand in a new order then, first
what no other could stand for: so in the next step, too, tokens join what is like few others, and not the other way
round. The mean of a group is stretched to the mean length of its members, for averaging shortens. Attention to a token
counts for the patches in it: a part of the logarithm of its size is added to its scores.

Counts are those of the model's own grid. An image of another size merges as large shares: what has merged before a
block is that share of its patches, rounded once, so that nothing adds up from step to step.

Between the blocks every token has its place in the image, as with fixed plans: each keeps what sets it apart from its
group and receives the group's update. Products, minima, `topk` with constant k and gathers are all there is: no
scatter, no mask, nothing whose shape depends on the image.
"""

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.fx
from torch import Tensor, nn

from pmvit.flow import Channel, Flow, Groups
from pmvit.prune_merge import argument_names, is_recorded, named_arguments
from pmvit.wrapping import WrappedBlock


class Choice(NamedTuple):
    """What a step chose for each image.

    Attributes:
        order: Places of all tokens, (batch, tokens): those that stay in their new order, prefix tokens first, and
            behind them the r that join one of these.
        into: Which of those that stay each of the r joins, in the new order, (batch, r).
    """

    order: Tensor
    into: Tensor

    @property
    def kept(self) -> Tensor:
        """Places of the tokens that stay and stand for groups, in their new order."""
        return self.order[:, : self.order.shape[1] - self.into.shape[1]]


@torch.fx.wrap
def take(values: Tensor, places: Tensor) -> Tensor:
    """Rows of (batch, tokens, width) values at (batch, count) places, for each image its own."""
    batch, count, width = values.shape
    if not is_recorded(values) and batch == 1:
        return values[0].index_select(0, places[0])[None]
    first = torch.arange(batch, device=places.device)[:, None] * count
    return values.reshape(-1, width).index_select(0, (places + first).flatten()).view(batch, -1, width)


def who_may_join(num_prefix: int, count: int) -> tuple[Tensor, Tensor]:
    """Who may join whom, patch tokens those before them: constants of a step, which mean the same in any precision.

    Args:
        num_prefix: Tokens that never merge, which come first.
        count: Patch tokens.

    Returns:
        What is added to the distance of each token (row) to another (column): 0 where it may join that, else infinity.
        And the most that joining costs each, which falls from the first on: those who may join nobody keep their order.
    """
    places = torch.arange(num_prefix + count)
    may_join = (places < places[:, None]) & (places >= num_prefix) & (places[:, None] >= num_prefix)
    return torch.where(may_join, 0.0, torch.inf), 2**60 - places * 2**40


@torch.fx.wrap
def constants_for(tokens: Tensor, num_prefix: int, barred: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
    """What `who_may_join` gives for so many tokens: a part of what there is, or made anew."""
    count, known = constant(tokens.shape[1]), min(constant(barred.shape[0]), constant(most.shape[0]))
    if count == known:
        return barred, most
    if count < known:
        return barred[:count, :count], most[:count]
    with torch.inference_mode(False):
        made = who_may_join(num_prefix, count - num_prefix)
        return made[0].to(most.device), made[1].to(most.device)


def constant(count: Any) -> int:
    """A number of tokens, which is a constant of every graph; torch.jit has it as a tensor, and would warn."""
    if not isinstance(count, Tensor):
        return int(count)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return int(count)


@torch.fx.wrap
def merged_of(count: int, merged: int, of: int) -> int:
    """How many of so many patch tokens have merged where `merged` of `of` have: as large a share, and one is left."""
    count = constant(count)
    return min((2 * count * merged + of) // (2 * of), count - 1)


@torch.fx.wrap
def choose(points: Tensor, sizes: Tensor | None, barred: Tensor, most: Tensor, r: int, num_prefix: int) -> Choice:
    """Find which tokens merge.

    Args:
        points: `P^T x`, (batch, tokens, rank).
        sizes: How many patches each stands for, (batch, tokens, 1); `None` if each for one.
        barred: As `who_may_join` gives it, like `most`.
        most: That joining costs each token.
        r: How many tokens join another.
        num_prefix: Tokens that none may join.
    """
    squares = points.square().sum(-1, keepdim=True)
    distances = torch.baddbmm(squares.transpose(1, 2) + barred.to(points), points, points.transpose(1, 2), alpha=-2)
    cheapest = distances.amin(-1, keepdim=True) + squares  # which are the same for all pairs of a token
    if sizes is not None:
        cheapest = cheapest * sizes.sqrt()
    order = cheapest[..., 0].minimum(most).topk(cheapest.shape[1]).indices  # dearest first
    _, kept, joins = order.split([num_prefix, order.shape[1] - num_prefix - r, r], dim=1)
    among_kept = take(distances, joins).gather(2, kept[:, None].expand(-1, r, -1))
    return Choice(order, among_kept.argmin(-1) + num_prefix)


@torch.fx.wrap
def merge_chosen(tokens: Tensor, sizes: Tensor | None, choice: Choice) -> tuple[Tensor, Tensor]:
    """Tokens after a step, in their new order; and how many patches each stands for, (batch, tokens, 1).

    A group is the mean of its members by their sizes, times what makes it as long as they are: with `t` the sum of
    `s x`, it is `t / |t|` times the sum of `s |x|` over the sum of `s`. A token that nothing joins is a group, too.

    Args:
        tokens: (batch, tokens, width).
        sizes: How many patches each stands for; `None` if each for one.
        choice: What merges.
    """
    lengths = tokens.norm(dim=-1, keepdim=True)
    weighted = torch.cat([tokens, lengths, torch.ones_like(lengths)], dim=-1)
    if sizes is not None:
        weighted = weighted * sizes
    r = choice.into.shape[1]
    left = tokens.shape[1] - r
    kept, joins = take(weighted, choice.order).split([left, r], dim=1)
    groups = torch.arange(left, device=tokens.device)[:, None]
    joined = (choice.into[:, None] == groups).to(tokens.dtype)  # a one for who joins whom
    total, length, size = torch.baddbmm(kept, joined, joins).split([tokens.shape[-1], 1, 1], dim=-1)
    return total * (length / (size * total.norm(dim=-1, keepdim=True)).clamp_min(1e-12)), size


@torch.fx.wrap
def places_after(choice: Choice) -> Tensor:
    """Where each token is found after a step, (batch, tokens)."""
    count, r = choice.order.shape[1], choice.into.shape[1]
    left = torch.arange(count - r, device=choice.order.device).expand(choice.order.shape[0], -1)
    before = choice.order.topk(count, largest=False).indices  # undoes the order
    return torch.cat([left, choice.into], dim=1).gather(1, before)


class MergeStep(nn.Module):
    """Merges tokens that enter a block.

    Args:
        projection: `P`, (width, rank).
        count: Of patch tokens before it, of an image of the model's own size.
        merges: How many of them merge.
        num_prefix: Tokens before the patch tokens, which never merge.
        merged: How many merged before.
    """

    projection: Tensor
    barred: Tensor
    most: Tensor

    def __init__(self, projection: Tensor, count: int, merges: int, num_prefix: int, merged: int = 0) -> None:
        super().__init__()
        if merges >= count:
            raise ValueError(f"expected a step that leaves a token, got one that merges {merges} of {count}")
        self.count, self.merges, self.num_prefix, self.merged = count, merges, num_prefix, merged
        self.register_buffer("projection", projection, persistent=False)
        for name, made in zip(("barred", "most"), who_may_join(num_prefix, count), strict=True):
            self.register_buffer(name, made.to(projection.device), persistent=False)

    def extra_repr(self) -> str:
        return f"{self.count} -> {self.count - self.merges} patch tokens"

    def forward(self, tokens: Tensor, sizes: Tensor | None, num_patches: int) -> tuple[Tensor, Tensor, Choice]:
        """Tokens and sizes after the step, those of prefix tokens included, and what it chose.

        The image had so many patch tokens before any merged.
        """
        r = self.merges_of(num_patches)
        barred, most = constants_for(tokens, self.num_prefix, self.barred, self.most)
        if not is_recorded(tokens) and len(most) > len(self.most):  # the largest so far are kept
            self.barred, self.most = barred, most
        with torch.no_grad():  # in float32, for near distances are differences of large numbers
            points = torch.matmul(tokens.float(), self.projection.float())
            points = points - points.mean(1, keepdim=True)  # distances stay, and lose less to rounding
            choice = choose(points, sizes, barred, most, r, self.num_prefix)
        merged, sizes = merge_chosen(tokens, sizes, choice)
        return merged, sizes, choice

    def merges_of(self, num_patches: int) -> int:
        """How many merge, of an image with so many patches."""
        before, of = self.merged, self.merged + self.count
        return merged_of(num_patches, before + self.merges, of) - merged_of(num_patches, before, of)


class AdaptiveBlock(WrappedBlock):
    """A transformer block that runs on groups of tokens that the image chose: all tokens in, all out.

    Args:
        block: The block to wrap, as for `PruneMerge`.
        step: What merges tokens before it, if anything; otherwise it runs on the groups of the block before.
        channel: That all adaptive blocks of the model share.
        number: Of the block.
        num_prefix: Tokens before the patch tokens.
        count: Tokens that the block runs on with an image of the model's own size, prefix tokens included.
        is_first: No block before it has merged anything.
        size_weight: Part of the logarithm of sizes that is added to attention scores.
        arguments_at_centres: As for `PruneMerge`; it gets `Groups`.
    """

    def __init__(
        self,
        block: nn.Module,
        step: MergeStep | None,
        channel: Channel,
        number: int,
        *,
        num_prefix: int,
        count: int,
        is_first: bool,
        size_weight: float,
        arguments_at_centres: Any,
    ) -> None:
        super().__init__()
        self.block, self.step, self.channel, self.number = block, step, channel, number
        self.num_prefix, self.count, self.is_first, self.size_weight = num_prefix, count, is_first, size_weight
        self.arguments_at_centres = arguments_at_centres
        self.argument_names = argument_names(block)

    def forward(self, tokens: Tensor, *positional: Any, **arguments: Any) -> Any:
        if not is_recorded(tokens) and torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "a model with an adaptive plan cannot compute blocks a second time in the backward pass: switch off "
                "its gradient checkpointing, as in model.set_grad_checkpointing(False)"
            )
        merged, sizes, groups, centres = self.enter(tokens)
        if self.step is not None:
            merged, sizes, choice = self.step(merged, sizes, tokens.shape[1] - self.num_prefix)
            groups = places_after(choice).gather(1, groups)
            centres = centres.gather(1, choice.kept)
        of_groups = self._groups(sizes, centres)
        named = named_arguments(self.argument_names, positional, arguments)
        self.channel.run_on(of_groups)
        try:
            output = self.block(merged, **self.arguments_at_centres(of_groups, named))
        finally:
            self.channel.run_on(None)
        after, *others = output if isinstance(output, tuple) else (output,)
        result = tokens + take(after - merged, groups)
        self.channel.put(self.number, Flow(result, after, sizes, groups, centres))
        return (result, *others) if isinstance(output, tuple) else result

    def last_groups(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The group of each token and the centre of each group, prefix tokens included, when these tokens came out."""
        flow = self.channel.get(self.number, tokens)
        return flow.groups, flow.centres

    def enter(self, tokens: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Groups, sizes, the group of each token and the centre of each group, before this block's step."""
        if self.is_first:
            each = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[0], -1)
            return tokens, None, each, each
        flow = self.channel.get(self.number - 1, tokens)
        merged = flow.merged
        if flow.tokens is not tokens:  # they were changed since the last block, and so are the groups
            members = (flow.groups[:, None] == torch.arange(merged.shape[1], device=tokens.device)[:, None]).to(tokens)
            merged = merged + members @ (tokens - flow.tokens) / members.sum(-1, keepdim=True)
        return merged, flow.sizes, flow.groups, flow.centres

    def _groups(self, sizes: Tensor | None, centres: Tensor) -> Groups:
        log_sizes = None if sizes is None or not self.size_weight else sizes[..., 0].log() * self.size_weight
        patch_centres = centres[:, self.num_prefix :] - self.num_prefix
        return Groups(self.block, self.argument_names, centres, patch_centres, log_sizes)


def adaptive_blocks(
    blocks: Sequence[nn.Module],
    merges: Sequence[int],
    projections: Tensor,
    num_patches: int,
    num_prefix: int,
    *,
    size_weight: float,
    arguments_at_centres: Any,
) -> dict[int, AdaptiveBlock]:
    """Wrap the blocks from the first before which tokens merge on.

    Args:
        blocks: All blocks of a model, first to last.
        merges: How many tokens merge before each.
        projections: `P` of each block, (blocks, width, rank).
        num_patches: Patch tokens of an image of the model's own size.
        num_prefix: As for `AdaptiveBlock`, like all that follow.
        size_weight: Part of the logarithm of sizes in attention.
        arguments_at_centres: Reduces the other arguments of a call of a block.
    """
    channel = Channel()
    result: dict[int, AdaptiveBlock] = {}
    merged = 0
    for index, (block, r) in enumerate(zip(blocks, merges, strict=True)):
        if not r and not result:
            continue
        device = next(block.parameters()).device
        step = MergeStep(projections[index].to(device), num_patches - merged, r, num_prefix, merged) if r else None
        merged += r
        result[index] = AdaptiveBlock(
            block,
            step,
            channel,
            index,
            num_prefix=num_prefix,
            count=num_prefix + num_patches - merged,
            is_first=not result,
            size_weight=size_weight,
            arguments_at_centres=arguments_at_centres,
        ).train(block.training)
    return result
