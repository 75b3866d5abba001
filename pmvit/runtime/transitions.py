"""Modules that run a chain (see `chain`): transitions, in three forms, and the blocks between them.

`Segment` is for eager PyTorch, `Gather` for graphs, `Matmul` for matrices that are small or mostly filled.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from pmvit.config import InferenceConfig
from pmvit.config.inference import Form
from pmvit.prune_merge import LastMade, PruneMerge, SparseRows, is_recorded, segment_sum

MULTIPLY = 1 / 32  # what a multiply-add of a product costs, in moves of a number through memory
SEGMENT_ENTRY = 1 / 2  # what an entry of a segment sum costs, likewise
GATHER_ENTRY = 3  # and one of a gathered sum: it is read and written, weighted, added up


@dataclass(slots=True, eq=False)
class TokenBuffer:
    """The tokens a block runs on and the rows carried past it, each of shape (batch, rows, width).

    In eager PyTorch both lie in one buffer, first all tokens of all images, then all carried rows, so that both parts
    are contiguous. A block that adds to its tokens in place leaves the buffer ready for the next transition; after
    other blocks the parts have to be put side by side again.
    """

    tokens: Tensor
    carried: Tensor | None = None
    buffer: Tensor | None = None

    def after_block(self, outputs: Tensor) -> "TokenBuffer":
        """With what a block made of its tokens."""
        return self if outputs is self.tokens else TokenBuffer(outputs, self.carried)

    def rows(self) -> Tensor:
        """Tokens and carried rows of each image, one after the other: (batch, rows, width)."""
        return self.tokens if self.carried is None else torch.cat([self.tokens, self.carried], dim=1)

    def all_rows(self) -> Tensor:
        """All tokens of all images, then all carried rows: (rows, width)."""
        if self.buffer is not None:
            return self.buffer
        width = self.tokens.shape[-1]
        tokens = self.tokens.reshape(-1, width)
        return tokens if self.carried is None else torch.cat([tokens, self.carried.reshape(-1, width)])


class Transition(nn.Module):
    """A constant sparse matrix from the rows of one block to those of the next.

    Args:
        matrix: Sparse (COO, coalesced).
        num_outputs: How many of the rows that come are tokens.
        num_tokens: How many of the rows that go are.
    """

    def __init__(self, matrix: Tensor, num_outputs: int, num_tokens: int) -> None:
        super().__init__()
        self.num_outputs = num_outputs
        self.num_tokens = num_tokens
        self.num_carried = matrix.shape[0] - num_tokens

    def extra_repr(self) -> str:
        return f"{self.num_outputs} tokens -> {self.num_tokens} tokens + {self.num_carried} carried"


class Matmul(Transition):
    """The matrix written out in full: best where it is small or most of it is filled."""

    matrix: Tensor

    def __init__(self, matrix: Tensor, num_outputs: int, num_tokens: int) -> None:
        super().__init__(matrix, num_outputs, num_tokens)
        self.register_buffer("matrix", matrix.to_dense().float(), persistent=False)

    def forward(self, buffer: TokenBuffer) -> TokenBuffer:
        rows = buffer.rows()
        matrix = self.matrix.to(rows.dtype)
        tokens = torch.matmul(matrix[: self.num_tokens], rows)
        return TokenBuffer(tokens, torch.matmul(matrix[self.num_tokens :], rows) if self.num_carried else None)


class Gather(Transition):
    """Rows that are copies are gathered; the others are weighted sums of gathered rows, as many at once as have about
    as many entries. Best in graphs: it is made of operations that every runtime has.
    """

    sources: Tensor

    def __init__(self, matrix: Tensor, num_outputs: int, num_tokens: int) -> None:
        super().__init__(matrix, num_outputs, num_tokens)
        dense, slots = matrix.float().to_dense(), summed_slots(matrix)
        sources, num_rows = dense.argmax(1), matrix.shape[1]
        self.slots: list[int] = []
        for size in slots[slots > 0].unique().tolist():
            rows = torch.nonzero(slots == size).flatten()
            columns = dense[rows].abs().topk(min(size, dense.shape[1])).indices.sort().values
            weights = dense[rows].gather(1, columns)[:, :, None]
            sources[rows] = num_rows + torch.arange(len(rows))
            num_rows += len(rows)
            self.register_buffer(f"columns{len(self.slots)}", columns.flatten(), persistent=False)
            self.register_buffer(f"weights{len(self.slots)}", weights, persistent=False)
            self.slots.append(columns.shape[1])
        self.register_buffer("sources", sources, persistent=False)

    def forward(self, buffer: TokenBuffer) -> TokenBuffer:
        rows = buffer.rows()
        parts = [rows]
        for number, size in enumerate(self.slots):
            columns, weights = self.get_buffer(f"columns{number}"), self.get_buffer(f"weights{number}")
            read = rows.index_select(1, columns).unflatten(1, (-1, size))
            parts.append((read * weights.to(rows.dtype)).sum(2))
        rows = torch.cat(parts, dim=1) if len(parts) > 1 else rows
        tokens = rows.index_select(1, self.sources[: self.num_tokens])
        return TokenBuffer(tokens, rows.index_select(1, self.sources[self.num_tokens :]) if self.num_carried else None)


def is_copy(matrix: Tensor) -> Tensor:
    """Which rows of a sparse matrix take one row as it is."""
    rows = matrix.indices()[0]
    others = torch.bincount(rows[matrix.values() != 1], minlength=matrix.shape[0])
    return (torch.bincount(rows, minlength=matrix.shape[0]) == 1) & (others == 0)


def summed_slots(matrix: Tensor) -> Tensor:
    """How many rows `Gather` adds up for each row of a sparse matrix, a power of two; 0 for a copy."""
    entries = torch.bincount(matrix.indices()[0], minlength=matrix.shape[0]).clamp(min=1)
    return torch.where(is_copy(matrix), 0, 2 ** entries.log2().ceil().long())


class Segment(Transition):
    """One weighted sum a row, all in one kernel (`segment_sum`): best in eager PyTorch."""

    columns: Tensor
    sizes: Tensor
    weights: Tensor

    def __init__(self, matrix: Tensor, num_outputs: int, num_tokens: int) -> None:
        super().__init__(matrix, num_outputs, num_tokens)
        rows, columns = matrix.indices()
        self.num_inputs = matrix.shape[1]
        self.register_buffer("columns", columns, persistent=False)
        self.register_buffer("sizes", torch.bincount(rows, minlength=matrix.shape[0]), persistent=False)
        self.register_buffer("weights", matrix.values().float(), persistent=False)
        self._token_entries = int((rows < num_tokens).sum())
        self._repeated = LastMade[tuple[SparseRows, Tensor]]()

    def forward(self, buffer: TokenBuffer) -> TokenBuffer:
        batch, _, width = buffer.tokens.shape
        if is_recorded(buffer.tokens):
            rows, weights = self._repeat(batch, buffer.tokens.dtype)
        else:
            made_for = (batch, buffer.tokens.dtype, buffer.tokens.device)
            rows, weights = self._repeated.get(made_for, lambda: self._repeat(batch, buffer.tokens.dtype))
        result = segment_sum(buffer.all_rows(), rows, weights)
        tokens = result[: batch * self.num_tokens].view(batch, self.num_tokens, width)
        carried = result[batch * self.num_tokens :].view(batch, self.num_carried, width) if self.num_carried else None
        return TokenBuffer(tokens, carried, result)

    def _repeat(self, batch: int, dtype: torch.dtype) -> tuple[SparseRows, Tensor]:
        """Rows and weights for a batch whose tokens come first, and then what is carried."""
        image = torch.arange(batch, device=self.columns.device)[:, None]
        is_token = self.columns < self.num_outputs
        first = torch.where(is_token, self.columns, self.columns + (batch - 1) * self.num_outputs)
        columns = first + image * torch.where(is_token, self.num_outputs, self.num_inputs - self.num_outputs)
        weights = self.weights.to(dtype).expand(batch, -1)
        sizes = torch.cat([part.repeat(batch) for part in self.sizes.tensor_split([self.num_tokens])])
        columns, weights = (
            torch.cat([part.flatten() for part in both.tensor_split([self._token_entries], dim=1)])
            for both in (columns, weights)
        )
        return SparseRows(columns, torch.cumsum(sizes, 0) - sizes), weights


FORMS: dict[Form, type[Transition]] = {"segment": Segment, "gather": Gather, "matmul": Matmul}


def form_of(matrix: Tensor, config: InferenceConfig) -> type[Transition]:
    """The form asked for, or that in which a transition costs least, by counting what each moves and multiplies."""
    if config.form != "auto":
        return FORMS[config.form]
    rows, width = matrix.shape
    costs: dict[type[Transition], float] = {
        Gather: 2 * width + int(summed_slots(matrix).sum()) * GATHER_ENTRY + rows,
        Matmul: width + width * rows * MULTIPLY + rows,
    }
    if config.target == "eager":
        costs[Segment] = rows + matrix._nnz() * SEGMENT_ENTRY
    return min(costs, key=lambda form: costs[form])


def transitions(
    matrices: Sequence[Tensor], num_outputs: int, num_tokens: int, config: InferenceConfig
) -> list[Transition]:
    """Modules for the factors of a transition, each in its form; none for an identity."""
    result: list[Transition] = []
    for place, matrix in enumerate(matrices):
        height = num_tokens if place == len(matrices) - 1 else matrix.shape[0]
        is_identity = is_copy(matrix).all() and torch.equal(matrix.indices()[1], torch.arange(matrix.shape[1]))
        if not (is_identity and height == num_outputs):
            result.append(form_of(matrix, config)(matrix, num_outputs, height))
        num_outputs = height
    return result


class Stage(nn.Module):
    """A transition and the block after it, or its attention, and then another and its MLP if that runs on other tokens.

    The first stage takes tokens. What travels in between are groups and remainder, a `TokenBuffer`. The last has a
    transition `to_head` and returns tokens, in the rows and columns of a `grid` if the host expects them so.
    """

    def __init__(
        self,
        num_inputs: int,
        transition: list[Transition],
        block: nn.Module,
        to_head: list[Transition] | None = None,
        mlp: tuple[list[Transition], nn.Module] | None = None,
        grid: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__()
        self.num_inputs = num_inputs
        self.transition = nn.ModuleList(transition)
        self.block = block
        self.to_head = nn.ModuleList(to_head) if to_head is not None else None
        self.halfway = nn.ModuleList(mlp[0]) if mlp is not None else None
        self.mlp = mlp[1] if mlp is not None else None
        self.grid = grid

    def forward(
        self, given: Tensor | TokenBuffer, *positional: object, **arguments: object
    ) -> Tensor | TokenBuffer | tuple[Any, ...]:
        buffer = given if isinstance(given, TokenBuffer) else TokenBuffer(given.flatten(1, -2))
        if buffer.tokens.shape[1] != self.num_inputs:
            raise ValueError(
                f"expected {self.num_inputs} tokens, got {buffer.tokens.shape[1]}: a model that is optimised for "
                "inference is for one image size: bring the images to that size"
            )
        for transition in self.transition:
            buffer = transition(buffer)
        output = self.block(buffer.tokens, *positional, **arguments)
        tokens, *others = output if isinstance(output, tuple) else (output,)
        buffer = buffer.after_block(tokens)
        if self.halfway is not None and self.mlp is not None:
            for transition in self.halfway:
                buffer = transition(buffer)
            buffer = buffer.after_block(self.mlp(buffer.tokens))
        result: Tensor | TokenBuffer = buffer
        if self.to_head is not None:
            for transition in self.to_head:
                buffer = transition(buffer)
            result = buffer.tokens if self.grid is None else buffer.tokens.unflatten(1, self.grid)
        return (result, *others) if isinstance(output, tuple) else result


class OnGroups(nn.Module):
    """A compressed block without its merging and reconstructing: groups in, groups out."""

    def __init__(self, wrapper: PruneMerge) -> None:
        super().__init__()
        self.wrapper = wrapper

    def forward(self, groups: Tensor, *positional: object, **arguments: object) -> Tensor:
        return cast(Tensor, self.wrapper.block(groups, **self.wrapper.block_arguments(positional, arguments)))


class PartWithTransition(nn.Module):
    """A part of a host's block with a transition of its tokens before or after it.

    Tokens in a grid are put one after the other before it, and into so many `rows` again after it.
    """

    def __init__(
        self,
        part: nn.Module,
        before: Transition | None = None,
        after: Transition | None = None,
        rows: int | None = None,
    ) -> None:
        super().__init__()
        self.part = part
        self.rows = rows
        self.before = before
        self.after = after

    def forward(self, tokens: Tensor, *positional: object, **arguments: object) -> Tensor:
        if self.before is not None:
            tokens = self.before(TokenBuffer(tokens.flatten(1, -2))).tokens
        tokens = self.part(tokens, *positional, **arguments)
        if self.after is not None:
            tokens = cast(TokenBuffer, self.after(TokenBuffer(tokens))).tokens
        return tokens if self.rows is None else tokens.unflatten(1, (self.rows, -1))
