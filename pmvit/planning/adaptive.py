"""`AdaptivePlan`: how many tokens merge before each block, while the image says which."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from torch import Tensor

from pmvit.adaptive import merged_of
from pmvit.config import PlanConfig, PlanOptions
from pmvit.config.planning import Reconstruct
from pmvit.errors import PmvitError
from pmvit.files import check_fields, parse_document
from pmvit.measuring.flops import ModelCost
from pmvit.measuring.metric import PROJECTIONS, TokenMetric, expect_safetensors
from pmvit.planning.budget import REACHED
from pmvit.planning.plan import compressed_layers, record
from pmvit.tensors import read_tensors, read_texts, write_tensors

if TYPE_CHECKING:
    from typing_extensions import Unpack

FORMAT, VERSION = "pmvit-adaptive-plan", 1
HEADER = "plan"  # what stands for the JSON in a file's header
MEASURED_AT = "measured_at"  # in `made_by`: the grid of the images that were measured, if the plan is for another


@dataclass(frozen=True, eq=False)
class AdaptivePlan:
    """How many tokens merge before each block of a model.

    Attributes:
        merges: Before each block, from the first to the last.
        metric: What tokens are compared by.
        made_by: The configurations the plan came from, for the record.
    """

    kind: ClassVar[str] = "adaptive"
    title: ClassVar[str] = "adaptive Prune and Merge"
    reconstruct: ClassVar[Reconstruct] = "residual"

    merges: tuple[int, ...]
    metric: TokenMetric
    made_by: Mapping[str, Any] = field(default_factory=dict)

    @property
    def depth(self) -> int:
        """Blocks of the model."""
        return self.metric.depth

    @property
    def tokens(self) -> tuple[int, ...]:
        """Patch tokens, or groups of them, that each block runs on."""
        return self.metric.left(self.merges)

    @property
    def keep(self) -> float:
        """Share of the patch tokens that a block runs on, on average."""
        return sum(self.tokens) / (self.depth * self.metric.num_patches)

    def __post_init__(self) -> None:
        if len(self.merges) != self.depth:
            raise PmvitError(f"merges: expected one number for each of {self.depth} blocks, got {len(self.merges)}")
        if any(isinstance(r, bool) or not isinstance(r, int) or r < 0 for r in self.merges):
            raise PmvitError(f"merges: expected whole numbers from 0, got {self.merges}")
        if sum(self.merges) >= self.metric.num_patches:
            raise PmvitError(
                f"merges: expected at most {self.metric.num_patches - 1} in all, which leaves a token; got "
                f"{sum(self.merges)}"
            )

    def __str__(self) -> str:
        from pmvit.planning.drawing import describe_adaptive

        return describe_adaptive(self)

    @property
    def blocks(self) -> dict[int, dict[str, int]]:
        """What merges before each block, and what is left, as JSON data."""
        counts = zip(self.merges, self.tokens, strict=True)
        return {index: {"merged": r, "tokens": tokens} for index, (r, tokens) in enumerate(counts)}

    def at(self, **budget: "Unpack[PlanOptions]") -> "AdaptivePlan":
        """The plan for another budget, made from the same metric: `keep`, `gflops` or `flops_share`."""
        from pmvit.planning.planner import plan_by

        made: AdaptivePlan = plan_by(PlanConfig.of(**budget), self.metric)
        kept = {name: value for name, value in self.made_by.items() if name == MEASURED_AT}
        return replace(made, made_by={**kept, **made.made_by})

    def at_grid(self, grid: tuple[int, ...], cost: ModelCost) -> "AdaptivePlan":
        """The plan for the same model with images of another size: as large shares merge, rounded once.

        Args:
            grid: Of its patches.
            cost: What the model costs with these.
        """
        patches, whole = math.prod(grid), self.metric.num_patches
        sums = [merged_of(patches, merged, whole) for merged in accumulate(self.merges)]
        merges = tuple(after - before for before, after in pairwise([0, *sums]))
        kept = {name: value for name, value in self.made_by.items() if name != REACHED}  # at another size
        made_by = {MEASURED_AT: list(self.metric.grid), **kept}
        return AdaptivePlan(merges, replace(self.metric, grid=grid, cost=cost), made_by)

    @property
    def measured_at(self) -> tuple[int, ...]:
        """The grid of the images that were measured."""
        return tuple(self.made_by.get(MEASURED_AT, self.metric.grid))

    def to_json(self) -> str:
        """All but tensors, as text."""
        head = {"format": FORMAT, "version": VERSION, "merges": list(self.merges), "made_by": dict(self.made_by)}
        return json.dumps({**head, "metric": json.loads(self.metric.to_json())})

    def tensors(self) -> dict[str, Tensor]:
        """What is saved beside `to_json`."""
        return {PROJECTIONS: self.metric.projections}

    @staticmethod
    def from_json(text: str, where: str = "plan", tensors: Mapping[str, Tensor] | None = None) -> "AdaptivePlan":
        """Parse and check what `to_json` wrote, beside the tensors."""
        document = parse_document(text, FORMAT, VERSION, where)
        check_fields(document, ("format", "version", "merges", "made_by", "metric"), where)
        if not isinstance(document["merges"], list) or not isinstance(document["made_by"], dict):
            raise PmvitError(f"{where}: expected a list of merges and an object that says what made them")
        if PROJECTIONS not in (tensors or {}):
            raise PmvitError(f"{where}: expected the tensor {PROJECTIONS!r} beside the plan; it is missing")
        metric = TokenMetric.from_json(json.dumps(document["metric"]), (tensors or {})[PROJECTIONS], f"{where}: metric")
        return AdaptivePlan(tuple(document["merges"]), metric, document["made_by"])

    def save(self, path: str | Path) -> None:
        """Write the plan with its metric as safetensors, all but the projections as JSON in its header."""
        expect_safetensors(path)
        write_tensors(Path(path), self.tensors(), {HEADER: self.to_json()})

    @staticmethod
    def load(path: str | Path) -> "AdaptivePlan":
        """Read and check a plan.

        Raises:
            PmvitError: If the file is not a whole and consistent adaptive plan.
        """
        texts = read_texts(Path(path))
        if HEADER not in texts:
            raise PmvitError(f"expected an adaptive plan at {path}; got another safetensors file")
        return AdaptivePlan.from_json(texts[HEADER], str(path), read_tensors(Path(path)))


class Span(NamedTuple):
    """Blocks before which as many tokens merge, from the first to the last."""

    first: int
    last: int

    @staticmethod
    def usual(depth: int, share: float) -> "Span":
        """Where to merge for a share of the blocks' work: up to two thirds of them, the earlier on the less is left.

        Later merges save little, earlier ones do more harm. Where to begin was tried on 1,000 training images with two
        models of 12 blocks, at 0.5 to 0.68. A search over spans by the divergence on 512 calibration images of a model
        ended at others, which kept less of other images.
        """
        last = min(2 * depth // 3, depth - 1)
        return Span(min(max(round((share - 0.36) * depth), 0), last), last)

    def weights(self, depth: int, most_steps: int) -> tuple[float, ...]:
        """How many merge before each block, in proportion; before some of them, evenly spaced, if they are many."""
        steps = min(self.last - self.first + 1, most_steps)
        stride = (self.last - self.first) / max(steps - 1, 1)
        blocks = {int(self.first + stride * step + 0.5) for step in range(steps)}
        return tuple(float(block in blocks) for block in range(depth))

    def narrower(self) -> Iterator["Span"]:
        """It, and what saves more and more: spans that begin earlier, and then such as end earlier."""
        yield from (Span(first, self.last) for first in range(self.first, -1, -1))
        yield from (Span(0, last) for last in range(self.last - 1, -1, -1))


def plan_within(
    metric: TokenMetric, config: PlanConfig, *, keep: float | None = None, macs: float | None = None
) -> AdaptivePlan:
    """The adaptive plan that runs on this share of the tokens, or within these multiply-accumulates."""
    cost, depth = metric.cost, metric.depth
    share = keep if macs is None else (macs - cost.outside) / (cost.macs - cost.outside)
    open_to = compressed_layers(depth, config.skip or ())

    def fits(merges: Sequence[int]) -> bool:
        merges = rounded(merges, metric, config.multiple_of)
        if macs is not None:
            return metric.macs(merges) <= macs
        return sum(metric.left(merges)) <= (keep or 0.0) * depth * metric.num_patches

    for span in Span.usual(depth, share or 0.0).narrower():
        spread = span.weights(depth, config.steps)
        weights = [weight if index in open_to else 0.0 for index, weight in enumerate(spread)]
        found = fitted(weights, metric.num_patches, fits) if any(weights) else None
        if found is not None:
            made_by = {
                "plan": record(replace(config, method="adaptive")),
                "metric": {**record(metric.config), "images": metric.images, "data": metric.data},
            }
            return AdaptivePlan(rounded(found, metric, config.multiple_of), metric, made_by)
    asked = f"{macs / 1e9:.3f} GFLOPs" if macs is not None else f"{keep} of the tokens"
    raise PmvitError(f"expected a budget that leaves a token in every block, got {asked}: raise it, or skip less")


def fitted(shape: Sequence[float], patches: int, fits: Callable[[tuple[int, ...]], bool]) -> tuple[int, ...] | None:
    """The fewest merges in these proportions that fit; `None` if none do."""
    low, high = 0.0, (patches - 1) / sum(shape)

    def scaled(factor: float) -> tuple[int, ...]:
        """Rounded sums, so that all the budget is used: counts of equal shares differ by one."""
        sums = [int(total * factor + 0.5) for total in accumulate(shape)]
        return tuple(after - before for before, after in pairwise([0, *sums]))

    found = None
    for _ in range(40):
        middle = (low + high) / 2
        merges = scaled(middle)
        if sum(merges) < patches and not fits(merges):
            low = middle
        else:
            high, found = middle, merges
    if found is None or sum(found) >= patches or not fits(found):
        return None
    while fewer := next(filter(fits, one_fewer(found)), None):  # rounds of a step are whole: more merges may cost more
        found = fewer
    return found


def one_fewer(merges: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """These merges without one of the last step, or of those before it, but only where most merge."""
    for index in reversed(range(len(merges))):
        if merges[index] == max(merges) > 0:
            yield (*merges[:index], merges[index] - 1, *merges[index + 1 :])


def rounded(merges: Sequence[int], metric: TokenMetric, multiple_of: int) -> tuple[int, ...]:
    """A few more merges, so that blocks run on multiples of so many tokens, prefix tokens included."""
    result, before = [], 0
    for after, r in zip(accumulate(merges), merges, strict=True):
        over = (metric.num_prefix + metric.num_patches - after) % multiple_of
        if metric.num_patches - after - over < 1:  # too few are left to merge more: merge fewer
            over -= multiple_of
        after = max(after + over, before) if r else before
        result.append(after - before)
        before = after
    return tuple(result)
