"""From scores to a plan: Algorithms 1 and 2 of the paper, with every choice open. From merge costs to a plan: ours."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import overload

from pmvit.config import PlanConfig
from pmvit.errors import PmvitError
from pmvit.measuring import KINDS, Measured, MergeCosts, Scores, TokenMetric, kind_of
from pmvit.planning.adaptive import AdaptivePlan, plan_within
from pmvit.planning.budget import predicted_macs, solve
from pmvit.planning.grouping import group_layer
from pmvit.planning.measured import merged_layers
from pmvit.planning.plan import Plan, compressed_layers, record
from pmvit.planning.ranking import comparable, fit_to_windows, partition

AnyPlan = Plan | AdaptivePlan


@overload
def plan_by(config: PlanConfig, measured: Scores | MergeCosts) -> Plan: ...


@overload
def plan_by(config: PlanConfig, measured: TokenMetric) -> AdaptivePlan: ...


@overload
def plan_by(config: PlanConfig, measured: Measured) -> AnyPlan: ...


def plan_by(config: PlanConfig, measured: Measured) -> AnyPlan:
    """The plan that a configuration asks for, whose budget can be counted.

    Raises:
        PmvitError: If the options contradict each other, or the budget cannot be met or has to be measured.
    """
    if (budget := config.measured_budget) is not None:
        raise PmvitError(
            f"{budget}: it is measured on a model, expected with pmvit.plan(measured, {budget}=..., model=model); "
            "expected keep, gflops or flops_share here"
        )
    if config.keep is not None:
        return plan_keeping(config, measured, config.keep)
    check_method(measured, config)
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

    return solve(partial(plan_keeping, config, measured), gflops, target)


def plan_keeping(config: PlanConfig, measured: Measured, keep: float) -> AnyPlan:
    """The plan that keeps this share of the patch tokens, whatever the budget of the configuration is."""
    check_method(measured, config)
    if isinstance(measured, TokenMetric):
        return plan_within(measured, config, keep=keep)
    if isinstance(measured, MergeCosts):
        return plan_from_merge_costs(measured, config, keep)
    return plan_for_keep(measured, config, keep)


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
            "scores": {
                **record(scores.config),
                "batches": scores.iterations,
                "images": scores.images,
                "model": scores.model,
            },
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
        made_by={
            "plan": record(config),
            "merge_costs": {**record(merge_costs.config), "images": merge_costs.images, "model": merge_costs.model},
        },
    )


def check_method(measured: Measured, config: PlanConfig) -> None:
    """See that scores, merge costs or a metric are what the options ask for."""
    kind = kind_of(measured)
    title = KINDS[kind].title
    if config.method not in (None, kind):
        raise PmvitError(f'method="{config.method}" makes plans from {KINDS[config.method].title}; got {title}')
    if kind != "scored" and (changed := config.choices_for_scores):
        raise PmvitError(f"{', '.join(changed)}: expected beside scores alone; {title} leave no such choice")
    if kind != "measured" and config.least_step != PlanConfig.least_step:
        raise PmvitError(f"least_step: expected beside merge costs alone; {title} leave no such choice")
    for name in ("multiple_of", "steps"):
        if kind != "adaptive" and getattr(config, name) != getattr(PlanConfig, name):
            raise PmvitError(f"{name}: expected beside a metric alone; got {title}, whose groups are fixed")
    if kind == "adaptive" and (config.reconstruct != "residual" or not config.attention_bias):
        raise PmvitError(
            "reconstruct, attention_bias: expected for fixed plans alone; adaptive ones keep what sets tokens apart; "
            "size_weight=0 where the metric is measured takes sizes out of attention"
        )


def read_plan(path: str | Path) -> AnyPlan:
    """Read a plan of either kind: adaptive ones are safetensors, fixed ones JSON."""
    return AdaptivePlan.load(path) if Path(path).suffix == ".safetensors" else Plan.load(path)
