"""Modules that run a chain of tables (see `maps`): hand-overs in three forms, and the blocks between them."""

from abc import ABC, abstractmethod
from typing import Literal, cast

import torch
from torch import Tensor, nn

from pmvit.prune_merge import PruneMerge, SparseRows, segment_sum

Form = Literal["segment", "gather", "matmul"]
MULTIPLY = 1 / 32  # what a multiply-add of a product costs, in moves of a number through memory
SEGMENT_ENTRY = 1 / 2  # what an entry of a segment sum costs, likewise


class HandOver(nn.Module, ABC):
    """A constant sparse matrix from one table to the next; its input and output each come in two parts.

    A table is the tokens a block leaves and what is carried past it, each of shape (batch, rows, width).

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
    def forward(self, outputs: Tensor, carried: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The tokens and the carried rows of the next table."""


def _table(outputs: Tensor, carried: Tensor | None) -> Tensor:
    return outputs if carried is None else torch.cat([outputs, carried], dim=1)


class Matmul(HandOver):
    """The matrix written out in full: best where it is small or most of it is filled."""

    matrix: Tensor

    def __init__(self, matrix: Tensor, num_outputs: int, num_tokens: int) -> None:
        super().__init__(matrix, num_outputs, num_tokens)
        self.register_buffer("matrix", matrix.float(), persistent=False)

    def forward(self, outputs: Tensor, carried: Tensor | None) -> tuple[Tensor, Tensor | None]:
        table = _table(outputs, carried)
        matrix = self.matrix.to(table.dtype)
        tokens = torch.matmul(matrix[: self.num_tokens], table)
        return tokens, torch.matmul(matrix[self.num_tokens :], table) if self.num_carried else None


class Gather(HandOver):
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
        is_copy = _is_copy(matrix)
        chunks = pack(matrix, torch.nonzero(~is_copy).flatten().tolist())
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

    def forward(self, outputs: Tensor, carried: Tensor | None) -> tuple[Tensor, Tensor | None]:
        table = _table(outputs, carried)
        if self.mixing.numel():
            read = table.index_select(1, self.mixed_rows).unflatten(1, (len(self.mixing), -1))
            mixed = torch.matmul(self.mixing.to(table.dtype), read).flatten(1, 2)
            table = torch.cat([table, mixed], dim=1)
        tokens = table.index_select(1, self.sources[: self.num_tokens])
        return tokens, table.index_select(1, self.sources[self.num_tokens :]) if self.num_carried else None


def _is_copy(matrix: Tensor) -> Tensor:
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


class Segment(HandOver):
    """One weighted sum a row, all in one kernel (`segment_sum`): best in eager PyTorch.

    Tokens and carried rows of all images lie in one buffer, first all tokens, then all carried rows, so that both
    parts are contiguous. A block that adds to its tokens in place leaves the buffer ready for the next hand-over;
    other blocks cost a copy.
    """

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

    def forward(self, outputs: Tensor, carried: Tensor | None) -> tuple[Tensor, Tensor | None]:
        batch, _, width = outputs.shape
        rows, weights = self._for_batch(batch, outputs)
        result = segment_sum(_buffer(outputs, carried), rows, weights)
        split = batch * self.num_tokens
        tokens = result[:split].view(batch, -1, width)
        return tokens, result[split:].view(batch, -1, width) if self.num_carried else None

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


def _buffer(outputs: Tensor, carried: Tensor | None) -> Tensor:
    """Both parts as one (rows, width) table, without a copy where they lie side by side already."""
    width = outputs.shape[-1]
    if carried is None:
        return outputs.reshape(-1, width)
    is_side_by_side = (
        not torch.compiler.is_compiling()
        and outputs.is_contiguous()
        and outputs.untyped_storage().data_ptr() == carried.untyped_storage().data_ptr()
        and carried.storage_offset() == outputs.storage_offset() + outputs.numel()
    )
    if is_side_by_side:
        return outputs.as_strided(
            ((outputs.numel() + carried.numel()) // width, width), (width, 1), outputs.storage_offset()
        )
    return torch.cat([outputs.reshape(-1, width), carried.reshape(-1, width)])


FORMS: dict[Form, type[HandOver]] = {"segment": Segment, "gather": Gather, "matmul": Matmul}


def cheapest_form(matrix: Tensor, in_eager: bool) -> Form:
    """The form in which a hand-over costs least, by counting what each moves and multiplies."""
    rows, width = matrix.shape
    chunks = pack(matrix, torch.nonzero(~_is_copy(matrix)).flatten().tolist())
    costs: dict[Form, float] = {
        "gather": 2 * width + (_chunks_cost(chunks) if chunks else 0) + rows,
        "matmul": width + width * rows * MULTIPLY + rows,
    }
    if in_eager:
        costs["segment"] = rows + int((matrix != 0).sum()) * SEGMENT_ENTRY
    return min(costs, key=lambda form: costs[form])


State = Tensor | tuple[Tensor, ...] | tuple[Tensor, Tensor | None]


class Stage(nn.Module):
    """A hand-over and the block after it. The first stage takes tokens; the last, which hands over to the head, returns
    them; what travels in between are tables.
    """

    def __init__(
        self, num_inputs: int, hand_over: list[HandOver], block: nn.Module, to_head: list[HandOver] | None = None
    ) -> None:
        super().__init__()
        self.num_inputs = num_inputs
        self.hand_over = nn.ModuleList(hand_over)
        self.block = block
        self.to_head = nn.ModuleList(to_head) if to_head is not None else None

    def forward(self, state: State, *positional: object, **arguments: object) -> State:
        tokens, carried = cast("tuple[Tensor, Tensor | None]", state if isinstance(state, tuple) else (state, None))
        if tokens.shape[1] != self.num_inputs:
            raise ValueError(
                f"expected {self.num_inputs} tokens, got {tokens.shape[1]}: was the plan made for another image size?"
            )
        for hand_over in self.hand_over:
            tokens, carried = hand_over(tokens, carried)
        output = self.block(tokens, *positional, **arguments)
        tokens, *others = output if isinstance(output, tuple) else (output,)
        if self.to_head is None:
            return tokens, carried
        for hand_over in self.to_head:
            tokens, carried = hand_over(tokens, carried)
        return (tokens, *others) if isinstance(output, tuple) else tokens


class Narrowed(nn.Module):
    """A compressed block without its merging and reconstructing: groups in, groups out."""

    def __init__(self, wrapper: PruneMerge) -> None:
        super().__init__()
        self.wrapper = wrapper

    def forward(self, groups: Tensor, *positional: object, **arguments: object) -> Tensor:
        return cast(Tensor, self.wrapper.block(groups, **self.wrapper.block_arguments(positional, arguments)))
