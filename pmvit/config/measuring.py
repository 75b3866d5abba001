"""Options of `measure`."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

from pmvit.config.base import check_choices, expect
from pmvit.errors import PmvitError

Method = Literal["adaptive", "measured", "scored", "paper"]
Measurement = Literal["adaptive", "measured", "scored"]  # what a plan is made from: a metric, merge costs, or scores
Scorer = Literal["grad_attn", "attn", "class_attn", "grad_class_attn", "grad", "random"]
Loss = Literal["labels", "predicted", "entropy", "embedding"]
Parts = Literal["split", "whole"]
Groups = Literal["neighbours", "any"]

OURS: dict[str, Measurement] = {  # plans of ours, by the names that `compare` has for them
    "prune-merge": "scored",
    "measured": "measured",
    "adaptive": "adaptive",
}
PAPER_SCORES: dict[str, Any] = {"abs_per_sample": False}  # what the paper's code does, where the defaults do not


class MeasureOptions(TypedDict, total=False):
    """Keywords of `measure`: fields of `ScoreConfig`, `MergeCostConfig` and `MetricConfig`."""

    limit: int | None
    seed: int
    scorer: Scorer
    iterations: int
    loss: Loss
    abs_per_sample: bool
    parts: Parts
    groups: Groups
    mirror: bool
    nested: bool
    early: float
    memory: float
    rank: int
    size_weight: float


@dataclass(frozen=True)
class ScoreConfig:
    """How tokens are scored (Eq. 9).

    Attributes:
        scorer: What a token is scored by: grad_attn is Eq. 9, the others are the paper's ablation (Table V). These are
            `attn` (attention received), `class_attn` (attention received from the class token), `grad_class_attn`
            (Eq. 9 for the class token's query alone), `grad` (Taylor expansion on the tokens, Eq. 8) and `random`.
        iterations: Batches to score at most. A loader that ends earlier ends the scoring.
        loss: Cross-entropy on the labels or on the model's own predicted class, or the entropy of its prediction;
            embedding for a model without classes. Only `labels` needs labels. `embedding` is half the squared distance
            of what the model puts out for an image from the mean of the batch: a token counts by how much it sets its
            image apart.
        abs_per_sample: Take the absolute value for each image, not of the mean over each batch. The paper's code does
            the latter, where images cancel each other: it needs far more images.
        seed: For the `random` scorer.
        limit: Images to measure on at most; all if not given.
    """

    scorer: Scorer = "grad_attn"
    iterations: int = 500
    loss: Loss = "labels"
    abs_per_sample: bool = field(default=True, metadata={"off": "abs-per-batch"})
    seed: int = 0
    limit: int | None = None

    def __post_init__(self) -> None:
        check_choices(self)
        expect(self, "iterations", self.iterations >= 1, "1 or more")
        expect(self, "limit", self.limit is None or self.limit >= 1, "1 or more")

    @property
    def needs_labels(self) -> bool:
        """Whether the batches have to come with labels."""
        return self.loss == "labels" and self.scorer.startswith("grad")


@dataclass(frozen=True)
class MergeCostConfig:
    """How the costs of merges are measured.

    Attributes:
        limit: Images to measure on at most; for scores, all if not given.
        parts: Whether attention and MLP of a block have groups of their own (split), where the model's blocks allow it,
            or the same (whole).
        groups: Whether groups are of neighbours in the grid, beside or above each other, or of any tokens.
        mirror: Let an image and its mirror image count alike. For photographs that is as good as twice the images, at
            no cost; spectrograms, which have no left and right, are never mirrored.
        nested: Let what is merged in a block stay merged in those after it. Such plans keep more of the model, and
            running them costs less, because what tells merged tokens apart is never needed again.
        early: By how much the costs of the first block are raised; those of later blocks less and less. Costs are
            measured with nothing merged, and an error passes through every merged block after it.
        memory: Gigabytes that may be filled with measurements. Fewer random combinations of the images are kept if
            they do not fit.
        seed: Of everything random.
    """

    limit: int = 1024
    parts: Parts = "split"
    groups: Groups = "neighbours"
    mirror: bool = True
    nested: bool = True
    early: float = 5.0
    memory: float = 4.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_choices(self)
        if self.parts == "split" and not self.nested:
            raise PmvitError('expected nested=True where attention and MLP are split: for free choice, parts="whole"')
        for name in ("limit", "early", "memory"):
            value = getattr(self, name)
            expect(self, name, math.isfinite(value) and value > 0, "a number above 0")


@dataclass(frozen=True)
class MetricConfig:
    """How it is measured what differences of tokens matter, for adaptive plans.

    Attributes:
        limit: Images to measure on at most; for scores, all if not given.
        rank: By how many dimensions tokens are compared: the rank of the metric.
        size_weight: Part of the logarithm of a token's size that is added to its attention scores. Tokens that merge
            are alike, and count for a little less than their sum.
        seed: Of everything random.
    """

    limit: int = 1024
    rank: int = 32
    size_weight: float = 0.85
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("limit", "rank"):
            expect(self, name, getattr(self, name) >= 1, "1 or more")
        expect(self, "size_weight", 0 <= self.size_weight <= 1, "a number from 0 to 1")
