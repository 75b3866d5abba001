"""Plans that adapt to the image, the idea in one file: the plan says how many tokens merge, the image says which.

Before some blocks a *step* merges r of the patch tokens; r is a constant of the plan, so that all shapes are. What it
does to the output to replace two tokens by their mean is estimated, in nats, by

    c(a, b) = 1/2 s_a s_b / (s_a + s_b) |P^T (x_a - x_b)|^2

with `s` the number of patches that a token stands for and `P` (width x 64) a square root of the second moment of the
output's gradient at the tokens that enter this block (see `pmvit.measuring.metric`): Ward's linkage in the metric of
the output. Tokens that look different but matter alike are cheap.

A step has two rounds. Each splits the patch tokens in two sets, A and B; every token of A finds the cheapest one of B,
and the cheapest of these pairs merge. So tokens that were in one set at first may merge in the second round; it costs
little, for rounds work on the 32 numbers of `P^T x` alone, and tokens merge when all has been chosen. The mean of a
group is stretched to the mean length of its members, for averaging shortens.
Attention to a token counts for the patches in it: a part of the logarithm of its size is added to its scores.

Between the blocks every token has its place in the image, as with fixed plans: each keeps what sets it apart from its
group and receives the group's update. Products, minima, `topk` with constant k and gathers are all there is: no
scatter, no mask, nothing whose shape depends on the image.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.fx
from torch import Tensor, nn

from pmvit.flow import Channel, Flow, Groups
from pmvit.prune_merge import argument_names, is_recorded, named_arguments
from pmvit.wrapping import WrappedBlock


class Choice(NamedTuple):
    """What a step chose for each image, as places among the patch tokens.

    Attributes:
        kept: Tokens that stay, in their new order, (batch, count - r): one stands for each group.
        joins: Tokens that join one of them, (batch, r).
        into: Which one they join.
    """

    kept: Tensor
    joins: Tensor
    into: Tensor


@torch.fx.wrap
def take(values: Tensor, places: Tensor) -> Tensor:
    """Rows of (batch, tokens, width) values at (batch, count) places, for each image its own."""
    batch, count, width = values.shape
    if not is_recorded(values) and batch == 1:
        return values[0].index_select(0, places[0])[None]
    first = torch.arange(batch, device=places.device)[:, None] * count
    return values.reshape(-1, width).index_select(0, (places + first).flatten()).view(batch, -1, width)


def pair_costs(points: Tensor, sizes: Tensor | None) -> Tensor:
    """`c(a, b)` of all pairs of A and B, every second token and those between them, up to a factor.

    Args:
        points: `P^T x` of all, (batch, count, rank).
        sizes: How many patches each stands for, (batch, count, 1); `None` if each for one.
    """
    squares = points.square().sum(-1, keepdim=True)
    sums = squares[:, ::2] + squares[:, 1::2].transpose(1, 2)
    distances = torch.baddbmm(sums, points[:, ::2], (-2 * points[:, 1::2]).transpose(1, 2))
    if sizes is None:
        return distances
    shares = sizes.reciprocal()
    return distances / (shares[:, ::2] + shares[:, 1::2].transpose(1, 2))  # times s_a s_b / (s_a + s_b)


@torch.fx.wrap
def choose(points: Tensor, sizes: Tensor | None, rounds: Sequence[int]) -> Choice:
    """Find which patch tokens merge, a part of them in each round.

    A round puts the tokens into two sets in turn, A and B. Every token of A finds the cheapest one of B, and the
    cheapest of these pairs merge: so tokens that a round had in one set may meet in the next.

    Args:
        points: `P^T x` of the patch tokens, (batch, count, rank).
        sizes: How many patches each stands for, (batch, count, 1); `None` if each for one.
        rounds: How many merge in each round, at most half of those that are left (see `rounds_of`).
    """
    (batch, count, _), device = points.shape, points.device
    kept: Tensor | None = None  # in the first round, every token is in its place
    joins: list[Tensor] = []
    into: list[Tensor] = []
    for number, r in enumerate(rounds):
        cheapest, partners = pair_costs(points, sizes).min(-1)
        by_cost = cheapest.topk(cheapest.shape[1], largest=False).indices
        joining, staying = by_cost[:, :r], by_cost[:, r:]
        partners = partners.gather(1, joining)
        if kept is None:
            second = torch.arange(1, count, 2, device=device).expand(batch, -1)
            gone, partner, stays = 2 * joining, 2 * partners + 1, 2 * staying
        else:
            first, second = kept[:, ::2], kept[:, 1::2]
            gone, partner, stays = first.gather(1, joining), second.gather(1, partners), first.gather(1, staying)
        into = [follow(targets, gone, partner) for targets in into] + [partner]
        joins.append(gone)
        kept = torch.cat([stays, second], dim=1)
        if number + 1 < len(rounds):
            points, sizes = _merge_points(points, sizes, joining, partners, staying)
    if kept is None:
        raise ValueError("expected at least one round")
    return Choice(kept, *(each[0] if len(each) == 1 else torch.cat(each, dim=1) for each in (joins, into)))


def follow(targets: Tensor, gone: Tensor, partner: Tensor) -> Tensor:
    """Where tokens end up that joined others, some of which are now gone to partners of their own."""
    went = targets[:, :, None] == gone[:, None]
    return torch.where(went.any(-1), (went * partner[:, None]).sum(-1), targets)


def _merge_points(
    points: Tensor, sizes: Tensor | None, joining: Tensor, partners: Tensor, staying: Tensor
) -> tuple[Tensor, Tensor]:
    """Points and sizes for the next round: of A those that stay, of B the means with those that join."""
    sizes = points.new_ones(*points.shape[:2], 1) if sizes is None else sizes
    weighted = torch.cat([points * sizes, sizes], dim=-1)
    first, second = weighted[:, ::2], weighted[:, 1::2]
    places = torch.arange(second.shape[1], device=points.device)[:, None]
    joined = torch.baddbmm(second, (partners[:, None] == places).to(points.dtype), take(first, joining))
    left = torch.cat([take(first, staying), joined], dim=1)
    return left[..., :-1] / left[..., -1:], left[..., -1:]


@torch.fx.wrap
def merge_chosen(tokens: Tensor, sizes: Tensor | None, choice: Choice, num_prefix: int) -> tuple[Tensor, Tensor]:
    """Tokens after a step, prefix tokens first; and how many patches each stands for, (batch, tokens, 1).

    A group is the mean of its members by their sizes, times what makes it as long as they are: with `t` the sum of
    `s x`, it is `t / |t|` times the sum of `s |x|` over the sum of `s`. A token that nothing joins is a group, too.

    Args:
        tokens: (batch, prefix and patch tokens, width).
        sizes: How many patches each stands for; `None` if each for one.
        choice: What merges.
        num_prefix: Of prefix tokens.
    """
    lengths = tokens.norm(dim=-1, keepdim=True)
    if sizes is None:
        weighted = torch.cat([tokens, torch.ones_like(lengths), lengths], dim=-1)
    else:
        weighted = torch.cat([tokens * sizes, sizes, lengths * sizes], dim=-1)
    places = with_prefix(torch.cat([choice.kept, choice.joins], dim=1), num_prefix)
    left = num_prefix + choice.kept.shape[1]
    kept, joins = take(weighted, places).split([left, choice.joins.shape[1]], dim=1)
    joined = (places[:, :left, None] == choice.into[:, None] + num_prefix).to(tokens.dtype)  # a one for who joins whom
    total, size, length = torch.baddbmm(kept, joined, joins).split([tokens.shape[-1], 1, 1], dim=-1)
    return total * (length / (size * total.norm(dim=-1, keepdim=True)).clamp_min(1e-12)), size


@torch.fx.wrap
def with_prefix(places: Tensor, num_prefix: int) -> Tensor:
    """Places among all tokens of (batch, count) places among the patch tokens, with the prefix tokens before them."""
    prefix = torch.arange(num_prefix, device=places.device).expand(places.shape[0], -1)
    return torch.cat([prefix, places + num_prefix], dim=1)


@torch.fx.wrap
def places_after(choice: Choice, num_prefix: int) -> Tensor:
    """Where each token is found after a step, (batch, tokens), prefix tokens included."""
    left = torch.arange(choice.kept.shape[1], device=choice.kept.device)
    found = (choice.into[:, :, None] == choice.kept[:, None]).to(left.dtype)
    after = torch.cat([left.expand_as(choice.kept), (found * left).sum(-1)], dim=1)
    before = torch.cat([choice.kept, choice.joins], dim=1)
    after = after.gather(1, before.topk(before.shape[1], largest=False).indices)  # undoes the order
    return with_prefix(after, num_prefix)


class MergeStep(nn.Module):
    """Merges tokens that enter a block.

    Args:
        projection: `P`, (width, rank).
        count: Of patch tokens before it.
        merges: How many merge.
        num_prefix: Tokens before the patch tokens, which never merge.
        rounds: In how many rounds they do, at least.
    """

    projection: Tensor

    def __init__(self, projection: Tensor, count: int, merges: int, num_prefix: int, rounds: int) -> None:
        super().__init__()
        self.num_prefix, self.count, self.merges = num_prefix, count, merges
        self.rounds = rounds_of(count, merges, rounds)
        self.register_buffer("projection", projection, persistent=False)

    def extra_repr(self) -> str:
        return f"{self.count} -> {self.count - self.merges} patch tokens"

    def forward(self, tokens: Tensor, sizes: Tensor | None) -> tuple[Tensor, Tensor, Choice]:
        """Tokens and sizes after the step, those of prefix tokens included, and what it chose."""
        with torch.no_grad():  # in float32, for near distances are differences of large numbers
            points = torch.matmul(tokens.float(), self.projection.float())[:, self.num_prefix :]
            points = points - points.mean(1, keepdim=True)  # distances stay, and lose less to rounding
            of_patches = None if sizes is None else sizes[:, self.num_prefix :].float()
            choice = choose(points, of_patches, self.rounds)
        merged, sizes = merge_chosen(tokens, sizes, choice, self.num_prefix)
        return merged, sizes, choice


def rounds_of(count: int, merges: int, rounds: int) -> tuple[int, ...]:
    """How many tokens each round of a step merges: in at least so many rounds, and at most half of those left."""
    if merges >= count:
        raise ValueError(f"expected a step that leaves a token, got one that merges {merges} of {count}")
    result: list[int] = []
    while merges:
        r = min(-(-merges // max(rounds - len(result), 1)), count - count // 2)
        result.append(r)
        count, merges = count - r, merges - r
    return tuple(result)


class AdaptiveBlock(WrappedBlock):
    """A transformer block that runs on groups of tokens that the image chose: all tokens in, all out.

    Args:
        block: The block to wrap, as for `PruneMerge`.
        step: What merges tokens before it, if anything; otherwise it runs on the groups of the block before.
        channel: That all adaptive blocks of the model share.
        number: Of the block.
        num_prefix: Tokens before the patch tokens.
        count: Tokens that the block runs on, prefix tokens included.
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
            merged, sizes, choice = self.step(merged, sizes)
            groups = places_after(choice, self.num_prefix).gather(1, groups)
            centres = centres.gather(1, with_prefix(choice.kept, self.num_prefix))
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
    rounds: int,
    size_weight: float,
    arguments_at_centres: Any,
) -> dict[int, AdaptiveBlock]:
    """Wrap the blocks from the first before which tokens merge on.

    Args:
        blocks: All blocks of a model, first to last.
        merges: How many tokens merge before each.
        projections: `P` of each block, (blocks, width, rank).
        num_patches: Patch tokens of an image.
        num_prefix: As for `AdaptiveBlock`, like all that follow.
        rounds: Of each step, at least.
        size_weight: Part of the logarithm of sizes in attention.
        arguments_at_centres: Reduces the other arguments of a call of a block.
    """
    channel = Channel()
    result: dict[int, AdaptiveBlock] = {}
    for index, (block, r) in enumerate(zip(blocks, merges, strict=True)):
        if not r and not result:
            continue
        device = next(block.parameters()).device
        step = MergeStep(projections[index].to(device), num_patches, r, num_prefix, rounds) if r else None
        result[index] = AdaptiveBlock(
            block,
            step,
            channel,
            index,
            num_prefix=num_prefix,
            count=num_prefix + num_patches - r,
            is_first=not result,
            size_weight=size_weight,
            arguments_at_centres=arguments_at_centres,
        ).train(block.training)
        num_patches -= r
    return result
