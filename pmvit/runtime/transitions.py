"""The way from the rows of one block to those of the next (see `chain`): a constant sparse matrix, in three forms.

`Segment` is for eager PyTorch, `Gather` for graphs, `Matmul` for matrices that are small or mostly filled.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from pmvit.config.inference import Form
from pmvit.prune_merge import LastMade, SparseRows, is_recorded, segment_sum

MULTIPLY = 1 / 32  # what a multiply-add of a product costs, in moves of a number through memory
SEGMENT_ENTRY = 1 / 2  # what an entry of a segment sum costs, likewise
GATHER_ENTRY = 3  # and one of a gathered sum: it is read and written, weighted, added up


class TokenBuffer:
    """The tokens a block runs on and the rows carried past it, each of shape (batch, rows, width).

    In eager PyTorch both lie in one buffer, first all tokens of all images, then all carried rows, so that both parts
    are contiguous. A block that adds to its tokens in place leaves the buffer ready for the next transition; after
    other blocks the parts have to be put side by side again.
    """

    __slots__ = ("_buffer", "carried", "tokens")

    def __init__(self, tokens: Tensor, carried: Tensor | None = None, buffer: Tensor | None = None) -> None:
        self.tokens = tokens
        self.carried = carried
        self._buffer = buffer

    def after_block(self, outputs: Tensor) -> "TokenBuffer":
        """With what a block made of its tokens."""
        return self if outputs is self.tokens else TokenBuffer(outputs, self.carried)

    def rows(self) -> Tensor:
        """Tokens and carried rows of each image, one after the other: (batch, rows, width)."""
        return self.tokens if self.carried is None else torch.cat([self.tokens, self.carried], dim=1)

    def all_rows(self) -> Tensor:
        """All tokens of all images, then all carried rows: (rows, width)."""
        if self._buffer is not None:
            return self._buffer
        width = self.tokens.shape[-1]
        tokens = self.tokens.reshape(-1, width)
        return tokens if self.carried is None else torch.cat([tokens, self.carried.reshape(-1, width)])


class Transition(nn.Module, ABC):
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

    @abstractmethod
    def forward(self, buffer: TokenBuffer) -> TokenBuffer:
        """The rows of the next block."""


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
        (row_of_entry, column_of_entry), values = matrix.indices(), matrix.values().float()
        entries = torch.bincount(row_of_entry, minlength=matrix.shape[0])
        firsts = entries.cumsum(0) - entries
        slot = torch.arange(len(values)) - firsts[row_of_entry]
        sources = torch.zeros(matrix.shape[0], dtype=torch.long)
        copied = is_copy(matrix)
        sources[copied] = column_of_entry[firsts[copied]]
        num_rows = matrix.shape[1]
        self.slots: list[int] = []
        slots = summed_slots(matrix)
        for size in slots[slots > 0].unique().tolist():
            rows = torch.nonzero(slots == size).flatten()
            sources[rows] = num_rows + torch.arange(len(rows))
            here = slots[row_of_entry] == size
            place = (sources[row_of_entry[here]] - num_rows, slot[here])
            num_rows += len(rows)
            columns = torch.zeros(len(rows), size, dtype=torch.long)
            columns[place] = column_of_entry[here]
            weights = torch.zeros(len(rows), size)
            weights[place] = values[here]
            self.register_buffer(f"columns{len(self.slots)}", columns.flatten(), persistent=False)
            self.register_buffer(f"weights{len(self.slots)}", weights[:, :, None], persistent=False)
            self.slots.append(size)
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
        if not self.num_carried:
            return TokenBuffer(tokens, None, result)
        return TokenBuffer(tokens, result[batch * self.num_tokens :].view(batch, self.num_carried, width), result)

    def _repeat(self, batch: int, dtype: torch.dtype) -> tuple[SparseRows, Tensor]:
        """Rows and weights for a batch whose tokens come first, and then what is carried."""
        image = torch.arange(batch, device=self.columns.device)[:, None]
        is_token = self.columns < self.num_outputs
        num_carried = self.num_inputs - self.num_outputs
        first = torch.where(is_token, self.columns, self.columns - self.num_outputs + batch * self.num_outputs)
        columns = first + image * torch.where(is_token, self.num_outputs, num_carried)
        weights = self.weights.to(dtype).expand(batch, -1)
        sizes = torch.cat([part.repeat(batch) for part in self.sizes.tensor_split([self.num_tokens])])
        columns, weights = (
            torch.cat([part.flatten() for part in both.tensor_split([self._token_entries], dim=1)])
            for both in (columns, weights)
        )
        return SparseRows(columns, torch.cumsum(sizes, 0) - sizes), weights


FORMS: dict[Form, type[Transition]] = {"segment": Segment, "gather": Gather, "matmul": Matmul}


def cheapest_form(matrix: Tensor, in_eager: bool) -> Form:
    """The form in which a transition costs least, by counting what each moves and multiplies."""
    rows, width = matrix.shape
    slots = summed_slots(matrix)
    costs: dict[Form, float] = {
        "gather": 2 * width + int(slots.sum()) * GATHER_ENTRY + rows,
        "matmul": width + width * rows * MULTIPLY + rows,
    }
    if in_eager:
        costs["segment"] = rows + matrix._nnz() * SEGMENT_ENTRY
    return min(costs, key=lambda form: costs[form])


def transitions(
    matrices: Sequence[Tensor], num_outputs: int, num_tokens: int, form: Callable[[Tensor], type[Transition]]
) -> list[Transition]:
    """Modules for the factors of a transition, in the form that is chosen for each; none for an identity."""
    result: list[Transition] = []
    for place, matrix in enumerate(matrices):
        height = num_tokens if place == len(matrices) - 1 else matrix.shape[0]
        rows, columns = matrix.indices()
        is_square = matrix.shape[0] == matrix.shape[1] == len(rows)
        is_identity = is_square and torch.equal(rows, columns) and bool((matrix.values() == 1).all())
        if not (is_identity and height == num_outputs):
            result.append(form(matrix)(matrix, num_outputs, height))
        num_outputs = height
    return result
