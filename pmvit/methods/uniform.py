"""Uniform merging, a floor: in one block, the patches of 2 x 2 cells of the grid become one token each.

Cells are merged as ToMe merges tokens: their mean, of a size that attention knows. A share of the cells, spread evenly
over the image, makes it as cheap as it should be.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pmvit.errors import PmvitError
from pmvit.methods.base import Encoder, Method, Site, check_size, numbers_of_blocks
from pmvit.methods.merging import MergingBlock


def cells_of(grid: tuple[int, int], share: float, num_prefix: int) -> Tensor:
    """The new place of each token if a share of the 2 x 2 cells of a grid is merged; a cell at the edge may be cut."""
    height, width = grid
    rows, columns = torch.arange(height) // 2, torch.arange(width) // 2
    cells = (rows[:, None] * ((width + 1) // 2) + columns).flatten()
    num_cells = int(cells[-1]) + 1
    marks = (torch.arange(num_cells + 1) * round(share * num_cells)).div(num_cells, rounding_mode="floor")
    is_merged = (marks[1:] > marks[:-1])[cells]
    own = num_cells + torch.arange(height * width)
    _, places = torch.where(is_merged, cells, own).unique(return_inverse=True)  # merged cells first, by their numbers
    return torch.cat([torch.arange(num_prefix), num_prefix + places])


class UniformBlock(MergingBlock):
    """A block that merges cells if its r is not 0, and knows their sizes in any case."""

    cells: Tensor

    def __init__(self, block: nn.Module, site: Site, method: "Uniform", merges: bool) -> None:
        super().__init__(block, site, method, int(merges), site.dense)
        cells = cells_of(site.grid, method.share, site.num_prefix)
        self.num_merged = int(cells.max()) + 1
        self.register_buffer("cells", cells, persistent=False)

    def number(self, num_tokens: int) -> int | None:
        return self.r or None

    def find(self, keys: Tensor, r: int) -> Tensor:
        check_size(keys, self.cells.numel())
        return self.cells

    def merge(self, tokens: Tensor, sizes: Tensor | None, found: Tensor) -> tuple[Tensor, Tensor]:
        counts = tokens.new_zeros(self.num_merged).index_add(0, found, tokens.new_ones(len(found)))[:, None]
        summed = tokens.new_zeros(tokens.shape[0], self.num_merged, tokens.shape[2]).index_add(1, found, tokens)
        return summed / counts, counts.expand(tokens.shape[0], -1, -1)

    def places(self, found: Tensor, num_tokens: int) -> Tensor:
        return found[None]


@dataclass(frozen=True)
class Uniform(Method):
    """Merge 2 x 2 cells of the grid.

    Attributes:
        share: Of the cells, those that are merged.
        block: The block in which they are.
    """

    name = "uniform"
    title = "uniform 2 x 2"
    gives_all_tokens = True

    share: float
    block: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise PmvitError(f"share: expected a share of the 2 x 2 cells, 0 to 1; got {self.share}")

    @classmethod
    def options_at(cls, strength: float, encoder: Encoder, options: dict[str, Any]) -> dict[str, Any]:
        return {"share": strength}

    def block_for(self, block: nn.Module, site: Site) -> UniformBlock | None:
        (first,) = numbers_of_blocks((self.block,), site.depth, "block")
        return None if site.number < first else UniformBlock(block, site, self, site.number == first)
