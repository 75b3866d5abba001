"""Plans that adapt to the image, the idea in one file: the plan says how many tokens merge, the image says which.

Before some blocks a *step* merges r of the patch tokens; r is a constant of the plan, so that all shapes are. What it
does to the output to replace two tokens by their mean is estimated, in nats, by

    c(a, b) = 1/2 s_a s_b / (s_a + s_b) |P^T (x_a - x_b)|^2

with `s` the number of patches that a token stands for and `P` (width x 64) a square root of the second moment of the
output's gradient at the tokens that enter this block (see `pmvit.measuring.metric`): Ward's linkage in the metric of
the output. Tokens that look different but matter alike are cheap.

A step splits the patch tokens in two sets, A and B. Every token of A finds the cheapest one of B, and the r cheapest
of these pairs merge. The mean of a group is stretched to the mean length of its members, for averaging shortens.
Attention to a token counts for the patches in it: a part of the logarithm of its size is added to its scores.

Between the blocks every token has its place in the image, as with fixed plans: each keeps what sets it apart from its
group and receives the group's update. Products, minima, `topk` with constant k and gathers are all there is: no
scatter, no mask, nothing whose shape depends on the image.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pmvit.flow import Channel, Flow, Groups
from pmvit.prune_merge import argument_names, is_recorded, named_arguments
from pmvit.wrapping import WrappedBlock


class Choice(NamedTuple):
    """What a round of a step chose for each image, as places among the patch tokens.

    Attributes:
        stays: Tokens of A that stay, (batch, |A| - r).
        joins: Tokens of A that join one of B, (batch, r).
        into: Which of B they join, as places in `others`.
        others: The tokens of B.
    """

    stays: Tensor
    joins: Tensor
    into: Tensor
    others: Tensor


def take(values: Tensor, places: Tensor) -> Tensor:
    """Rows of (batch, tokens, width) values at (batch, count) places, for each image its own."""
    batch, count, width = values.shape
    if not is_recorded(values) and batch == 1:
        return values[0].index_select(0, places[0])[None]
    first = torch.arange(batch, device=places.device)[:, None] * count
    return values.reshape(-1, width).index_select(0, (places + first).flatten()).view(batch, -1, width)


def pair_costs(points: Tensor, others: Tensor, sizes: Tensor | None, other_sizes: Tensor | None) -> Tensor:
    """`4 c(a, b)` of all pairs, from `P^T x` and sizes, (batch, tokens, 1); without sizes every token is one patch."""
    squares = points.square().sum(-1, keepdim=True)
    other_squares = squares if others is points else others.square().sum(-1, keepdim=True)
    distances = torch.baddbmm(squares + other_squares.transpose(1, 2), points, (-2 * others).transpose(1, 2))
    if sizes is None or other_sizes is None:
        return distances
    shares = sizes.reciprocal()
    other_shares = shares if other_sizes is sizes else other_sizes.reciprocal()
    return 2 * distances / (shares + other_shares.transpose(1, 2))  # 2 s_a s_b / (s_a + s_b) of the distance


def choose(points: Tensor, sizes: Tensor | None, count: int, r: int) -> Choice:
    """Find r of `count` patch tokens to merge: of A, which is every second one, into B, the others.

    Args:
        points: `P^T x` of the patch tokens, (batch, count, rank).
        sizes: How many patches each stands for.
        count: Of patch tokens.
        r: How many merge, at most half of them.
    """
    sets = (None, None) if sizes is None else (sizes[:, ::2], sizes[:, 1::2])
    cheapest, into = pair_costs(points[:, ::2], points[:, 1::2], *sets).min(-1)
    by_cost = cheapest.topk(count - count // 2, largest=False).indices
    others = torch.arange(1, count, 2, device=points.device).expand(points.shape[0], -1)
    return Choice(2 * by_cost[:, r:], 2 * by_cost[:, :r], into.gather(1, by_cost[:, :r]), others)


def merge_chosen(
    tokens: Tensor, sizes: Tensor | None, choice: Choice, num_prefix: int, places: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens after a round: prefix tokens, those of A that stay, those of B; and how many patches each stands for.

    A group is the mean of its members by their sizes, times what makes it as long as they are: with `t` the sum of
    `s x`, it is `t / |t|` times the sum of `s |x|` over the sum of `s`.

    Args:
        tokens: (batch, prefix and patch tokens, width).
        sizes: How many patches each stands for, (batch, tokens, 1); `None` if each for one.
        choice: What merges.
        num_prefix: Of prefix tokens.
        places: 0, 1, ... for each of B, (|B|, 1).
    """
    sums = []
    for chosen in (choice.joins + num_prefix, choice.others + num_prefix):
        members = take(tokens, chosen)
        lengths = members.norm(dim=-1, keepdim=True)
        if sizes is None:
            sums.append(torch.cat([members, torch.ones_like(lengths), lengths], dim=-1))
        else:
            of_members = take(sizes, chosen)
            sums.append(torch.cat([members * of_members, of_members, lengths * of_members], dim=-1))
    joined = (choice.into[:, None] == places).to(tokens.dtype)  # (batch, |B|, r): a one for who joins whom
    total, size, length = torch.baddbmm(sums[1], joined, sums[0]).split([tokens.shape[-1], 1, 1], dim=-1)
    groups = total * (length / (size * total.norm(dim=-1, keepdim=True)).clamp_min(1e-12))
    stays = choice.stays + num_prefix
    if sizes is None:
        before = tokens.new_ones(tokens.shape[0], num_prefix + choice.stays.shape[1], 1)
        sizes = torch.cat([before, size], dim=1)
    else:
        sizes = torch.cat([sizes[:, :num_prefix], take(sizes, stays), size], dim=1)
    return torch.cat([tokens[:, :num_prefix], take(tokens, stays), groups], dim=1), sizes


def places_after(choice: Choice, num_prefix: int) -> Tensor:
    """Where each token is found after a round, (batch, tokens), prefix tokens included."""
    batch, stays = choice.stays.shape
    device = choice.stays.device
    prefix, kept, others = (
        torch.arange(count, device=device).expand(batch, -1) for count in (num_prefix, stays, choice.others.shape[1])
    )
    after = torch.cat([kept, choice.into + stays, others + stays], dim=1)
    before = torch.cat([choice.stays, choice.joins, choice.others], dim=1)
    after = after.gather(1, before.topk(before.shape[1], largest=False).indices)  # undoes the order
    return torch.cat([prefix, after + num_prefix], dim=1)


def centres_after(choice: Choice, centres: Tensor, num_prefix: int) -> Tensor:
    """The token that stands for each group after a round, (batch, groups), prefix tokens included: that of B."""
    left = torch.cat([choice.stays, choice.others], dim=1) + num_prefix
    return torch.cat([centres[:, :num_prefix], centres.gather(1, left)], dim=1)


class MergeRound(nn.Module):
    """Merges r of the patch tokens, at most half of them.

    Args:
        count: Of patch tokens before it.
        merges: r.
        num_prefix: Tokens before the patch tokens, which never merge.
    """

    places: Tensor

    def __init__(self, count: int, merges: int, num_prefix: int) -> None:
        super().__init__()
        self.count, self.merges, self.num_prefix = count, merges, num_prefix
        self.register_buffer("places", torch.arange(count // 2)[:, None], persistent=False)

    def extra_repr(self) -> str:
        return f"{self.count} -> {self.count - self.merges} patch tokens"

    def forward(self, tokens: Tensor, sizes: Tensor | None, projection: Tensor) -> tuple[Tensor, Tensor, Choice]:
        with torch.no_grad():  # in float32, for near distances are differences of large numbers
            points = torch.matmul(tokens.float(), projection.float())[:, self.num_prefix :]
            points = points - points.mean(1, keepdim=True)  # distances stay, and lose less to rounding
            of_patches = None if sizes is None else sizes[:, self.num_prefix :].float()
            choice = choose(points, of_patches, self.count, self.merges)
        merged, new_sizes = merge_chosen(tokens, sizes, choice, self.num_prefix, self.places)
        return merged, new_sizes, choice


class MergeStep(nn.Module):
    """Merges tokens that enter a block, in as many rounds as it takes: one merges half of them at most.

    Args:
        projection: `P`, (width, rank).
        count: Of patch tokens before it.
        merges: How many merge.
        num_prefix: Tokens before the patch tokens, which never merge.
    """

    projection: Tensor

    def __init__(self, projection: Tensor, count: int, merges: int, num_prefix: int) -> None:
        super().__init__()
        self.num_prefix, self.merges = num_prefix, merges
        self.rounds = nn.ModuleList(MergeRound(left, r, num_prefix) for left, r in rounds(count, merges))
        self.register_buffer("projection", projection, persistent=False)

    def forward(self, tokens: Tensor, sizes: Tensor | None) -> tuple[Tensor, Tensor | None, list[Choice]]:
        """Tokens and sizes after the step, those of prefix tokens included, and what each round chose."""
        choices = []
        for part in self.rounds:
            tokens, sizes, choice = part(tokens, sizes, self.projection)
            choices.append(choice)
        return tokens, sizes, choices


def rounds(count: int, merges: int) -> list[tuple[int, int]]:
    """How many patch tokens each round of a step takes, and how many of them it merges."""
    result = []
    while merges:
        r = min(merges, count - count // 2 if count > 1 else 0)
        if not r:
            raise ValueError(f"expected a step that leaves a token, got one that merges {merges} more")
        result.append((count, r))
        count, merges = count - r, merges - r
    return result


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
            merged, sizes, choices = self.step(merged, sizes)
            for choice in choices:
                groups = places_after(choice, self.num_prefix).gather(1, groups)
                centres = centres_after(choice, centres, self.num_prefix)
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
        num_patches: Patch tokens of an image.
        num_prefix: As for `AdaptiveBlock`, like all that follow.
        size_weight: Part of the logarithm of sizes in attention.
        arguments_at_centres: Reduces the other arguments of a call of a block.
    """
    channel = Channel()
    result: dict[int, AdaptiveBlock] = {}
    for index, (block, r) in enumerate(zip(blocks, merges, strict=True)):
        if not r and not result:
            continue
        device = next(block.parameters()).device
        step = MergeStep(projections[index].to(device), num_patches, r, num_prefix) if r else None
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
