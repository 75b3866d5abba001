"""`Scores`: the importance of every patch token in every block, and how it was measured."""

from dataclasses import asdict, dataclass
from json import dumps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pmvit.config import ScoreConfig
from pmvit.errors import PmvitError
from pmvit.files import check_fields, config_from, read_document, write_text
from pmvit.measuring.flops import BlockCost, ModelCost
from pmvit.windows import Windows

FORMAT, PARTIAL_FORMAT, VERSION = "pmvit-scores", "pmvit-partial-scores", 1


@dataclass(frozen=True)
class Scores:
    """Importance of every patch token in every block, and what planning has to know of the model.

    Attributes:
        values: One row a block, one column a patch token, float64; zeros follow where a block has fewer than others.
        grid: Rows and columns of the patch grid, at the first block.
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
    grid: tuple[int, int]
    num_prefix: int
    cost: ModelCost
    config: ScoreConfig
    iterations: int
    images: int
    model: str
    data: str
    grids: tuple[tuple[int, int], ...] = ()
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
        return self.grids[layer][0] * self.grids[layer][1]

    def save(self, path: str | Path, kind: str = FORMAT) -> None:
        """Write the scores as JSON."""
        document = {"format": kind, "version": VERSION, **asdict(self)}
        document["values"] = [self.of(layer).tolist() for layer in range(len(self.values))]
        if set(self.grids) == {self.grid} and not any(self.windows):
            del document["grids"], document["windows"]
        if not self.skip:
            del document["skip"]
        write_text(Path(path), dumps(document) + "\n")

    @staticmethod
    def load(path: str | Path, kind: str = FORMAT) -> "Scores":
        """Read what `save` wrote.

        Raises:
            PmvitError: If the file is not a whole and consistent scores file.
        """
        where = str(path)
        document = read_document(Path(path), kind, VERSION)
        optional = ("grids", "windows", "skip")
        names = [name for name in Scores.__dataclass_fields__ if name not in optional]
        check_fields(document, ("format", "version", *names), where, optional)
        try:
            rows = [torch.tensor(row, dtype=torch.float64) for row in document["values"]]
            cost = ModelCost(document["cost"]["outside"], tuple(BlockCost(**b) for b in document["cost"]["blocks"]))
            height, width = document["grid"]
            grids = tuple((int(h), int(w)) for h, w in document.get("grids", [(height, width)] * len(rows)))
            windows = tuple(_windows(entry) for entry in document.get("windows", [None] * len(rows)))
            skip = tuple(int(index) for index in document.get("skip", ()))
            values = pad_sequence(rows, batch_first=True) if rows else torch.zeros(0, 0, dtype=torch.float64)
        except (TypeError, ValueError, KeyError) as error:
            raise PmvitError(f"{where}: the scores are malformed ({error}): measure the model again") from None
        if not torch.isfinite(values).all():
            raise PmvitError(f"{where}: expected finite scores, got some that are not: measure the model again")
        expected = [h * w for h, w in grids]
        if len(rows) != len(cost.blocks) or [tuple(row.shape) for row in rows] != [(count,) for count in expected]:
            raise PmvitError(
                f"{where}: expected scores for {len(cost.blocks)} blocks of {height} x {width} tokens, "
                f"got {tuple(values.shape)}: measure the model again"
            )
        if len(windows) != len(rows):
            raise PmvitError(f"{where}: expected windows for {len(rows)} blocks, got {len(windows)}: measure again")
        return Scores(
            values=values,
            grid=(height, width),
            num_prefix=document["num_prefix"],
            cost=cost,
            config=config_from(ScoreConfig, document["config"], f"{where}: config"),
            iterations=document["iterations"],
            images=document["images"],
            model=document["model"],
            data=document["data"],
            grids=grids,
            windows=windows,
            skip=skip,
        )


def _windows(entry: dict[str, Any] | None) -> Windows | None:
    if entry is None:
        return None
    (rows, columns), (down, right) = entry["size"], entry["shift"]
    return Windows((int(rows), int(columns)), (int(down), int(right)), bool(entry["pad_first"]))
