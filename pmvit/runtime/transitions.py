"""The way from one table of tokens to the next (see `maps`): a constant sparse matrix, in one of three forms."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from pmvit.config.inference import Form
from pmvit.prune_merge import SparseRows, segment_sum

MULTIPLY = 1 / 32  # what a multiply-add of a product costs, in moves of a number through memory
SEGMENT_ENTRY = 1 / 2  # what an entry of a segment sum costs, likewise


class Table:
    """Tokens a block runs on and rows carried past it, each of shape (batch, rows, width).

    In eager PyTorch both lie in one buffer, first all tokens of all images, then all carried rows, so that both parts
    are contiguous. A block that adds to its tokens in place leaves the buffer ready for the next transition; after
    other blocks the parts have to be put side by side again.
    """

    __slots__ = ("_buffer", "_carried", "tokens")

    def __init__(self, tokens: Tensor, carried: Tensor | None = None, buffer: Tensor | None = None) -> None:
        self.tokens = tokens
        self._carried = carried
        self._buffer = buffer

    @staticmethod
    def lying_in(buffer: Tensor, batch: int, num_tokens: int) -> "Table":
        """The table in a (rows, width) buffer."""
        tokens = buffer.narrow(0, 0, batch * num_tokens).view(batch, num_tokens, -1)
        return Table(tokens, None, buffer)

    @property
    def carried(self) -> Tensor | None:
        if self._buffer is None:
            return self._carried
        batch, num_tokens, width = self.tokens.shape
        rest = self._buffer[batch * num_tokens :]
        return rest.view(batch, -1, width) if len(rest) else None

    def after_block(self, outputs: Tensor) -> "Table":
        """The table with what a block made of its tokens."""
        return self if outputs is self.tokens else Table(outputs, self.carried)

    def rows(self) -> Tensor:
        """Tokens and carried rows of each image, one after the other: (batch, rows, width)."""
        carried = self.carried
        return self.tokens if carried is None else torch.cat([self.tokens, carried], dim=1)

    def buffer(self) -> Tensor:
        """All tokens of all images, then all carried rows: (rows, width)."""
        if self._buffer is not None:
            return self._buffer
        width = self.tokens.shape[-1]
        tokens = self.tokens.reshape(-1, width)
        return tokens if self._carried is None else torch.cat([tokens, self._carried.reshape(-1, width)])


class Transition(nn.Module, ABC):
    """A constant sparse matrix from one table to the next.

    Args:
        matrix: From the rows of the one table to those of the next.
        num_outputs: How many rows of the one table are tokens.
        num_tokens: How many rows of the next table are.
    """

    def __init__(self, matrix: Tensor, num_outputs: int, num_tokens: int) -> None:
        super().__init__()
        self.num_outputs = num_outputs
        self.num_tokens = num_tokens
        self.num_carried = len(matrix) - num_tokens

    def extra_repr(self) -> str:
        return f"{self.num_outputs} tokens -> {self.num_tokens} tokens + {self.num_carried} carried"

    @abstractmethod
    def forward(self, table: Table) -> Table:
        """The next table."""


class Matmul(Transition):
    """The matrix written out in full: best where it is small or most of it is filled."""

    matrix: Tensor

    def __init__(self, matrix: Tensor, num_outputs: int, num_tokens: int) -> None:
        super().__init__(matrix, num_outputs, num_tokens)
        self.register_buffer("matrix", matrix.float(), persistent=False)

    def forward(self, table: Table) -> Table:
        rows = table.rows()
        matrix = self.matrix.to(rows.dtype)
        tokens = torch.matmul(matrix[: self.num_tokens], rows)
        return Table(tokens, torch.matmul(matrix[self.num_tokens :], rows) if self.num_carried else None)


class Gather(Transition):
    """Rows that are copies are gathered; the others come from a product of the rows they mix.

    Tokens mix with their neighbours only, so that this product falls apart into many small ones. They are packed into a
    few chunks of one size, multiplied side by side.
    """

    mixed_rows: Tensor
    mixing: Tensor
    sources: Tensor

    def __init__(self, matrix: Tensor, num_outputs: int, num_tokens: int) -> None:
        super().__init__(matrix, num_outputs, num_tokens)
        matrix = matrix.float()
        copied = is_copy(matrix)
        chunks = pack(matrix, torch.nonzero(~copied).flatten().tolist())
        height, width = (max((len(chunk[side]) for chunk in chunks), default=0) for side in (0, 1))
        mixing = torch.zeros(len(chunks), height, width)
        mixed_rows = torch.zeros(len(chunks), width, dtype=torch.long)
        sources = matrix.argmax(1)
        for number, (rows, columns) in enumerate(chunks):
            mixing[number, : len(rows), : len(columns)] = matrix[rows][:, columns]
            mixed_rows[number, : len(columns)] = torch.tensor(columns)
            sources[rows] = matrix.shape[1] + number * height + torch.arange(len(rows))
        self.register_buffer("mixed_rows", mixed_rows.flatten(), persistent=False)
        self.register_buffer("mixing", mixing, persistent=False)
        self.register_buffer("sources", sources, persistent=False)

    def forward(self, table: Table) -> Table:
        rows = table.rows()
        if self.mixing.numel():
            read = rows.index_select(1, self.mixed_rows).unflatten(1, (len(self.mixing), -1))
            mixed = torch.matmul(self.mixing.to(rows.dtype), read).flatten(1, 2)
            rows = torch.cat([rows, mixed], dim=1)
        tokens = rows.index_select(1, self.sources[: self.num_tokens])
        return Table(tokens, rows.index_select(1, self.sources[self.num_tokens :]) if self.num_carried else None)


def is_copy(matrix: Tensor) -> Tensor:
    """Which rows of a matrix take one row as it is."""
    return ((matrix != 0).sum(1) == 1) & (matrix.sum(1) == 1)


Chunk = tuple[list[int], list[int]]


def pack(matrix: Tensor, rows: list[int]) -> list[Chunk]:
    """Sort rows of a sparse matrix into chunks that have no column in common: rows and columns of each.

    As many chunks as make the product cheapest when all are padded to the size of the largest.
    """
    parts: list[tuple[set[int], set[int]]] = []  # what hangs together
    for row in rows:
        columns = set(torch.nonzero(matrix[row]).flatten().tolist())
        touching = [part for part in parts if part[1] & columns]
        parts = [part for part in parts if not part[1] & columns]
        joined_rows, joined_columns = {row}, columns
        for part in touching:
            joined_rows, joined_columns = joined_rows | part[0], joined_columns | part[1]
        parts.append((joined_rows, joined_columns))
    parts.sort(key=lambda part: len(part[0]) * len(part[1]), reverse=True)
    best: list[Chunk] = []
    lowest = float("inf")
    for count in (1, 2, 3, 4, 6, 8):
        chunks: list[Chunk] = [([], []) for _ in range(count)]
        for part_rows, part_columns in parts:
            emptiest = min(chunks, key=lambda chunk: len(chunk[0]) + len(chunk[1]))
            emptiest[0].extend(sorted(part_rows))
            emptiest[1].extend(sorted(part_columns))
        chunks = [chunk for chunk in chunks if chunk[0]]
        if chunks and (cost := _chunks_cost(chunks)) < lowest:
            best, lowest = chunks, cost
    return best


def _chunks_cost(chunks: list[Chunk]) -> float:
    """Rows read and written by the product of chunks, and what it multiplies, in moves of a row."""
    height, width = max(len(rows) for rows, _ in chunks), max(len(columns) for _, columns in chunks)
    return len(chunks) * (height * width * MULTIPLY + height + width)


class Segment(Transition):
    """One weighted sum a row, all in one kernel (`segment_sum`): best in eager PyTorch."""

    columns: Tensor
    sizes: Tensor
    weights: Tensor

    def __init__(self, matrix: Tensor, num_outputs: int, num_tokens: int) -> None:
        super().__init__(matrix, num_outputs, num_tokens)
        matrix = matrix.float()
        rows, columns = torch.nonzero(matrix, as_tuple=True)
        self.width = matrix.shape[1]
        self.register_buffer("columns", columns, persistent=False)
        self.register_buffer("sizes", torch.bincount(rows, minlength=len(matrix)), persistent=False)
        self.register_buffer("weights", matrix[rows, columns], persistent=False)
        self._token_entries = int((rows < num_tokens).sum())
        self._made: tuple[object, SparseRows, Tensor] | None = None

    def forward(self, table: Table) -> Table:
        batch = table.tokens.shape[0]
        rows, weights = self._for_batch(batch, table.tokens)
        return Table.lying_in(segment_sum(table.buffer(), rows, weights), batch, self.num_tokens)

    def _for_batch(self, batch: int, table: Tensor) -> tuple[SparseRows, Tensor]:
        """Rows and weights for this batch size; those of the last one are kept."""
        if torch.compiler.is_compiling():
            return self._repeat(batch, table)
        made_for, made = (batch, table.dtype, table.device), self._made  # another thread may replace it
        if made is None or made[0] != made_for:
            with torch.inference_mode(False):
                self._made = made = (made_for, *self._repeat(batch, table))
        return made[1], made[2]

    def _repeat(self, batch: int, table: Tensor) -> tuple[SparseRows, Tensor]:
        image = torch.arange(batch, device=self.columns.device)[:, None]
        is_token = self.columns < self.num_outputs
        num_carried = self.width - self.num_outputs
        place = torch.where(is_token, self.columns, self.columns - self.num_outputs + batch * self.num_outputs)
        columns = place + image * torch.where(is_token, self.num_outputs, num_carried)
        weights = self.weights.to(table.dtype).expand(batch, -1)
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
    chunks = pack(matrix, torch.nonzero(~is_copy(matrix)).flatten().tolist())
    costs: dict[Form, float] = {
        "gather": 2 * width + (_chunks_cost(chunks) if chunks else 0) + rows,
        "matmul": width + width * rows * MULTIPLY + rows,
    }
    if in_eager:
        costs["segment"] = rows + int((matrix != 0).sum()) * SEGMENT_ENTRY
    return min(costs, key=lambda form: costs[form])


def transitions(
    matrices: Sequence[Tensor], num_outputs: int, num_tokens: int, form: Callable[[Tensor], type[Transition]]
) -> list[Transition]:
    """Modules for the factors of a transition, in the form that is chosen for each; none for an identity."""
    result: list[Transition] = []
    for place, matrix in enumerate(matrices):
        width = num_tokens if place == len(matrices) - 1 else len(matrix)
        is_identity = len(matrix) == matrix.shape[1] and torch.equal(matrix, torch.eye(len(matrix), dtype=matrix.dtype))
        if not (is_identity and width == num_outputs):
            result.append(form(matrix)(matrix, num_outputs, width))
        num_outputs = width
    return result
