"""`Scores`: the importance of every patch token in every block, and how it was measured."""

from dataclasses import asdict, dataclass, replace
from json import dumps
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from pmvit.cost import BlockCost, ModelCost
from pmvit.errors import PmvitError
from pmvit.files import check_fields, config_from, read_document, write_text

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
        values: One row a block, one column a patch token, float64.
        grid: Rows and columns of the patch grid.
        num_prefix: Tokens before the patch tokens; they have no score.
        cost: What each block of the model costs.
        config: How the scores were measured.
        iterations: Batches that were used.
        images: Images that were used.
        model: Fingerprint of the scored weights.
        data: What the images were read from.
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

    def save(self, path: str | Path, kind: str = FORMAT) -> None:
        """Write the scores as JSON."""
        document = {"format": kind, "version": VERSION, **asdict(replace(self, values=torch.empty(0)))}
        document["values"] = self.values.tolist()
        write_text(Path(path), dumps(document) + "\n")

    @staticmethod
    def load(path: str | Path, kind: str = FORMAT) -> "Scores":
        """Read what `save` wrote.

        Raises:
            PmvitError: If the file is not a whole and consistent scores file.
        """
        where = str(path)
        document = read_document(Path(path), kind, VERSION)
        check_fields(document, ("format", "version", *Scores.__dataclass_fields__), where)
        try:
            values = torch.tensor(document["values"], dtype=torch.float64)
            cost = ModelCost(document["cost"]["outside"], tuple(BlockCost(**b) for b in document["cost"]["blocks"]))
            height, width = document["grid"]
        except (TypeError, ValueError, KeyError) as error:
            raise PmvitError(f"{where}: the scores are malformed ({error}): score the model again") from None
        if not torch.isfinite(values).all():
            raise PmvitError(f"{where}: expected finite scores, got some that are not: score the model again")
        if values.shape != (len(cost.blocks), height * width):
            raise PmvitError(
                f"{where}: expected scores for {len(cost.blocks)} blocks of {height} x {width} tokens, "
                f"got {tuple(values.shape)}: score the model again"
            )
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
        )
