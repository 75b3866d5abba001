"""The deployment passes for blocks that run on windows (Swin): see `maps` for the idea.

Between two blocks of a stage, a table of groups and remainder takes the place of the tokens here as well. Patch merging
and the head read every token, so that nothing is ever dead; and grids are large, so that matrices are kept sparse.
Rolling, padding and parting the grid, which the host does in every block, are part of the transitions.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pmvit.config.inference import Target
from pmvit.hosts import Host
from pmvit.hosts.host import TokenLayout
from pmvit.hosts.swin.blocks import WindowBlock
from pmvit.prune_merge import PruneMerge
from pmvit.runtime.chain import EXACT, factor
from pmvit.runtime.transitions import Segment, Table, Transition, is_copy, transitions


class Sparse(NamedTuple):
    """A matrix by its entries, in float64; those at one place add up."""

    rows: Tensor
    columns: Tensor
    values: Tensor
    shape: tuple[int, int]

    def dense(self) -> Tensor:
        """Written out, without what is a rounding error."""
        matrix = torch.zeros(self.shape, dtype=torch.float64)
        matrix.index_put_((self.rows, self.columns), self.values, accumulate=True)
        matrix[matrix.abs() < EXACT] = 0.0
        return matrix

    def times(self, other: "Sparse") -> "Sparse":
        """The product of two matrices."""
        order = torch.argsort(other.rows, stable=True)
        sizes = torch.bincount(other.rows, minlength=other.shape[0])
        meets = sizes[self.columns]  # how many entries of the other each of these meets
        ends = meets.cumsum(0)
        first = (sizes.cumsum(0) - sizes)[self.columns] - (ends - meets)
        met = order[torch.repeat_interleave(first, meets) + torch.arange(int(meets.sum()))]
        rows, values = (torch.repeat_interleave(part, meets) for part in (self.rows, self.values))
        return Sparse(rows, other.columns[met], values * other.values[met], (self.shape[0], other.shape[1]))


class SparseMaps(NamedTuple):
    """The maps around one block.

    Attributes:
        enter: From the tokens to groups and remainder.
        leave: From what the block made of the groups, and the remainder, to the tokens.
        num_groups: The first rows of the one and the first columns of the other.
    """

    enter: Sparse
    leave: Sparse
    num_groups: int


def sparse_maps(wrapper: PruneMerge) -> SparseMaps:
    """The maps of a compressed block with `learn="group"`."""
    count, num_groups = wrapper.token_mask.numel(), wrapper.centres.numel()
    merged, back = wrapper.merge_weights.detach().cpu().double(), wrapper.reconstruct_weights.detach().cpu().double()
    columns, offsets = wrapper.merge_columns.cpu(), wrapper.merge_offsets.cpu()
    sizes = torch.diff(offsets, append=torch.tensor([len(columns)]))
    rows = torch.repeat_interleave(torch.arange(num_groups), sizes)
    is_member = wrapper.token_mask.cpu() != 0
    back_of = torch.zeros(count, dtype=torch.float64)
    back_of[is_member] = back
    enter, leave = [(rows, columns, merged)], [(torch.nonzero(is_member).flatten(), wrapper.reconstruct_columns, back)]
    carried = num_groups
    for tokens, weights in _carrying(wrapper, columns.split(sizes.tolist()), merged.split(sizes.tolist()), back_of):
        own = torch.eye(len(tokens), dtype=torch.float64)
        if weights is not None:
            own -= back_of[tokens, None] * weights
        expand, remainder = factor(own, torch.zeros(0, len(tokens)).double() if weights is None else weights[None])
        place = carried + torch.arange(len(remainder))
        row, column = torch.nonzero(remainder, as_tuple=True)
        enter.append((place[row], tokens[column], remainder[row, column]))
        row, column = torch.nonzero(expand, as_tuple=True)
        leave.append((tokens[row], place[column], expand[row, column]))
        carried += len(remainder)
    return SparseMaps(_sparse(enter, carried, count), _sparse(leave, count, carried), num_groups)


def _carrying(
    wrapper: PruneMerge, members: Sequence[Tensor], weights: Sequence[Tensor], back_of: Tensor
) -> list[tuple[Tensor, Tensor | None]]:
    """The sets of tokens that keep something by themselves: groups with their weights, and all pruned tokens."""
    pruned = torch.nonzero(wrapper.token_mask.cpu() == 0).flatten()
    result: list[tuple[Tensor, Tensor | None]] = [(pruned, None)] if len(pruned) else []
    if wrapper.reconstruct == "residual":
        for tokens, own in zip(members, weights, strict=True):
            if len(tokens) > 1 or abs(float(back_of[tokens] * own) - 1) > EXACT:
                result.append((tokens, own))
    return result


def _sparse(entries: Sequence[tuple[Tensor, Tensor, Tensor]], height: int, width: int) -> Sparse:
    rows, columns, values = (torch.cat([part.cpu() for part in parts]) for parts in zip(*entries, strict=True))
    return Sparse(rows, columns, values, (height, width))


def _eye(count: int) -> SparseMaps:
    index = torch.arange(count)
    identity = Sparse(index, index, torch.ones(count, dtype=torch.float64), (count, count))
    return SparseMaps(identity, identity, count)


class Taps(Transition):
    """Copies are gathered; the other rows are weighted sums of gathered rows, as many at once as have about as many.

    For graphs: it is made of operations that every runtime has, and costs what a segment sum does.
    """

    sources: Tensor

    def __init__(self, matrix: Tensor, num_outputs: int, num_tokens: int) -> None:
        super().__init__(matrix, num_outputs, num_tokens)
        matrix = matrix.float()
        sizes = (matrix != 0).sum(1)
        sources = matrix.argmax(1)
        place = matrix.shape[1]
        self.sizes: list[int] = []
        size = 1
        left = ~is_copy(matrix)
        while left.any():
            rows = torch.nonzero(left & (sizes <= size)).flatten()
            left &= sizes > size
            if len(rows):
                columns = matrix[rows].abs().topk(min(size, matrix.shape[1]), dim=1).indices
                weights = matrix[rows[:, None], columns]
                self.register_buffer(f"columns{len(self.sizes)}", columns.flatten(), persistent=False)
                self.register_buffer(f"weights{len(self.sizes)}", weights[:, :, None], persistent=False)
                self.sizes.append(columns.shape[1])
                sources[rows] = place + torch.arange(len(rows))
                place += len(rows)
            size *= 2
        self.register_buffer("sources", sources, persistent=False)

    def forward(self, table: Table) -> Table:
        rows = table.rows()
        parts = [rows]
        for number, size in enumerate(self.sizes):
            columns, weights = self.get_buffer(f"columns{number}"), self.get_buffer(f"weights{number}")
            read = rows.index_select(1, columns).unflatten(1, (-1, size))
            parts.append((read * weights.to(rows.dtype)).sum(2))
        rows = torch.cat(parts, dim=1) if len(parts) > 1 else rows
        tokens = rows.index_select(1, self.sources[: self.num_tokens])
        return Table(tokens, rows.index_select(1, self.sources[self.num_tokens :]) if self.num_carried else None)


class WindowStage(nn.Module):
    """A transition and the block after it. The first of a stage takes tokens, the last returns them, in their grid if
    that is what the host does; what travels in between are tables.
    """

    def __init__(
        self,
        transition: list[Transition],
        block: nn.Module,
        to_grid: list[Transition] | None,
        grid: tuple[int, int] | None,
    ) -> None:
        super().__init__()
        self.transition = nn.ModuleList(transition)
        self.block = block
        self.to_grid = nn.ModuleList(to_grid) if to_grid is not None else None
        self.grid = grid

    def forward(self, state: Tensor | Table, *_: object, **__: object) -> Tensor | Table:
        table = state if isinstance(state, Table) else Table(state.flatten(1, -2))
        for transition in self.transition:
            table = transition(table)
        table = table.after_block(self.block(table.tokens))
        if self.to_grid is None:
            return table
        for transition in self.to_grid:
            table = transition(table)
        return table.tokens if self.grid is None else table.tokens.unflatten(1, self.grid)


def chain_windows(model: nn.Module, host: Host, target: Target, fuse: bool) -> None:
    """Replace the blocks of every stage of a model by a chain of tables, in place."""
    layouts = dict(zip(host.block_names(), host.layouts(), strict=True))
    form: type[Transition] = Segment if target == "eager" else Taps
    for names in host.reading().spans:
        before: SparseMaps | None = None
        for name in names:
            wrapper = wrapped(model.get_submodule(name), host, layouts[name])
            is_open = wrapper.learn == "group"
            maps = sparse_maps(wrapper) if is_open else _eye(layouts[name].num_tokens)
            transition = _between(before, maps, form, fuse)
            block: nn.Module = wrapper.block if is_open else wrapper
            if isinstance(wrapper.block, WindowBlock):
                is_own = is_open and bool(transition)
                wrapper.block.freeze(explicit=target == "onnx", inplace=is_own and target == "eager")
            is_last = name == names[-1]
            back = [form(maps.leave.dense(), maps.num_groups, maps.leave.shape[0])] if is_last else None
            stage = WindowStage(transition, block, back, layouts[name].grid if host.keeps_grid else None)
            host.answer_like(stage, wrapper)
            model.set_submodule(name, stage)
            before = maps


def wrapped(block: nn.Module, host: Host, layout: TokenLayout) -> PruneMerge:
    """The block as a compressed one; a block on all tokens takes them window by window."""
    if isinstance(block, PruneMerge):
        return block
    if layout.windows is None:
        raise TypeError("expected windows at every block of a model that has some")
    tokens = torch.argsort(layout.windows.places(layout.grid))
    wrapper = PruneMerge(block, torch.argsort(tokens), tokens, torch.ones(len(tokens)))
    host.fit(wrapper, layout)
    return wrapper.eval().requires_grad_(False)


def _between(before: SparseMaps | None, after: SparseMaps, form: type[Transition], fuse: bool) -> list[Transition]:
    """The modules from one table, or from the tokens, to the next."""
    if before is None:
        matrices, num_outputs = [after.enter], after.enter.shape[1]
    else:
        num_outputs = before.num_groups
        matrices = [after.enter.times(before.leave)] if fuse else [before.leave, after.enter]
    return transitions([sparse.dense() for sparse in matrices], num_outputs, after.num_groups, lambda _: form)
