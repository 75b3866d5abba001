"""From scores to a plan: Algorithms 1 and 2 of the paper, with every choice open. From merge costs to a plan: ours."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from pmvit.config import PlanConfig, PlanOptions, with_keywords
from pmvit.config.measuring import Measurement
from pmvit.errors import PmvitError
from pmvit.measuring import MergeCosts, Scores, TokenMetric
from pmvit.planning.adaptive import AdaptivePlan, plan_within
from pmvit.planning.budget import predicted_macs, solve
from pmvit.planning.grouping import group_layer
from pmvit.planning.measured import merged_layers
from pmvit.planning.plan import Plan, record
from pmvit.planning.ranking import comparable, fit_to_windows, partition

if TYPE_CHECKING:
    from typing_extensions import Unpack

Measured = Scores | MergeCosts | TokenMetric
AnyPlan = Plan | AdaptivePlan


@overload
def plan(
    measured: Scores | MergeCosts,
    *,
    meter: Callable[[Plan], float] | None = None,
    **options: "Unpack[PlanOptions]",
) -> Plan: ...


@overload
def plan(
    measured: TokenMetric,
    *,
    meter: Callable[[AdaptivePlan], float] | None = None,
    **options: "Unpack[PlanOptions]",
) -> AdaptivePlan: ...


@overload
def plan(
    measured: Measured,
    *,
    meter: Callable[[Any], float] | None = None,
    **options: "Unpack[PlanOptions]",
) -> AnyPlan: ...


@with_keywords(PlanConfig)
def plan(
    measured: Measured,
    *,
    meter: Callable[[Any], float] | None = None,
    **options: "Unpack[PlanOptions]",
) -> AnyPlan:
    """Decide how many tokens of each block merge, or which are kept, merged and pruned (Algorithms 1 and 2).

    Args:
        measured: What `measure` returned: a metric makes an adaptive plan, the others a fixed one.
        meter: For a budget in `speedup`: says how many times faster than the original a plan makes the model on this
            machine. `pmvit.runtime.bench.timing.speedup_meter` makes one.
        options: Fields of `PlanConfig`; with `method="paper"`, the paper's choices where nothing else is said.

    Raises:
        PmvitError: If the options contradict each other or the budget cannot be met.
    """
    return plan_by(PlanConfig.of(**options), measured, meter)


def plan_by(config: PlanConfig, measured: Measured, meter: Callable[[Any], float] | None = None) -> AnyPlan:
    """The plan that a configuration asks for; see `plan`."""
    _check_method(measured, config)

    def make(keep: float) -> AnyPlan:
        if isinstance(measured, TokenMetric):
            return plan_within(measured, config, keep=keep)
        if isinstance(measured, MergeCosts):
            return plan_from_merge_costs(measured, config, keep)
        return plan_for_keep(measured, config, keep)

    if config.keep is not None:
        return make(config.keep)
    if config.speedup is not None:
        if meter is None:
            raise PmvitError("a speedup is measured, not computed: pass meter=speedup_meter(model, images)")
        times_faster = meter
        return solve(make, lambda made: 1 / times_faster(made), 1 / config.speedup, "of the original's time", steps=7)
    original = measured.cost.macs / 1e9
    target = config.gflops if config.gflops is not None else (config.flops_share or 0.0) * original
    if target >= original:
        raise PmvitError(
            f"expected a budget below the {original:.3f} GFLOPs of the original, got {target:.3f}: "
            "there is nothing to compress"
        )
    if isinstance(measured, TokenMetric):
        return plan_within(measured, config, macs=target * 1e9)

    def gflops(made: AnyPlan) -> float:
        return predicted_macs(measured, made) / 1e9 if isinstance(made, Plan) else math.inf

    return solve(make, gflops, target, "GFLOPs", steps=40)


def plan_for_keep(scores: Scores, config: PlanConfig, keep: float) -> Plan:
    """The plan that keeps this share of the patch tokens; what cannot be pruned then stays."""
    skip = scores.skip if config.skip is None else config.skip
    config = replace(config, skip=skip)
    layers = compressed_layers(len(scores.values), skip)
    counts = [scores.num_patches(layer) for layer in layers]
    ranked = comparable(scores.values[layers], layers, config.normalize_layers, config.layer_decay, counts)
    pruned_share = config.pruned_share(keep)
    if config.scope == "global":
        kept, pruned = partition(ranked, keep, pruned_share, counts)
        parts = [(kept[i, :count], pruned[i, :count]) for i, count in enumerate(counts)]
    else:
        rows = [partition(ranked[i, None, :count], keep, pruned_share) for i, count in enumerate(counts)]
        parts = [(kept[0], pruned[0]) for kept, pruned in rows]
    layer_plans = {}
    for layer, row, (in_kept, in_pruned) in zip(layers, ranked, parts, strict=True):
        grid, windows = scores.grids[layer], scores.windows[layer]
        regions = order = None
        if windows is not None:
            places = windows.places(grid)
            regions, order = windows.regions(grid).flatten()[places], places // windows.area
            own = row[: len(places)]
            in_kept, in_pruned = fit_to_windows(own, int(in_kept.sum()), int(in_pruned.sum()), windows, grid)
        layer_plans[layer] = group_layer(
            scores.of(layer), in_kept, in_pruned, grid, config.grouping, config.weights, regions, order
        )
    return Plan(
        grid=scores.grid,
        depth=len(scores.values),
        layers=layer_plans,
        reconstruct=config.reconstruct,
        attention_bias=config.attention_bias,
        made_by={
            "plan": record(config),
            "scores": {**record(scores.config), "batches": scores.iterations, "images": scores.images},
        },
        grids=scores.grids,
    )


def plan_from_merge_costs(merge_costs: MergeCosts, config: PlanConfig, keep: float) -> Plan:
    """The plan that keeps this share of the patch tokens by the cheapest merges; every block keeps at least one."""
    config = replace(config, method="measured", skip=merge_costs.skip if config.skip is None else config.skip)
    layers = compressed_layers(merge_costs.depth, config.skip or ())
    return Plan(
        grid=merge_costs.grid,
        depth=merge_costs.depth,
        layers=merged_layers(merge_costs, layers, keep, config.least_step),
        reconstruct=config.reconstruct,
        attention_bias=config.attention_bias,
        made_by={"plan": record(config), "merge_costs": {**record(merge_costs.config), "images": merge_costs.images}},
    )


def _check_method(measured: Measured, config: PlanConfig) -> None:
    """See that scores, merge costs or a metric are what the options ask for."""
    names = {"adaptive": "a metric", "measured": "merge costs", "scored": "scores"}
    kinds: dict[type, Measurement] = {TokenMetric: "adaptive", MergeCosts: "measured", Scores: "scored"}
    kind = kinds[type(measured)]
    if config.method not in (None, kind):
        raise PmvitError(f'method="{config.method}" makes plans from {names[config.method]}; got {names[kind]}')
    if kind != "scored" and (changed := config.choices_for_scores):
        raise PmvitError(f"{', '.join(changed)}: expected beside scores alone; {names[kind]} leave no such choice")
    if kind != "measured" and config.least_step != PlanConfig.least_step:
        raise PmvitError(f"least_step: expected beside merge costs alone; {names[kind]} leave no such choice")
    if kind != "adaptive" and config.multiple_of != 1:
        raise PmvitError(f"multiple_of: expected beside a metric alone; got {names[kind]}, whose groups are fixed")
    if kind == "adaptive" and (config.reconstruct != "residual" or not config.attention_bias):
        raise PmvitError(
            "reconstruct, attention_bias: expected for fixed plans alone; adaptive ones keep what sets tokens apart; "
            "size_weight=0 where the metric is measured takes sizes out of attention"
        )


def compressed_layers(depth: int, skip: Sequence[int]) -> list[int]:
    """The blocks that are not skipped."""
    for index in skip:
        if not -depth <= index < depth:
            raise PmvitError(f"skip: expected blocks from {-depth} to {depth - 1}, got {index}")
    skipped = {index % depth for index in skip}
    layers = [index for index in range(depth) if index not in skipped]
    if not layers:
        raise PmvitError(f"skip: all {depth} blocks are skipped; expected at least one to compress")
    return layers


def read_plan(path: str | Path) -> AnyPlan:
    """Read a plan of either kind: adaptive ones are safetensors, fixed ones JSON."""
    return AdaptivePlan.load(path) if Path(path).suffix == ".safetensors" else Plan.load(path)
