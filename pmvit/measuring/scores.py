"""`Scores`: the importance of every patch token in every block, and how it was measured."""

import math
from dataclasses import asdict, dataclass
from json import dumps
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pmvit.config import ScoreConfig
from pmvit.errors import PmvitError
from pmvit.files import fields_from, read_document, typed, write_document
from pmvit.measuring.flops import ModelCost
from pmvit.windows import Windows

FORMAT, PARTIAL_FORMAT, VERSION = "pmvit-scores", "pmvit-partial-scores", 1
LARGEST_WINDOW = 1024  # rows or columns: a file may not have us pad to more


@dataclass(frozen=True)
class Scores:
    """Importance of every patch token in every block, and what planning has to know of the model.

    Attributes:
        values: One row a block, one column a patch token, float64; zeros follow where a block has fewer than others.
        grid: Patches along each axis of their grid, at the first block.
        num_prefix: Tokens before the patch tokens; they have no score.
        cost: What each block of the model costs.
        config: How the scores were measured.
        iterations: Batches that were used.
        images: Images that were used.
        model: Fingerprint of the scored weights.
        data: What the images were read from.
        grids: The patch grid at each block; the same at all of them if not given.
        windows: The windows of each block, `None` where attention is over the whole grid.
        skip: Blocks of the model that a plan leaves alone unless it is told which.
    """

    values: Tensor
    grid: tuple[int, ...]
    num_prefix: int
    cost: ModelCost
    config: ScoreConfig
    iterations: int
    images: int
    model: str
    data: str
    grids: tuple[tuple[int, ...], ...] = ()
    windows: tuple[Windows | None, ...] = ()
    skip: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        depth = len(self.values)
        object.__setattr__(self, "grids", self.grids or (self.grid,) * depth)
        object.__setattr__(self, "windows", self.windows or (None,) * depth)

    def of(self, layer: int) -> Tensor:
        """The scores of one block, one a patch token."""
        return self.values[layer, : self.num_patches(layer)]

    def num_patches(self, layer: int) -> int:
        """Patch tokens of one block."""
        return math.prod(self.grids[layer])

    def save(self, path: str | Path, kind: str = FORMAT) -> None:
        """Write the scores as JSON."""
        document = {"format": kind, "version": VERSION, **asdict(self)}
        document["values"] = [self.of(layer).tolist() for layer in range(len(self.values))]
        if set(self.grids) == {self.grid} and not any(self.windows):
            del document["grids"], document["windows"]
        if not self.skip:
            del document["skip"]
        write_document(Path(path), dumps(document))

    @staticmethod
    def load(path: str | Path, kind: str = FORMAT) -> "Scores":
        """Read what `save` wrote.

        Raises:
            PmvitError: If the file is not a whole and consistent scores file.
        """
        where = str(path)
        document = read_document(Path(path), kind, VERSION)
        given = fields_from(Scores, document, where, beside=("format", "version", "values"))
        rows = typed(tuple[tuple[float, ...], ...], document.get("values"), f"{where}: values")
        depth, grid = len(rows), given["grid"]
        grids, windows = given.get("grids") or (grid,) * depth, given.get("windows") or (None,) * depth
        counts = [math.prod(each) for each in grids]
        if depth != len(given["cost"].blocks) or [len(row) for row in rows] != counts:
            raise PmvitError(
                f"{where}: expected scores for {len(given['cost'].blocks)} blocks of {' x '.join(map(str, grid))} "
                f"tokens, got {depth} of {', '.join(map(str, sorted({len(row) for row in rows})))}: measure the model "
                "again"
            )
        if len(windows) != depth or not all(map(_can_be, windows, grids)) or not all(map(_is_grid, (grid, *grids))):
            raise PmvitError(f"{where}: expected windows of the grids of {depth} blocks, got others: measure again")
        tensors = [torch.tensor(row, dtype=torch.float64) for row in rows]
        values = pad_sequence(tensors, batch_first=True) if rows else torch.zeros(0, 0, dtype=torch.float64)
        if not torch.isfinite(values).all():
            raise PmvitError(f"{where}: expected finite scores, got some that are not: measure the model again")
        return Scores(**given, values=values)


def _is_grid(grid: tuple[int, ...]) -> bool:
    return bool(grid) and min(grid) > 0


def _can_be(windows: Windows | None, grid: tuple[int, ...]) -> bool:
    """Whether a grid can have such windows."""
    if windows is None:
        return True
    if len(grid) != 2:
        return False
    sides = zip(windows.size, windows.shift, strict=True)
    return all(1 <= size <= LARGEST_WINDOW and 0 <= shift < size for size, shift in sides)
