"""What a comparison compares: a model made smaller by a named method, as near to a cost as the method comes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from torch import nn

from pmvit.comparison.weights import prune_weights
from pmvit.compression import compress
from pmvit.errors import PmvitError
from pmvit.measuring import MergeCosts, Scores
from pmvit.methods import METHODS
from pmvit.methods.budget import nearest
from pmvit.planning import plan

OURS = ("prune-merge", "measured")  # plans from scores and from merge costs
WEIGHTS = {"magnitude-pruning": "magnitude", "taylor-pruning": "taylor"}
FAR = 0.05  # what a method may be off a cost, for the steps it goes in; farther off, it cannot be compared there


@dataclass(frozen=True)
class MethodInputs:
    """What methods may know of a model and its images.

    Attributes:
        scores: What `prune-merge` plans with.
        merge_costs: What `measured` plans with.
        images: A loader, for methods that need images, and for the gradients of `taylor-pruning`.
    """

    scores: Scores | None = None
    merge_costs: MergeCosts | None = None
    images: Iterable[Any] | None = None

    def methods(self) -> list[str]:
        """All methods that need no training and for which there is all that they need."""
        ours = [name for name, found in zip(OURS, (self.scores, self.merge_costs), strict=True) if found is not None]
        has_images = self.images is not None
        others = [
            name for name, kind in METHODS.items() if not kind.needs_training and (has_images or not kind.needs_images)
        ]
        weights = [name for name, kind in WEIGHTS.items() if has_images or kind != "taylor"]
        return [*ours, *others, *(weights if find_spec("torch_pruning") is not None else [])]


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
        source = inputs.scores if method == OURS[0] else inputs.merge_costs
        if source is None:
            raise PmvitError(f"it needs {'scores' if method == OURS[0] else 'merge costs'}")
        made = plan(source, gflops=gflops)
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
