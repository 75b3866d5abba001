"""`plan`: what to keep, by a budget that can be counted, or by a speed or a loss, for which plans are tried out."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast, overload

from torch import nn

from pmvit.compression import compression_of
from pmvit.config import PlanConfig, SpeedConfig, TargetOptions, with_keywords
from pmvit.data.opening import ImageData, evaluation_loader
from pmvit.errors import PmvitError
from pmvit.measuring import Measured, MergeCosts, Scores, TokenMetric
from pmvit.numbers.measures import MEASURES
from pmvit.planning import Plan
from pmvit.planning.adaptive import AdaptivePlan
from pmvit.planning.budget import REACHED
from pmvit.planning.planner import AnyPlan, plan_by, plan_keeping
from pmvit.progress import Bar
from pmvit.tradeoff.measured import Quality, Speed, measure_qualities, measure_speeds

if TYPE_CHECKING:
    from typing_extensions import Unpack

T = TypeVar("T")
AT_A_TIME, TIMES = 3, 3  # plans that are tried side by side, and how often, each time between two of the last


@overload
def plan(
    measured: Scores | MergeCosts,
    *,
    model: nn.Module | None = None,
    data: ImageData | None = None,
    progress: bool = True,
    **options: "Unpack[TargetOptions]",
) -> Plan: ...


@overload
def plan(
    measured: TokenMetric,
    *,
    model: nn.Module | None = None,
    data: ImageData | None = None,
    progress: bool = True,
    **options: "Unpack[TargetOptions]",
) -> AdaptivePlan: ...


@overload
def plan(
    measured: Measured,
    *,
    model: nn.Module | None = None,
    data: ImageData | None = None,
    progress: bool = True,
    **options: "Unpack[TargetOptions]",
) -> AnyPlan: ...


@with_keywords(PlanConfig, SpeedConfig)
def plan(
    measured: Measured,
    *,
    model: nn.Module | None = None,
    data: ImageData | None = None,
    progress: bool = True,
    **options: "Unpack[TargetOptions]",
) -> AnyPlan:
    """Decide how many tokens of each block merge, or which are kept, merged and pruned (Algorithms 1 and 2).

    With `speedup` or `max_drop`, nine plans are tried on the model, and the best that fits is returned; what it reached
    is in its `made_by`.

    Args:
        measured: What `measure` returned: a metric makes an adaptive plan, the others a fixed one.
        model: For `speedup` and `max_drop`: the model that it was measured on, uncompressed.
        data: For `max_drop`: validation images, `(images, labels)` or images alone, in a loader that can be read
            several times, or where they are.
        progress: Show how far the trials are.
        options: Fields of `PlanConfig` (with `method="paper"`, the paper's choices where nothing else is said) and,
            for `speedup`, of `SpeedConfig`: the runtime, batch and threads that it is for. In eager PyTorch and
            compiled it is for the device of the model.

    Raises:
        PmvitError: If the options contradict each other or the budget cannot be met.
    """
    known = {name: value for name, value in options.items() if name in SpeedConfig.__dataclass_fields__}
    others: Any = {name: value for name, value in options.items() if name not in known}
    speed = SpeedConfig(**cast("Any", known)) if known else None
    return plan_for(PlanConfig.of(**others), measured, model=model, data=data, speed=speed, progress=progress)


def plan_for(
    config: PlanConfig,
    measured: Measured,
    *,
    model: nn.Module | None = None,
    data: ImageData | None = None,
    speed: SpeedConfig | None = None,
    progress: bool = True,
) -> AnyPlan:
    """The plan that a configuration asks for; see `plan`."""
    speed = check_speed(config, speed)
    if data is not None and config.max_drop is None:
        raise PmvitError("data: expected with max_drop alone; got another budget")
    budget = config.measured_budget
    if budget is None:
        return plan_by(config, measured)
    if model is None:
        raise PmvitError(f"{budget}: it is measured, not computed: pass model=, the model that was measured")
    if compression_of(model) is not None:
        raise PmvitError(f"{budget}: expected the original as model; this one is compressed: decompress it first")
    make = partial(plan_keeping, config, measured)
    if speed is not None:
        return _fast_enough(make, model, config.speedup or 0.0, speed, progress)
    if data is None:
        raise PmvitError("max_drop: it is measured on validation images: pass data=, a loader or where they are")
    return _good_enough(make, model, config.max_drop or 0.0, evaluation_loader(model, data), progress)


def check_speed(config: PlanConfig, speed: SpeedConfig | None) -> SpeedConfig | None:
    """Where a budget in `speedup` is for, by default if nothing is said; `None` for other budgets."""
    if config.speedup is not None:
        return speed or SpeedConfig()
    if speed is not None:
        raise PmvitError("runtime, batch, threads, rounds: expected with speedup alone; got another budget")
    return None


def _fast_enough(
    make: Callable[[float], AnyPlan], model: nn.Module, wanted: float, config: SpeedConfig, progress: bool
) -> AnyPlan:
    """Of the plans that make a model so many times faster, the one that keeps most."""
    where: dict[str, Any] = {}
    with Bar("try plans", TIMES, show=progress) as bar:

        def judge(plans: Sequence[AnyPlan]) -> list[Speed]:
            (_, *speeds), found = measure_speeds(model, model, plans, config, progress=False)
            where.update(found)
            told = (f"{one.speedup.value:.2f}x at {made.keep:.0%}" for made, one in zip(plans, speeds, strict=True))
            bar.advance(f"try plans: {', '.join(told)}")
            return speeds

        best, tried = search(make, judge, lambda speed: speed.speedup.value >= wanted, fitting=0.0, failing=1.0)
    if best is None:
        most = max(tried, key=lambda trial: trial.found.speedup)
        raise PmvitError(
            f"speedup: expected at most {most.found.speedup.value:.2f}, which {most.plan.keep:.1%} of the tokens reach "
            f"in {config.runtime} with batches of {config.batch}; got {wanted:g}"
        )
    value, low, high = best.found.speedup
    times = {"milliseconds": best.found.milliseconds, "original_milliseconds": best.found.milliseconds * value}
    known = {name: where[name] for name in ("runtime", "batch", "threads", "device")}
    return _with_reached(best.plan, {"speedup": value, "interval": [low, high], **known, **times})


def _good_enough(
    make: Callable[[float], AnyPlan], model: nn.Module, allowed: float, data: Iterable[Any], progress: bool
) -> AnyPlan:
    """Of the plans that lose no more points than these, the one that keeps least."""

    def judge(plans: Sequence[AnyPlan]) -> list[Quality]:
        return measure_qualities(model, model, plans, data, progress)

    best, tried = search(make, judge, lambda quality: quality.drop.value <= allowed, fitting=1.0, failing=0.0)
    if best is None:
        least = min(tried, key=lambda trial: trial.found.drop)
        quality = least.found
        raise PmvitError(
            f"max_drop: expected at least {quality.drop.value:.2f} points of {MEASURES[quality.measure].title}, which "
            f"{least.plan.keep:.1%} of the tokens lose on {quality.images} images; got {allowed:g}"
        )
    quality = best.found
    told = {"drop": quality.drop.value, "interval": list(quality.drop[1:]), "measure": quality.measure}
    return _with_reached(best.plan, {**told, "value": quality.value.value, "images": quality.images})


def _with_reached(plan: AnyPlan, reached: dict[str, Any]) -> AnyPlan:
    return replace(plan, made_by={**plan.made_by, REACHED: reached})


@dataclass(frozen=True)
class Trial(Generic[T]):
    """A plan, and what was measured of it."""

    plan: AnyPlan
    found: T


def search(
    make: Callable[[float], AnyPlan],
    judge: Callable[[Sequence[AnyPlan]], list[T]],
    fits: Callable[[T], bool],
    *,
    fitting: float,
    failing: float,
) -> tuple[Trial[T] | None, list[Trial[T]]]:
    """Find where plans cease to fit, between a share of tokens that would fit and one that would not.

    Some shares at a time are tried, then some between two of these, and so on.

    Args:
        make: The plan that keeps a share of the tokens; raises `PmvitError` if there is none.
        judge: Measures some plans, side by side.
        fits: Whether what was measured is good enough.
        fitting: A share that would fit.
        failing: A share that would not.

    Returns:
        The trial that fits nearest to the failing end, `None` if none fits; and all trials.

    Raises:
        PmvitError: If no plan can be made.
    """
    best: Trial[T] | None = None
    tried: list[Trial[T]] = []
    for _ in range(TIMES):
        shares = [fitting + (failing - fitting) * step / (AT_A_TIME + 1) for step in range(1, AT_A_TIME + 1)]
        plans: dict[float, AnyPlan] = {}
        for share in shares:
            try:
                plans[share] = make(share)
            except PmvitError as error:
                reason = error
        if not plans and not tried:
            raise reason
        trials = dict(zip(plans, map(Trial, plans.values(), judge(list(plans.values()))), strict=True)) if plans else {}
        tried += trials.values()
        good = [share for share, trial in trials.items() if fits(trial.found)]
        if good:
            fitting, best = good[-1], trials[good[-1]]
            beyond = shares[shares.index(fitting) + 1 :]
        else:
            beyond = list(trials)
        failing = beyond[0] if beyond else failing
    return best, tried
