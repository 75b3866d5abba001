"""`AdaptivePlan`: how many tokens merge before each block, while the image says which; and how many are best.

Merging the (R + 1)-th token of an image before block l costs what the trials of the metric say: `g_l(R)` is the
divergence when R tokens merge before block l and nowhere else, so that one more merge costs its slope there, wherever
the first R merged. A schedule of R_1 <= R_2 <= ... merged tokens then costs the sum of `g_l(R_l) - g_l(R_{l-1})`, and
the cheapest one within a budget is found by dynamic programming.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pmvit.adaptive import rounds
from pmvit.config import PlanConfig, PlanOptions
from pmvit.errors import PmvitError
from pmvit.files import check_fields, parse_document
from pmvit.measuring.flops import elementwise_macs
from pmvit.measuring.metric import PROJECTIONS, TokenMetric
from pmvit.planning.plan import record
from pmvit.tensors import read_tensors, read_texts, write_tensors

if TYPE_CHECKING:
    from typing_extensions import Unpack

Numbers = NDArray[np.float64]
FORMAT, VERSION = "pmvit-adaptive-plan", 1
HEADER = "plan"  # what stands for the JSON in a file's header
BAR, WIDEST_BAR = "█", 40
STATES = 256  # numbers of merged tokens that are told apart at most


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
        return tuple(self.metric.num_patches - merged for merged in accumulate(self.merges))

    @property
    def keep(self) -> float:
        """Share of the patch tokens that a block runs on, on average."""
        return sum(self.tokens) / (self.depth * self.metric.num_patches)

    def __post_init__(self) -> None:
        left = self.metric.num_patches - sum(self.merges)
        if len(self.merges) != self.depth:
            raise PmvitError(f"merges: expected one number for each of {self.depth} blocks, got {len(self.merges)}")
        if any(isinstance(r, bool) or not isinstance(r, int) or r < 0 for r in self.merges):
            raise PmvitError(f"merges: expected whole numbers from 0, got {self.merges}")
        if left < 1:
            raise PmvitError(
                f"merges: expected at most {self.metric.num_patches - 1} in all, which leaves a token; got "
                f"{sum(self.merges)}"
            )

    def __str__(self) -> str:
        """A line a block: how many tokens merge before it, and how many it runs on."""
        whole = self.metric.num_patches
        lines = [f"adaptive plan: {_grid(self.metric.grid)} patch tokens, {self.keep:.1%} of them in a block", ""]
        lines.append(f"{'block':>5}  {'merge':>5}  {'tokens':>6}")
        for index, (r, tokens) in enumerate(zip(self.merges, self.tokens, strict=True)):
            bar = BAR * round(WIDEST_BAR * tokens / whole)
            lines.append(f"{index:>5}  {r or '-':>5}  {tokens:>6}  {bar}")
        return "\n".join(lines)

    def draw(self, columns: int = 100) -> str:
        """The same as text: which tokens merge, the image says."""
        return str(self)

    def at(self, **budget: "Unpack[PlanOptions]") -> "AdaptivePlan":
        """The plan for another budget, made from the same metric: `keep`, `gflops` or `flops_share`."""
        from pmvit.planning.planner import plan

        return plan(self.metric, **budget)

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


def _grid(grid: tuple[int, int]) -> str:
    return f"{grid[0]} x {grid[1]}"


def predicted_divergence(metric: TokenMetric, merges: Sequence[int]) -> float:
    """What the trials say that a plan does to the output."""
    curves = _curves(metric)
    merged = [0, *accumulate(merges)]
    return float(sum(curves[i, merged[i + 1]] - curves[i, merged[i]] for i in range(metric.depth)))


def adaptive_macs(metric: TokenMetric, merges: Sequence[int]) -> float:
    """Multiply-accumulates of the model with these merges: what `flops` will count on it."""
    total, count, whole = float(metric.cost.outside), metric.num_patches, metric.num_prefix + metric.num_patches
    for block, r in zip(metric.cost.blocks, merges, strict=True):
        total += step_macs(metric, block.width, count, r)
        count -= r
        total += block.macs((metric.num_prefix + count) / whole)
        if count < metric.num_patches:
            total += elementwise_macs(whole, metric.num_prefix + count, block.width)
    return total


def step_macs(metric: TokenMetric, width: int, count: int, merges: int) -> float:
    """What comparing and merging take."""
    total, numbers, isolation = 0, metric.projections.shape[-1], metric.config.isolation
    for before, r in rounds(count, merges):
        others = before // 2
        total += before * width * numbers + before**2 * isolation + (before - others) * others * numbers
        total += others * r * (width + 2)
    return float(total)


def _curves(metric: TokenMetric) -> Numbers:
    """`g_l(R)` for every block and R, (blocks, patches): straight between trials, both as logarithms."""
    counts = np.arange(metric.num_patches, dtype=np.float64)
    result = np.zeros((metric.depth, metric.num_patches))
    for block in range(metric.depth):
        found = sorted((trial.merges, trial.divergence) for trial in metric.trials if trial.block == block)
        tried = np.log([merges for merges, _ in found])
        costs = np.log(np.maximum.accumulate([max(cost, 1e-12) for _, cost in found]))
        at = np.log(counts[1:])
        lines = np.interp(at, tried, costs)
        slopes = np.maximum(np.diff(costs) / np.diff(tried), 1.0)
        lines = np.where(at < tried[0], costs[0] + slopes[0] * (at - tried[0]), lines)
        lines = np.where(at > tried[-1], costs[-1] + slopes[-1] * (at - tried[-1]), lines)
        result[block, 1:] = np.exp(lines)
    return result


class Schedules:
    """The cheapest schedules of a metric, by what a multiply-accumulate, or a token of a block, is worth."""

    def __init__(self, metric: TokenMetric, config: PlanConfig, by_tokens: bool) -> None:
        self.metric = metric
        patches, stride = metric.num_patches, math.ceil(metric.num_patches / STATES)
        skip = set() if config.skip is None else {index % metric.depth for index in config.skip}
        merged = np.arange(0, patches, stride)
        if config.multiple_of > 1:
            merged = np.arange(patches)
            merged = merged[(merged == 0) | ((metric.num_prefix + patches - merged) % config.multiple_of == 0)]
        self.merged = merged
        before, after = merged[:, None], merged[None]
        moved, left = after - before, patches - before
        self.allowed = (moved == 0) | ((moved >= config.least_step * left) & (moved <= left - 1) & (moved > 0))
        self.stays = moved == 0
        self.costs = _curves(metric)[:, merged]
        self.may_step = [index not in skip for index in range(metric.depth)]
        if by_tokens:
            share = (patches - merged) / (patches * metric.depth)
            self.work = np.tile(share, (metric.depth, 1))
            self.steps = np.zeros((metric.depth, len(merged), len(merged)))
        else:
            self.work, self.steps = self._macs()

    def _macs(self) -> tuple[Numbers, Numbers]:
        metric = self.metric
        whole = metric.num_prefix + metric.num_patches
        tokens = metric.num_prefix + metric.num_patches - self.merged
        work = np.array([[block.macs(count / whole) for count in tokens] for block in metric.cost.blocks])
        steps = np.zeros((len(self.merged), len(self.merged)))
        width = metric.cost.blocks[0].width
        for i, j in zip(*np.nonzero(self.allowed & ~self.stays), strict=True):
            steps[i, j] = step_macs(
                metric, width, metric.num_patches - int(self.merged[i]), int(self.merged[j] - self.merged[i])
            )
        return work, np.broadcast_to(steps, (metric.depth, *steps.shape))

    def best(self, worth: float) -> tuple[int, ...]:
        """The schedule with the least sum of divergence and work, work weighted by its worth."""
        states = len(self.merged)
        values = np.full(states, np.inf)
        values[0] = 0.0
        came_from = []
        for index in range(self.metric.depth):
            allowed = self.allowed if self.may_step[index] else self.stays
            costs = self.costs[index]
            total = values[:, None] + costs[None] - costs[:, None] + worth * self.steps[index]
            total = np.where(allowed, total, np.inf)
            came_from.append(total.argmin(0))
            values = total.min(0) + worth * self.work[index]
        state = int(values.argmin())
        merged = []
        for origins in reversed(came_from):
            merged.append(int(self.merged[state]))
            state = int(origins[state])
        merged = [0, *reversed(merged)]
        return tuple(after - before for before, after in pairwise(merged))


def cheapest_merges(
    metric: TokenMetric, config: PlanConfig, work: Callable[[Sequence[int]], float], target: float, unit: str
) -> tuple[int, ...]:
    """The merges with the least predicted divergence whose work is no more than the target."""
    schedules = Schedules(metric, config, by_tokens=unit == "of the tokens")
    low, high = -40.0, 20.0  # logarithms of what work is worth
    under = schedules.best(math.exp(high))
    if work(under) > target:
        raise PmvitError(f"expected a budget of at least {work(under):.4g} {unit}, got {target:.4g}")
    over = (0,) * metric.depth
    if work(over) <= target:
        return over
    for _ in range(48):
        middle = (low + high) / 2
        found = schedules.best(math.exp(middle))
        if work(found) <= target:
            high, under = middle, found
        else:
            low, over = middle, found
    candidates = [under]
    if config.multiple_of == 1:
        candidates += _stretched(metric, over, work, target)
    return min(candidates, key=lambda merges: predicted_divergence(metric, merges))


def _stretched(
    metric: TokenMetric, merges: Sequence[int], work: Callable[[Sequence[int]], float], target: float
) -> list[tuple[int, ...]]:
    """The same schedule with all counts raised in proportion until it fits; none if that leaves no token."""
    if not sum(merges):
        return []
    most = (metric.num_patches - 1) / sum(merges)
    low, high = 1.0, most
    found = []
    for _ in range(24):
        middle = (low + high) / 2
        candidate = tuple(int(r * middle) for r in merges)
        if work(candidate) <= target:
            high, found = middle, [candidate]
        else:
            low = middle
    return found


def plan_within(
    metric: TokenMetric, config: PlanConfig, *, keep: float | None = None, macs: float | None = None
) -> AdaptivePlan:
    """The adaptive plan that is predicted to lose least with this share of the tokens, or within these MACs."""
    whole = metric.depth * metric.num_patches

    def share(merges: Sequence[int]) -> float:
        return sum(metric.num_patches - merged for merged in accumulate(merges)) / whole

    def cost(merges: Sequence[int]) -> float:
        return adaptive_macs(metric, merges)

    if macs is not None:
        merges = cheapest_merges(metric, config, cost, macs, "multiply-accumulates")
    else:
        merges = cheapest_merges(metric, config, share, 1.0 if keep is None else keep, "of the tokens")
    made_by = {
        "plan": record(replace(config, method="adaptive")),
        "metric": {**record(metric.config), "images": metric.images},
    }
    return AdaptivePlan(merges, metric, made_by)
