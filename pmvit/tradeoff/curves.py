"""`curve`: quality against measured latency over several budgets, all from one measurement."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from torch import nn

from pmvit.compression import compression_of, decompress
from pmvit.config import PlanConfig, PlanOptions, SpeedConfig, SpeedOptions, with_keywords
from pmvit.config.planning import BUDGETS
from pmvit.data.opening import ImageData, evaluation_loader
from pmvit.errors import PmvitError
from pmvit.evaluation.reference import reference_for
from pmvit.measuring import Measured
from pmvit.numbers.colours import BLUE, VERMILLION, to_hex
from pmvit.numbers.estimates import Estimate
from pmvit.numbers.measures import MEASURES
from pmvit.numbers.tables import NOT_MEASURED, Results, format_number
from pmvit.planning.adaptive import AdaptivePlan
from pmvit.planning.planner import plan_by
from pmvit.tradeoff.measured import measure_qualities, measure_speeds

if TYPE_CHECKING:
    from typing_extensions import Unpack

KEEPS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
MAX_DROP = 1.0  # points, where nothing else says which plan to choose
NO_BUDGET: dict[str, Any] = dict.fromkeys(BUDGETS)


@dataclass(frozen=True)
class CurvePoint:
    """The original, or a model that a plan made of it.

    Attributes:
        budget: What `plan` takes to make the plan again, as `{"keep": 0.6}`; none of the original.
        keep: Share of the patch tokens that a block runs on, on average.
        gflops: Billions of multiply-accumulates an image.
        milliseconds: A batch.
        throughput: Images a second.
        speedup: How many times faster than the original.
        quality: On the validation images.
        drop: Points lost there.
        is_chosen: It is the one that the target chooses.
    """

    budget: PlanOptions
    keep: float
    gflops: float
    milliseconds: float
    throughput: float
    speedup: Estimate
    quality: Estimate
    drop: Estimate
    is_chosen: bool = False

    @property
    def name(self) -> str:
        return " ".join(f"{name} {value}" for name, value in self.budget.items()) or "original"


@dataclass(frozen=True)
class Curve(Results):
    """Points from the original to the fastest, how their quality was measured, and where their speed was."""

    rows: list[CurvePoint]
    measure: str = "top1"
    name: ClassVar = "curve"
    note: ClassVar = (
        "Speed-ups are medians over rounds in which all take turns, losses are paired, in points; both with 95 % "
        "bootstrap intervals."
    )

    @property
    def chosen(self) -> CurvePoint | None:
        """The point that the target chooses; `None` if there is none."""
        return next((row for row in self.rows if row.is_chosen), None)

    def columns(self) -> list[str]:
        return ["budget", "GFLOPs", "ms", "speed-up", MEASURES[self.measure].title, "lost"]

    def cells(self) -> list[list[str]]:
        measure, result = MEASURES[self.measure], []
        for row in self.rows:
            costs = [format_number(row.gflops, ".3f"), format_number(row.milliseconds, ".2f")]
            lost = row.drop.text(".2f") if row.budget else NOT_MEASURED
            name = f"{row.name} (chosen)" if row.is_chosen else row.name
            result.append([name, *costs, str(row.speedup), measure.text(row.quality.value), lost])
        return result

    def draw(self, path: Path) -> None:
        """Quality over latency, with intervals; the original is a star, the chosen point has a ring."""
        from matplotlib.figure import Figure

        measure, (original, *plans) = MEASURES[self.measure], self.rows
        figure = Figure(figsize=(7.0, 4.6), layout="constrained")
        axis: Any = figure.subplots()

        def place(row: CurvePoint) -> tuple[float, float]:
            return row.milliseconds, measure.factor * row.quality.value

        across = [[row.milliseconds * (1 - row.speedup.value / row.speedup.high) for row in plans]]
        across.append([row.milliseconds * (row.speedup.value / row.speedup.low - 1) for row in plans])
        up = [[measure.factor / 100 * (row.drop.high - row.drop.value) for row in plans]]
        up.append([measure.factor / 100 * (row.drop.value - row.drop.low) for row in plans])
        axis.axhline(place(original)[1], color="black", linestyle=":", linewidth=1)
        axis.plot(*place(original), "*", color="black", markersize=12, label="original")
        x, y = zip(*map(place, plans), strict=True)
        axis.errorbar(x, y, xerr=across, yerr=up, color=to_hex(BLUE), marker="o", elinewidth=1, label="compressed")
        for number, row in enumerate(plans):
            aside = (6, 6 if number % 2 else -12)  # by turns above and below: neighbours may be close
            axis.annotate(row.name, place(row), aside, textcoords="offset points", color="0.3", size=8)
        if self.chosen is not None:
            ring = {"markersize": 15, "markerfacecolor": "none", "color": to_hex(VERMILLION), "markeredgewidth": 2}
            label = f"chosen: {self.chosen.name}, {self.chosen.speedup.value:.2f}x as fast"
            axis.plot(*place(self.chosen), "o", label=label, **ring)
        where = {"eager": "eager PyTorch"}.get(self.environment["runtime"], self.environment["runtime"])
        batch = "an image" if self.environment["batch"] == 1 else f"a batch of {self.environment['batch']}"
        axis.set(xlabel=f"ms {batch} in {where}", ylabel=measure.axis_title)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, loc="lower right")
        figure.savefig(path, format="png", dpi=110)


@with_keywords(SpeedConfig)
def curve(
    model: nn.Module,
    data: ImageData,
    measured: Measured | None = None,
    *,
    keep: Sequence[float] | None = None,
    gflops: Sequence[float] | None = None,
    plan_config: PlanConfig | None = None,
    speedup: float | None = None,
    max_drop: float | None = None,
    progress: bool = True,
    **options: "Unpack[SpeedOptions]",
) -> Curve:
    """Measure quality and speed over several budgets, and choose one: all plans come from one measurement.

    Args:
        model: The original; or a compressed model, whose weights are then compressed to every budget and compared with
            its original.
        data: Validation images, `(images, labels)` or images alone, in a loader or where they are.
        measured: What `measure` returned; a model with an adaptive plan has it with it.
        keep: Shares of the patch tokens to keep, a point each; 0.9 to 0.3 if nothing else is said.
        gflops: Or costs, in billions of multiply-accumulates.
        plan_config: Other options of the plans; its budget does not count.
        speedup: Choose the point that keeps most of those that are so many times faster than the original.
        max_drop: Choose the fastest point that loses no more points of quality; 1 if nothing else is said.
        progress: Show progress bars.
        options: Fields of `SpeedConfig`: the runtime, batch and threads that speed is measured with.

    Raises:
        PmvitError: If there is nothing to make plans from, a budget cannot be met, or two targets are given.
    """
    if speedup is not None and max_drop is not None:
        raise PmvitError("expected one of speedup and max_drop to choose by; got both")
    if keep is not None and gflops is not None:
        raise PmvitError("expected one of keep and gflops; got both")
    config = SpeedConfig(**cast("Any", options))
    budgets: list[PlanOptions] = [{"keep": share} for share in (KEEPS if keep is None else keep)]
    if gflops is not None:
        budgets = [{"gflops": cost} for cost in gflops]
    if not budgets:
        raise PmvitError("keep, gflops: expected at least one budget; got none")
    original, base, measured = _opened(model, measured)
    start = plan_config or PlanConfig(gflops=1.0)
    plans = [plan_by(replace(start, **{**NO_BUDGET, **budget}), measured) for budget in budgets]
    images = evaluation_loader(base, data)
    qualities = measure_qualities(base, original, plans, images, progress)
    (first, *speeds), where = measure_speeds(base, original, plans, config, progress)
    best, none = qualities[0].original, Estimate(0.0, 0.0, 0.0)
    points = [CurvePoint({}, 1.0, first.gflops, first.milliseconds, first.throughput, first.speedup, best, none)]
    for budget, made, speed, quality in zip(budgets, plans, speeds, qualities, strict=True):
        costs = (speed.gflops, speed.milliseconds, speed.throughput, speed.speedup)
        points.append(CurvePoint(budget, made.keep, *costs, quality.value, quality.drop))
    if speedup is not None:
        told = f"{speedup:g}x as fast"
        fit = [point for point in points[1:] if point.speedup.value >= speedup]
        chosen = min(fit, key=lambda point: point.drop.value, default=None)
    else:
        limit = MAX_DROP if max_drop is None else max_drop
        told = f"at most {limit:g} point{'' if limit == 1 else 's'} lost"
        fit = [point for point in points[1:] if point.drop.value <= limit]
        chosen = max(fit, key=lambda point: point.speedup.value, default=None)
    rows = [replace(point, is_chosen=point is chosen) for point in points]
    rows[1:] = sorted(rows[1:], key=lambda point: -point.milliseconds)
    return Curve(rows, {**where, "images": qualities[0].images, "chosen by": told}, qualities[0].measure)


def _opened(model: nn.Module, measured: Measured | None) -> tuple[nn.Module, nn.Module, Measured]:
    """The original to compare with, the uncompressed model to make smaller, and what its plans are made from."""
    compression = compression_of(model)
    if compression is not None and measured is None and isinstance(compression.what, AdaptivePlan):
        measured = compression.what.metric
    if measured is None:
        raise PmvitError("expected what pmvit.measure returned, to make plans from: only adaptive plans bring it")
    if compression is None:
        return model, model, measured
    return reference_for(model).model, decompress(copy.deepcopy(model)).eval(), measured
