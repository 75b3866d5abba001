"""Modules that run a chain of tables (see `maps`): hand-overs in three forms, and the blocks between them."""

from typing import Literal

import torch
from torch import Tensor, nn

Form = Literal["segment", "gather", "matmul"]


class HandOver(nn.Module):
    """A constant sparse matrix from one table of shape (batch, rows, width) to the next."""

    def forward(self, table: Tensor) -> Tensor:
        raise NotImplementedError


class Matmul(HandOver):
    """The matrix written out in full: best where it is small or most of it is filled."""

    matrix: Tensor

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.register_buffer("matrix", matrix.float(), persistent=False)

    def forward(self, table: Tensor) -> Tensor:
        return torch.matmul(self.matrix.to(table.dtype), table)


class Gather(HandOver):
    """Rows that are copies are gathered; the others come from a small product of the rows they mix."""

    mixed_rows: Tensor
    mixing: Tensor
    sources: Tensor

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        matrix = matrix.float()
        is_copy = ((matrix != 0).sum(1) == 1) & (matrix.sum(1) == 1)
        mixed_rows = torch.nonzero((matrix[~is_copy] != 0).any(0)).flatten()
        sources = matrix.argmax(1)
        sources[~is_copy] = matrix.shape[1] + torch.arange(int((~is_copy).sum()))
        self.register_buffer("mixed_rows", mixed_rows, persistent=False)
        self.register_buffer("mixing", matrix[~is_copy][:, mixed_rows], persistent=False)
        self.register_buffer("sources", sources, persistent=False)

    def forward(self, table: Tensor) -> Tensor:
        if not self.mixing.numel():
            return table.index_select(1, self.sources)
        mixed = torch.matmul(self.mixing.to(table.dtype), table.index_select(1, self.mixed_rows))
        return torch.cat([table, mixed], dim=1).index_select(1, self.sources)


FORMS: dict[Form, type[HandOver]] = {"gather": Gather, "matmul": Matmul}
