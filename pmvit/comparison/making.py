"""What a comparison compares: a model made smaller by a named method, as near to a cost as the method comes."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from torch import nn

from pmvit.comparison.weights import prune_weights
from pmvit.compression import compress
from pmvit.config import PlanConfig
from pmvit.config.measuring import OURS
from pmvit.data.opening import ImageData
from pmvit.errors import PmvitError
from pmvit.measuring import KINDS, Measured, MergeCosts, Scores, TokenMetric
from pmvit.methods import METHODS
from pmvit.methods.budget import nearest
from pmvit.planning.planner import plan_by

WEIGHTS = {"magnitude-pruning": "magnitude", "taylor-pruning": "taylor"}
FAR = 0.05  # what a method may be off a cost, for the steps it goes in; farther off, it cannot be compared there


@dataclass(frozen=True)
class MethodInputs:
    """What methods may know of a model: what plans are made from, and images for what needs some."""

    scores: Scores | None = None
    merge_costs: MergeCosts | None = None
    metric: TokenMetric | None = None
    images: ImageData | None = None

    def measured(self, method: str) -> Measured | None:
        """What one of `OURS` is made from."""
        return {"scored": self.scores, "measured": self.merge_costs, "adaptive": self.metric}[OURS[method]]

    def methods(self) -> list[str]:
        """All methods that need no training and for which there is all that they need."""
        ours = [name for name in OURS if self.measured(name) is not None]
        others = [name for name, kind in METHODS.items() if not kind.needs_training]
        weights = list(WEIGHTS) if find_spec("torch_pruning") is not None else []
        look_at_images = {"taylor-pruning", *(name for name, kind in METHODS.items() if kind.needs_images)}
        return [name for name in (*ours, *others, *weights) if self.images is not None or name not in look_at_images]


def check_methods(names: Sequence[str]) -> None:
    """Raise `PmvitError` for a method that there is not."""
    known = [*OURS, *METHODS, *WEIGHTS]
    if unknown := [name for name in names if name not in known]:
        raise PmvitError(f"expected one of the methods {', '.join(known)}; got {unknown[0]!r}")


def make_smaller(
    model: nn.Module, method: str, gflops: float, inputs: MethodInputs
) -> tuple[nn.Module, dict[str, Any]]:
    """A copy of a model made smaller by a method, and the options at which the method came nearest to the cost.

    Raises:
        PmvitError: If the method cannot be applied to the model, lacks what it needs, or does not come near.
    """
    if method in OURS:
        measured = inputs.measured(method)
        if measured is None:
            raise PmvitError(f"it needs {KINDS[OURS[method]].title}")
        made = plan_by(PlanConfig(gflops=gflops), measured)
        return compress(model, made), made.made_by.get("plan", {})
    if method in WEIGHTS:
        importance: Any = WEIGHTS[method]
        small, ratio = prune_weights(model, gflops, importance, inputs.images)
        return small, {"importance": importance, "ratio": ratio}
    kind = METHODS[method]
    found, reached = nearest(model, kind, gflops, data=inputs.images if kind.needs_images else None)
    if abs(reached - gflops) > FAR * gflops:
        raise PmvitError(f"the nearest that it comes to {gflops:.4g} GFLOPs is {reached:.4g}")
    return compress(model, found), found.describe()["options"]
