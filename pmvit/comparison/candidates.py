"""What takes part in a comparison: each variant at a cost, or why there is none."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from torch import nn

from pmvit.comparison.table import Compared
from pmvit.comparison.weights import prune_weights
from pmvit.compression import compress
from pmvit.errors import PmvitError
from pmvit.measuring import MergeCosts, Scores
from pmvit.measuring.flops import flops
from pmvit.methods import METHODS
from pmvit.methods.budget import nearest
from pmvit.planning import plan

OURS = ("prune-merge", "measured")  # plans from scores and from merge costs
WEIGHTS = {"magnitude-pruning": "magnitude", "taylor-pruning": "taylor"}
FAR = 0.05  # what a method may be off a cost, for the steps it goes in; farther off, it cannot be compared there
Candidate = tuple[Compared, nn.Module | None]


@dataclass(frozen=True)
class Evidence:
    """What variants may know of a model and its images.

    Attributes:
        scores: What `prune-merge` plans with.
        merge_costs: What `measured` plans with.
        images: A loader, for methods that need images, and for the gradients of `taylor-pruning`.
    """

    scores: Scores | None = None
    merge_costs: MergeCosts | None = None
    images: Iterable[Any] | None = None

    def variants(self) -> list[str]:
        """All that need no training and for which there is all that they need."""
        ours = [name for name, found in zip(OURS, (self.scores, self.merge_costs), strict=True) if found is not None]
        has_images = self.images is not None
        others = [
            name for name, kind in METHODS.items() if not kind.needs_training and (has_images or not kind.needs_images)
        ]
        weights = [name for name, kind in WEIGHTS.items() if has_images or kind != "taylor"]
        return [*ours, *others, *(weights if find_spec("torch_pruning") is not None else [])]


def check_names(names: Iterable[str]) -> None:
    """Raise `PmvitError` for a variant that there is not."""
    known = [*OURS, *METHODS, *WEIGHTS]
    if unknown := [name for name in names if name not in known]:
        raise PmvitError(f"expected one of the methods {', '.join(known)}; got {unknown[0]!r}")


def counted(row: Compared, model: nn.Module) -> Candidate:
    """A model beside its row, which says what it costs."""
    cost = flops(model)
    return replace(row, gflops=cost.gflops, parameters=cost.parameters), model


def candidate(model: nn.Module, row: Compared, budget: float, evidence: Evidence) -> Candidate:
    """What a row asks for at a cost, or why there is none."""
    try:
        return counted(*_made(model, row, budget, evidence))
    except PmvitError as error:
        return replace(row, failure=str(error)), None


def _made(model: nn.Module, row: Compared, budget: float, evidence: Evidence) -> tuple[Compared, nn.Module]:
    if row.method in OURS:
        source = evidence.scores if row.method == OURS[0] else evidence.merge_costs
        if source is None:
            raise PmvitError(f"it needs {'scores' if row.method == OURS[0] else 'merge costs'}")
        made = plan(source, gflops=budget)
        return replace(row, options=made.made_by.get("plan", {})), compress(model, made)
    if row.method in WEIGHTS:
        importance: Any = WEIGHTS[row.method]
        small, ratio = prune_weights(model, budget, importance, evidence.images)
        return replace(row, options={"importance": importance, "ratio": ratio}), small
    kind = METHODS[row.method]
    method, reached = nearest(model, kind, budget, data=evidence.images if kind.needs_images else None)
    if abs(reached - budget) > FAR * budget:
        raise PmvitError(f"the nearest that it comes to {budget:.4g} GFLOPs is {reached:.4g}")
    return replace(row, options=method.describe()["options"]), compress(model, method)
