"""What stands between the blocks of a compressed model, as constant linear maps.

A compressed block reads groups `M Z` and leaves `Z' = R Y + C Z`, where `Y` is what the block made of the groups and
`C` is what a token keeps by itself: `I - R M` for `residual`, `1 - T` for `pinv` (Eq. 5-7). With `C = P E`, all that
has to be carried past the block are the rows `E Z`, the *remainder*. So the tokens themselves are never needed between
two blocks: a *table* of groups and remainder takes their place, and the way from one table to the next,

    [M'; E'] [R | P],

is one constant, sparse matrix: the *transition*. Walking backwards from what the head reads tells which of its rows
anything still depends on.

A block whose MLP runs on groups of its own is two such blocks, one after the other: what stands between its halves is
a table as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pmvit.prune_merge import PruneMerge, TokenMatrices

EXACT = 1e-6  # entries this near to a whole number differ by rounding errors of weights stored in float32
MOST = 0.97  # a block that computes a larger share of its tokens takes less time to compute all than to choose


class BlockMaps(NamedTuple):
    """The maps around one block, or around one half of it, for all tokens of an image (N), in float64.

    Attributes:
        merge: M (m x N), from the tokens to the groups the block runs on.
        remainder: E (e x N), from the tokens to what is carried past the block.
        from_groups: R (N x m), from what the block made of the groups to the tokens.
        from_remainder: P (N x e), from what was carried past it to the tokens.
    """

    merge: Tensor
    remainder: Tensor
    from_groups: Tensor
    from_remainder: Tensor


class Step(NamedTuple):
    """One block, or one half, in a chain of tables.

    Attributes:
        transition: From the table before to this one; more than one factor if the tokens themselves stand in between.
        num_tokens: The first rows of this table, on which the block runs.
        num_outputs: The first of these, for which anything depends on what the block makes of them.
        order: The group (of the block's plan) of each of the rows it runs on.
    """

    transition: tuple[Tensor, ...]
    num_tokens: int
    num_outputs: int
    order: Tensor


@dataclass(frozen=True)
class Chain:
    """All blocks of a model, and the map from the last table to the tokens the head reads."""

    steps: list[Step]
    to_head: tuple[Tensor, ...]


def identity_maps(num_tokens: int) -> BlockMaps:
    """The maps of a block that runs on every token."""
    identity = torch.eye(num_tokens, dtype=torch.float64)
    return BlockMaps(identity, identity[:0], identity, identity[:, :0])


def maps_of(matrices: TokenMatrices) -> BlockMaps:
    """The maps of a compressed block, or of M and R around a part of one, prefix tokens included."""
    prefix = torch.eye(matrices.num_prefix)
    merge = torch.block_diag(prefix, matrices.merge_matrix().detach().cpu().float()).double()
    back = torch.block_diag(prefix, matrices.reconstruct_matrix().detach().cpu().float()).double()
    if isinstance(matrices, PruneMerge) and matrices.reconstruct == "pinv":
        kept = torch.diag(1 - matrices.token_mask.cpu().double())
    else:
        kept = torch.eye(len(back), dtype=torch.float64) - back @ merge
    if matrices.learn == "dense":  # its groups may overlap: no row says anything about another
        is_carried = (kept.abs() >= EXACT).any(1)
        from_remainder, remainder = torch.eye(len(back), dtype=torch.float64)[:, is_carried], kept[is_carried]
    else:
        from_remainder, remainder = factor(kept, merge)
    return BlockMaps(merge, remainder, back, from_remainder)


def halves_of(block: BlockMaps, mlp: BlockMaps) -> tuple[BlockMaps, BlockMaps]:
    """The maps around the attention of a block and around its MLP.

    Args:
        block: From and to the tokens of the image, around the block.
        mlp: From and to the tokens of the block, around its MLP.
    """
    num_groups, num_carried = len(block.merge), len(block.remainder)
    table = torch.eye(num_groups + num_carried, dtype=torch.float64)
    past = torch.eye(num_carried, dtype=torch.float64)
    return (
        BlockMaps(block.merge, block.remainder, table[:, :num_groups], table[:, num_groups:]),
        BlockMaps(
            merge=torch.block_diag(mlp.merge, past[:0]),
            remainder=torch.block_diag(mlp.remainder, past),
            from_groups=block.from_groups @ mlp.from_groups,
            from_remainder=torch.cat([block.from_groups @ mlp.from_remainder, block.from_remainder], dim=1),
        ),
    )


def factor(kept: Tensor, merge: Tensor) -> tuple[Tensor, Tensor]:
    """Write what tokens of disjoint groups keep by themselves, `C`, as `P E` with few rows of `E` that change little.

    A pruned token is carried as it is. Of a group, the differences of its members to one of them are carried: they say
    all there is to say where the weights in M and R multiply to one, and two tokens that stay together in the next
    block have the same difference there, a copy. Otherwise that one token is carried too.
    """
    kept = _clean(kept)
    identity = torch.eye(len(kept), dtype=torch.float64)
    expand, remainder = [], []
    is_grouped = (merge != 0).any(0)
    for token in torch.nonzero((kept != 0).any(1) & ~is_grouped).flatten():
        expand.append(kept[:, token, None])
        remainder.append(identity[token, None])
    for weights in merge:
        members = torch.nonzero(weights).flatten()
        own = kept[members][:, members]
        if not own.any():
            continue
        centre = int(weights[members].abs().argmax())
        basis = torch.eye(len(members), dtype=torch.float64)
        basis[:, centre] -= 1.0
        basis = torch.cat([basis[:centre], basis[centre + 1 :]])
        if (own.sum(1).abs() > EXACT).any():  # differences alone do not span it
            basis = torch.cat([basis, torch.eye(len(members), dtype=torch.float64)[centre, None]])
        expand.append(_placed(own @ torch.linalg.pinv(basis), members, len(kept)))
        remainder.append(basis @ identity[members])
    if not expand:
        return identity[:, :0], identity[:0]
    return _clean(torch.cat(expand, dim=1)), torch.cat(remainder)


def _placed(rows: Tensor, members: Tensor, count: int) -> Tensor:
    """Rows of members among zeros for all others."""
    return rows.new_zeros(count, rows.shape[1]).index_copy(0, members, rows)


def chain(
    maps: Sequence[BlockMaps],
    read_by_head: Tensor,
    *,
    skip_outputs: Sequence[bool],
    is_mlp: Sequence[bool] | None = None,
    shortcut: bool = True,
    drop_dead: bool = True,
    fuse: bool = True,
) -> Chain:
    """Walk backwards through the blocks and keep what anything later depends on.

    Args:
        maps: Of each block, or of each half, first to last.
        read_by_head: The tokens that what comes after the blocks reads.
        skip_outputs: For each block, whether it can compute some of its tokens only and take them in another order.
        is_mlp: For each block, whether it is the MLP half of one: it then gets no tokens but those it computes.
        shortcut: The last block computes only what the head reads.
        drop_dead: The others compute only what something depends on, and nothing else is carried.
        fuse: Make one matrix of leaving a block and entering the next.
    """
    is_mlp = is_mlp or [False] * len(maps)
    first_of_last_block = len(maps) - (2 if is_mlp[-1] else 1)
    num_tokens = maps[-1].from_groups.shape[0]
    wanted = torch.eye(num_tokens, dtype=torch.float64)[read_by_head]  # from the tokens to the rows wanted of them
    after: list[tuple[Tensor, ...]] = []  # the transition behind each block, last to first
    blocks: list[tuple[int, int, Tensor]] = []
    for number in reversed(range(len(maps))):
        block = maps[number]
        num_groups = len(block.merge)
        skips = shortcut if number >= first_of_last_block else drop_dead
        leave = torch.cat([block.from_groups, block.from_remainder], dim=1)
        used = (_clean(wanted @ leave) != 0).any(0)
        is_output = used[:num_groups] | (not (skip_outputs[number] and skips))
        if is_mlp[number]:
            order = torch.nonzero(is_output).flatten()
        else:
            is_output |= is_output.double().mean() > MOST
            order = torch.cat([torch.nonzero(is_output).flatten(), torch.nonzero(~is_output).flatten()])
        num_outputs = int(is_output.sum())
        # What is carried past the last MLP would have to be computed by the attention before it.
        drops = drop_dead or (is_mlp[number] and skips)
        carried = torch.nonzero(used[num_groups:] | (not drops)).flatten()
        leave = leave[:, torch.cat([order[:num_outputs], num_groups + carried])]
        after.append((_clean(wanted @ leave),) if fuse else _two_factors(wanted, leave, drop_dead))
        blocks.append((len(order), num_outputs, order))
        wanted = torch.cat([block.merge[order], block.remainder[carried]])
    before = [(wanted,), *after[:0:-1]]
    steps = [Step(maps, *block) for maps, block in zip(before, reversed(blocks), strict=True)]
    return Chain(steps, after[0])


def _two_factors(enter: Tensor, leave: Tensor, drop_dead: bool) -> tuple[Tensor, ...]:
    """Leave a block and enter the next one by one, with the tokens that are read in between."""
    is_read = (enter != 0).any(0) if drop_dead else torch.ones(enter.shape[1], dtype=torch.bool)
    return _clean(leave[is_read]), _clean(enter[:, is_read])


def _clean(matrix: Tensor) -> Tensor:
    """Without what is a rounding error: a mean that is handed back to its members and taken again is a copy."""
    whole = matrix.round()
    return torch.where((matrix - whole).abs() < EXACT, whole, matrix)
