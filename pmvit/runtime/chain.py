"""What stands between the blocks of a compressed model, as constant linear maps.

A compressed block reads groups `M Z` and leaves `Z' = R Y + C Z`, where `Y` is what the block made of the groups and
`C` is what a token keeps by itself: `I - R M` for `residual`, `1 - T` for `pinv` (Eq. 5-7). With `C = P E`, all that
has to be carried past the block are the rows `E Z`, the *remainder*. So the tokens themselves are never needed between
two blocks: groups and remainder take their place, and the way to those of the next block,

    [M'; E'] [R | P],

is one constant, sparse matrix: the *transition*. Walking backwards from what the head reads tells which of its rows
anything still depends on.

A block whose MLP runs on groups of its own is two such blocks, one after the other: what stands between its halves are
groups and remainder as well. Blocks on windows (Swin) are the same to all this: rolling, padding and parting the grid
are part of the order of their groups.

Grids can be large and every map is local, so all matrices are sparse (COO, float64).
"""

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pmvit.config import InferenceConfig
from pmvit.prune_merge import PruneMerge, TokenMatrices

EXACT = 1e-6  # entries this near to a whole number differ by rounding errors of weights stored in float32
MOST = 0.97  # a block that computes a larger share of its tokens takes less time to compute all than to choose


class BlockMaps(NamedTuple):
    """The maps around one block, or around one half of it, for all tokens of an image."""

    enter: Tensor  # [M; E], from the tokens to the groups the block runs on and what is carried past it
    leave: Tensor  # [R | P], from what the block made of the groups and what was carried past it to the tokens
    num_groups: int  # how many rows of the one, and columns of the other, are groups
    skips_outputs: bool = False  # the block can compute some of its tokens only and take them in another order
    is_mlp: bool = False  # it is the MLP half of a block, which gets no tokens but those it computes


class ChainedBlock(NamedTuple):
    """One block, or one half, in a chain.

    The transition leads from the rows before (groups and remainder, or the tokens of the model) to those of this block;
    it has more than one factor if the tokens themselves stand in between.
    """

    transition: tuple[Tensor, ...]
    order: Tensor  # the group (of the block's plan) of each of the first of these rows, on which the block runs
    num_outputs: int  # the first of these, for which anything depends on what the block makes of them


def identity(count: int) -> Tensor:
    """The identity matrix, sparse."""
    return _sparse(torch.arange(count).expand(2, -1), torch.ones(count), (count, count))


def identity_maps(num_tokens: int) -> BlockMaps:
    """The maps of a block that runs on every token."""
    return BlockMaps(identity(num_tokens), identity(num_tokens), num_tokens)


def maps_of(matrices: TokenMatrices) -> BlockMaps:
    """The maps of a compressed block, or of M and R around a part of one, prefix tokens included."""
    merge, back = (
        _block_diagonal(identity(matrices.num_prefix), matrix.detach().cpu().double().to_sparse())
        for matrix in (matrices.merge_matrix(), matrices.reconstruct_matrix())
    )
    if isinstance(matrices, PruneMerge) and matrices.reconstruct == "pinv":
        pruned = torch.nonzero(matrices.token_mask.cpu() == 0).flatten()
        kept = _sparse(pruned.expand(2, -1), torch.ones(len(pruned)), (back.shape[0], back.shape[0]))
    else:
        kept = cleaned(identity(back.shape[0]) - _times(back, merge))
    expand, remainder = factor(kept, merge)
    return BlockMaps(torch.cat([merge, remainder]), torch.cat([back, expand], dim=1), merge.shape[0])


def factor(kept: Tensor, merge: Tensor) -> tuple[Tensor, Tensor]:
    """Write what tokens keep by themselves, `C`, as `P E` with few rows of `E` that change little.

    A pruned token is carried as it is. Of a group, the differences of its members to one of them are carried: they say
    all there is to say where the weights in M and R multiply to one, and two tokens that stay together in the next
    block have the same difference there, a copy. Otherwise that one token is carried too.
    """
    group, token = merge.indices()
    centres = merge.to_dense().abs().argmax(1)
    centre_of = torch.arange(len(kept))
    centre_of[token] = centres[group]
    centre_of[centres] = centres
    others = torch.nonzero(centre_of != torch.arange(len(kept))).flatten()
    to_centre = _sparse(torch.stack([others, centre_of[others]]), torch.ones(len(others)), kept.shape)
    # `1 - to_centre` takes the differences and `1 + to_centre` undoes it, for no centre has another.
    expand = cleaned(kept + _times(kept, to_centre))
    needed = expand.indices()[1].unique()
    return expand.index_select(1, needed), (identity(len(kept)) - to_centre).index_select(0, needed)


def halves_of(block: BlockMaps, mlp: BlockMaps) -> tuple[BlockMaps, BlockMaps]:
    """The maps around the attention of a block, from the tokens of the image, and around its MLP, from the block's."""
    num_rows = block.enter.shape[0]
    past = identity(num_rows - block.num_groups)
    leave = _times(block.leave, _block_diagonal(mlp.leave, past))
    return (
        block._replace(leave=identity(num_rows)),
        BlockMaps(_block_diagonal(mlp.enter, past), leave, mlp.num_groups, block.skips_outputs, is_mlp=True),
    )


def chain(
    maps: Sequence[BlockMaps], num_read: int, config: InferenceConfig
) -> tuple[list[ChainedBlock], tuple[Tensor, ...]]:
    """Walk backwards through the blocks, or halves, and keep what anything later depends on.

    With `shortcut`, the last block computes only what is read; with `drop_dead`, the others compute only what something
    depends on, and nothing else is carried; with `fuse`, leaving a block and entering the next is one matrix.

    Returns:
        All blocks, and the map from what the last one leaves to the first `num_read` tokens, which are read after it.
    """
    first_of_last_block = len(maps) - (2 if maps[-1].is_mlp else 1)
    wanted = identity(maps[-1].leave.shape[0]).index_select(0, torch.arange(num_read))  # tokens to the rows wanted
    after: list[tuple[Tensor, ...]] = []  # the transition behind each block, last to first
    blocks: list[tuple[Tensor, int]] = []
    for number, (enter, leave, num_groups, skips_outputs, is_mlp) in reversed(list(enumerate(maps))):
        skips = config.shortcut if number >= first_of_last_block else config.drop_dead
        fused = cleaned(_times(wanted, leave))
        used = torch.zeros(leave.shape[1], dtype=torch.bool).index_fill(0, fused.indices()[1], True)
        is_output = used[:num_groups] | (not (skips_outputs and skips))
        if not is_mlp:
            is_output |= is_output.double().mean() > MOST
        outputs, others = (torch.nonzero(which).flatten() for which in (is_output, ~is_output))
        order = outputs if is_mlp else torch.cat([outputs, others])
        # What is carried past the last MLP would have to be computed by the attention before it.
        drops = config.drop_dead or (is_mlp and skips)
        carried = num_groups + torch.nonzero(used[num_groups:] | (not drops)).flatten()
        left = torch.cat([outputs, carried])
        if config.fuse:
            after.append((fused.index_select(1, left).coalesce(),))
        else:  # one by one, with the tokens that are read in between
            wanted = cleaned(wanted)
            read = wanted.indices()[1].unique() if config.drop_dead else torch.arange(wanted.shape[1])
            leaving = cleaned(leave.index_select(0, read).index_select(1, left))
            after.append((leaving, wanted.index_select(1, read).coalesce()))
        blocks.append((order, len(outputs)))
        wanted = enter.index_select(0, torch.cat([order, carried]))
    before = [(cleaned(wanted),), *after[:0:-1]]
    return [ChainedBlock(t, *block) for t, block in zip(before, reversed(blocks), strict=True)], after[0]


def cleaned(matrix: Tensor) -> Tensor:
    """Without what is a rounding error: a mean that is handed back to its members and taken again is a copy."""
    matrix = matrix.coalesce()
    values, whole = matrix.values(), matrix.values().round()
    values = torch.where((values - whole).abs() < EXACT, whole, values)
    return _sparse(matrix.indices()[:, values != 0], values[values != 0], matrix.shape)


def _times(first: Tensor, second: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # inside, PyTorch takes a format that it calls beta
        product: Tensor = torch.sparse.mm(first, second)
    return product


def _block_diagonal(first: Tensor, second: Tensor) -> Tensor:
    first, second = first.coalesce(), second.coalesce()
    indices = torch.cat([first.indices(), second.indices() + torch.tensor(first.shape)[:, None]], dim=1)
    shape = (first.shape[0] + second.shape[0], first.shape[1] + second.shape[1])
    return _sparse(indices, torch.cat([first.values(), second.values()]), shape)


def _sparse(indices: Tensor, values: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.sparse_coo_tensor(indices, values.double(), shape, check_invariants=False).coalesce()
