"""Options of `plan`."""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from pmvit.config.base import check_choices, expect
from pmvit.config.inference import SpeedOptions
from pmvit.config.measuring import Measurement, Method
from pmvit.errors import PmvitError

if TYPE_CHECKING:
    from typing_extensions import Unpack

Scope = Literal["global", "local"]
Grouping = Literal["grid", "row", "segment"]
Weights = Literal["sum", "average", "normalize", "max", "mean", "ones", "gaussian"]
Reconstruct = Literal["residual", "pinv"]
PRUNED = -1  # in a plan, the group of a token that is in no group

BUDGETS = ("keep", "gflops", "flops_share", "speedup", "max_drop")
MEASURED_BUDGETS = ("speedup", "max_drop")  # those that no counting tells
DEFAULT_PRUNE = 0.1
FOR_SCORES = ("prune", "scope", "normalize_layers", "layer_decay", "grouping", "weights")
# What the paper and its code do, where the defaults do something else.
PAPER: dict[str, Any] = {"grouping": "row", "weights": "normalize", "reconstruct": "pinv", "attention_bias": False}


class PlanOptions(TypedDict, total=False):
    """Keywords of `plan`: fields of `PlanConfig`, whose `method` may also be `paper`."""

    keep: float | None
    prune: float | None
    gflops: float | None
    flops_share: float | None
    speedup: float | None
    max_drop: float | None
    scope: Scope
    normalize_layers: bool
    layer_decay: float
    grouping: Grouping
    weights: Weights
    reconstruct: Reconstruct
    attention_bias: bool
    least_step: float
    multiple_of: int
    steps: int
    skip: tuple[int, ...] | None
    method: Method | None


class TargetOptions(PlanOptions, SpeedOptions, total=False):
    """Keywords of `plan`: what to keep, and where a speed is for."""


@dataclass(frozen=True)
class PlanConfig:
    """How measurements become a plan. One of `keep`, `gflops`, `flops_share`, `speedup` and `max_drop` says how much is
    kept.

    The options `prune`, `scope`, `normalize_layers`, `layer_decay`, `grouping` and `weights` are for scores: a plan
    from merge costs is global, merges and never prunes, and takes plain means. `least_step` is for nested merge costs.

    Attributes:
        keep: Share of the patch tokens that are kept (the paper's r). Where blocks keep different numbers of them, this
            is the mean over the blocks.
        prune: Share of the patch tokens that are pruned (the paper's PM-threshold tau); the rest are merged. If not
            given, 0.1 or what `keep` leaves.
        gflops: Billions of multiply-accumulates the compressed model may cost, instead of keep. Merge and reconstruct
            in group form are included.
        flops_share: The same as a share of the original model's.
        speedup: How many times faster than the original the model has to be, measured where it will run. Of the plans
            that are fast enough, the one that keeps most tokens is taken.
        max_drop: Points that may be lost on validation images: of top-1 (mIoU) if they have labels, else of agreement
            with the original. Of the plans that lose no more, the fastest is taken.
        scope: Whether tokens of all layers are ranked together (global, Algorithm 2) or those of each layer (local).
        normalize_layers: Divide the scores of a layer by their L2 norm before they are ranked.
        layer_decay: Multiply the scores of layer l by 1 - layer_decay * l before they are ranked. By no less than 0.1.
        grouping: What a medium token joins: the nearest kept token in the grid, the nearest in its row of the image, or
            the next in the sequence (segment). `segment` is Algorithm 1 to the letter.
        weights: Weights inside a group, from its scores s: sum is s / sum s, average 1 / group size, normalize s / |s|,
            max s / max s, mean s / mean s, ones 1; gaussian is normalize of scores smoothed over the grid.
        reconstruct: How tokens come back: residual gives each token the update of its group, pinv is the paper's
            pseudo-inverse.
        attention_bias: Raise attention to a group by the logarithm of its size.
        least_step: Share of the tokens before it that a block, or half of one, has to merge to have groups of its own.
            Otherwise it has the same groups. Every change takes operations, and few large ones keep as much of the
            model as many small ones.
        multiple_of: Adaptive plans let blocks run on multiples of so many tokens, prefix tokens included. GPUs like
            multiples of 8.
        steps: Blocks before which adaptive plans merge tokens, at most. Fewer take less time to compare tokens, which
            counts in small models; more keep more at the same FLOPs.
        skip: Blocks that are left alone; negative numbers count from the last. If not given, those that the model's
            host names: none of a classifier, the first two of a feature extractor or DPT, and for plans from scores, as
            in the paper, the first two and the last two of a Segmenter. For an adaptive plan: blocks before which
            nothing merges; if not given, none.
        method: What the plan is made from: a metric (adaptive), merge costs (measured) or scores (scored). If not
            given, what there is.
    """

    keep: float | None = None
    prune: float | None = None
    gflops: float | None = None
    flops_share: float | None = None
    speedup: float | None = None
    max_drop: float | None = None
    scope: Scope = "global"
    normalize_layers: bool = True
    layer_decay: float = 0.025
    grouping: Grouping = "grid"
    weights: Weights = field(default="sum", metadata={"option": "weight_rule"})  # --weights is a weights file
    reconstruct: Reconstruct = "residual"
    attention_bias: bool = True
    least_step: float = 0.08
    multiple_of: int = 1
    steps: int = 8
    skip: tuple[int, ...] | None = None
    method: Measurement | None = None

    def __post_init__(self) -> None:
        if self.skip is not None:
            object.__setattr__(self, "skip", tuple(self.skip))
        check_choices(self)
        given = [name for name in BUDGETS if getattr(self, name) is not None]
        if len(given) != 1:
            raise PmvitError(f"expected one of {', '.join(BUDGETS)}; got {' and '.join(given) or 'none'}")
        value = getattr(self, given[0])
        expect(self, "keep", self.keep is None or 0 < self.keep <= 1, "a share above 0 and up to 1")
        expect(self, given[0], math.isfinite(value) and value > 0, "a finite number above 0")
        for name in ("multiple_of", "steps"):
            expect(self, name, getattr(self, name) >= 1, "a whole number from 1")
        for name in ("prune", "least_step"):
            expect(self, name, 0 <= (getattr(self, name) or 0) < 1, "a share from 0 to below 1")
        if self.keep is not None and self.prune is not None and self.keep + self.prune > 1 + 1e-9:
            raise PmvitError(
                f"expected keep + prune to be at most 1, got {self.keep} + {self.prune}: lower one of them"
            )

    @classmethod
    def of(cls, **options: "Unpack[PlanOptions]") -> "PlanConfig":
        """A configuration of these options, over the paper's choices if the method is `paper`."""
        if options.get("method") == "paper":
            return cls(**{**PAPER, **options, "method": "scored"})
        return cls(**options)  # type: ignore[arg-type]  # any other method is one of PlanConfig's

    @property
    def choices_for_scores(self) -> list[str]:
        """Those options for scores alone that are not at their defaults."""
        return [name for name in FOR_SCORES if getattr(self, name) != self.__dataclass_fields__[name].default]

    @property
    def measurement(self) -> Measurement | None:
        """What the plan has to be made from: who asks for something that only scores have, asks for scores."""
        return self.method or ("scored" if self.choices_for_scores else None)

    @property
    def measured_budget(self) -> str | None:
        """The budget, if it is one that has to be measured on the model."""
        return next((name for name in MEASURED_BUDGETS if getattr(self, name) is not None), None)

    def pruned_share(self, keep: float) -> float:
        """The share to prune beside this share of kept tokens."""
        return min(DEFAULT_PRUNE if self.prune is None else self.prune, 1 - keep)
