"""`Scores`: the importance of every patch token in every block, and how it was measured."""

from dataclasses import asdict, dataclass
from json import dumps
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pmvit.errors import PmvitError
from pmvit.files import check_fields, config_from, read_document, write_text
from pmvit.measuring.flops import BlockCost, ModelCost
from pmvit.windows import Windows

Scorer = Literal["grad_attn", "attn", "class_attn", "grad_class_attn", "grad", "random"]
Loss = Literal["labels", "predicted", "entropy", "embedding"]

FORMAT, PARTIAL_FORMAT, VERSION = "pmvit-scores", "pmvit-partial-scores", 1


@dataclass(frozen=True)
class ScoreConfig:
    """What is measured.

    Attributes:
        scorer: `grad_attn` is Eq. 9. The others are the paper's ablation (Table V): `attn` (attention received),
            `class_attn` (attention received from the class token), `grad_class_attn` (Eq. 9 for the class token's
            query alone), `grad` (Taylor expansion on the tokens, Eq. 8), `random`.
        iterations: Batches to use at most; a loader that ends earlier ends the scoring.
        loss: Cross-entropy on the `labels`, on the model's own `predicted` class, or the `entropy` of its prediction;
            the last two need no labels. For a model without classes, `embedding`: half the squared distance of what it
            puts out for an image from the mean of the batch; a token counts by how much it sets its image apart.
        abs_per_sample: Take the absolute value for each image. The paper's code takes it of the mean over each batch,
            where images cancel each other: it needs far more images.
        seed: For the `random` scorer.
    """

    scorer: Scorer = "grad_attn"
    iterations: int = 500
    loss: Loss = "labels"
    abs_per_sample: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, choices in (("scorer", self.scorer, Scorer), ("loss", self.loss, Loss)):
            if value not in get_args(choices):
                raise PmvitError(f"{name}: expected one of {', '.join(get_args(choices))}; got {value!r}")
        if self.iterations < 1:
            raise PmvitError(f"iterations: expected 1 or more, got {self.iterations}")

    @property
    def needs_labels(self) -> bool:
        """Whether the batches have to come with labels."""
        return self.loss == "labels" and self.scorer.startswith("grad")


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
            raise PmvitError(f"{where}: the scores are malformed ({error}): score the model again") from None
        if not torch.isfinite(values).all():
            raise PmvitError(f"{where}: expected finite scores, got some that are not: score the model again")
        expected = [h * w for h, w in grids]
        if len(rows) != len(cost.blocks) or [tuple(row.shape) for row in rows] != [(count,) for count in expected]:
            raise PmvitError(
                f"{where}: expected scores for {len(cost.blocks)} blocks of {height} x {width} tokens, "
                f"got {tuple(values.shape)}: score the model again"
            )
        if len(windows) != len(rows):
            raise PmvitError(f"{where}: expected windows for {len(rows)} blocks, got {len(windows)}: score again")
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
