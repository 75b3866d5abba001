"""From scores to a plan: Algorithms 1 and 2 of the paper, with every choice open. From merge costs to a plan: ours."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from pmvit.errors import PmvitError
from pmvit.measuring import MergeCosts, Scores
from pmvit.planning.budget import predicted_macs, solve
from pmvit.planning.grouping import group_layer
from pmvit.planning.measured import merged_layers
from pmvit.planning.plan import Grouping, Method, Plan, Scope, Weights, record
from pmvit.planning.ranking import comparable, fit_to_windows, partition
from pmvit.prune_merge import Reconstruct

BUDGETS = ("keep", "gflops", "flops_share", "speedup")
DEFAULT_PRUNE = 0.1
FOR_SCORES = ("prune", "scope", "normalize_layers", "layer_decay", "grouping", "weights")


@dataclass(frozen=True)
class PlanConfig:
    """How measurements become a plan. One of `keep`, `gflops`, `flops_share` and `speedup` says how much is kept.

    Attributes:
        keep: Share of the patch tokens that are kept (the paper's r); of a block on average, where blocks have
            different numbers of them.
        prune: Share of the patch tokens that are pruned (the paper's PM-threshold tau); the rest are merged. If not
            given, 0.1 or what `keep` leaves.
        gflops: Billions of multiply-accumulates the compressed model may cost, merge and reconstruct in group form
            included.
        flops_share: The same as a share of the original model's.
        speedup: How many times faster than the original the model has to be, as `plan(measure=...)` finds it.
        scope: `global` ranks the tokens of all layers together (Algorithm 2), `local` those of each layer by itself.
        normalize_layers: Divide the scores of a layer by their L2 norm before they are ranked.
        layer_decay: Multiply the scores of layer l by `1 - layer_decay * l`, but by no less than 0.1, before they are
            ranked.
        grouping: What a medium token joins: the nearest kept token in the `grid`, the nearest in its `row` of the
            image, or the next one in the sequence (`segment`: Algorithm 1 to the letter).
        weights: Weights inside a group, from its scores s: `sum` s / sum s, `normalize` s / |s|, `max` s / max s,
            `mean` s / mean s, `ones`, `gaussian` (L2-normalised scores, smoothed over the grid), or `average`,
            1 / group size whatever the scores.
        reconstruct: `residual` or `pinv`.
        attention_bias: Raise attention to a group by the logarithm of its size.
        least_step: A block, or half a block, merges anew only if that leaves this share fewer of the tokens of the one
            before it; otherwise it has the same groups. Every change takes operations, and few large ones keep as much
            of the model as many small ones.
        skip: Blocks that are left alone; negative numbers count from the last. If not given, those that the model's
            host names: none of a classifier, the first two of a feature extractor or DPT, the first two and the
            last two of a Segmenter.
        method: `scored` for a plan from scores, `measured` for one from merge costs; if not given, from what there is.

    The options `prune`, `scope`, `normalize_layers`, `layer_decay`, `grouping` and `weights` are for scores: a plan
    from merge costs is global, merges and never prunes, and takes plain means. `least_step` is for nested merge costs.
    """

    keep: float | None = None
    prune: float | None = None
    gflops: float | None = None
    flops_share: float | None = None
    speedup: float | None = None
    scope: Scope = "global"
    normalize_layers: bool = True
    layer_decay: float = 0.025
    grouping: Grouping = "grid"
    weights: Weights = "sum"
    reconstruct: Reconstruct = "residual"
    attention_bias: bool = True
    least_step: float = 0.08
    skip: tuple[int, ...] | None = None
    method: Method | None = None

    def __post_init__(self) -> None:
        if self.skip is not None:
            object.__setattr__(self, "skip", tuple(self.skip))
        if self.method is not None and self.method not in get_args(Method):
            raise PmvitError(f"method: expected {' or '.join(get_args(Method))}, got {self.method!r}")
        for name, choices in (
            ("scope", Scope),
            ("grouping", Grouping),
            ("weights", Weights),
            ("reconstruct", Reconstruct),
        ):
            if getattr(self, name) not in get_args(choices):
                raise PmvitError(f"{name}: expected one of {', '.join(get_args(choices))}; got {getattr(self, name)!r}")
        given = [name for name in BUDGETS if getattr(self, name) is not None]
        if len(given) != 1:
            raise PmvitError(f"expected one of {', '.join(BUDGETS)}; got {' and '.join(given) or 'none'}")
        value = getattr(self, given[0])
        if given[0] == "keep" and not 0 < value <= 1:
            raise PmvitError(f"keep: expected a share above 0 and up to 1, got {value}")
        if not (math.isfinite(value) and value > 0):
            raise PmvitError(f"{given[0]}: expected a finite number above 0, got {value}")
        for name in ("prune", "least_step"):
            share = getattr(self, name)
            if share is not None and not 0 <= share < 1:
                raise PmvitError(f"{name}: expected a share from 0 to below 1, got {share}")
        if self.keep is not None and self.prune is not None and self.keep + self.prune > 1 + 1e-9:
            raise PmvitError(
                f"expected keep + prune to be at most 1, got {self.keep} + {self.prune}: lower one of them"
            )

    @property
    def choices_for_scores(self) -> list[str]:
        """Those options for scores alone that are not at their defaults."""
        return [name for name in FOR_SCORES if getattr(self, name) != self.__dataclass_fields__[name].default]

    def pruned_share(self, keep: float) -> float:
        """The share to prune beside this share of kept tokens."""
        return min(DEFAULT_PRUNE if self.prune is None else self.prune, 1 - keep)


# What the paper and its code do, where the defaults above do something else.
PAPER: dict[str, Any] = {
    "grouping": "row",
    "weights": "normalize",
    "reconstruct": "pinv",
    "attention_bias": False,
}


def plan(
    source: Scores | MergeCosts,
    config: PlanConfig | None = None,
    *,
    measure: Callable[[Plan], float] | None = None,
    **options: Any,
) -> Plan:
    """Decide which tokens of each block are kept, merged and pruned: Algorithms 1 and 2, or the cheapest merges.

    Args:
        source: What `score` or `price` measured.
        config: How to decide; `options` are its fields and override it.
        measure: For a budget in `speedup`: says how many times faster than the original a plan makes the model on this
            machine. `pmvit.runtime.bench.timing.speedup_meter` makes one.

    Raises:
        PmvitError: If the options contradict each other or the budget cannot be met.
    """
    config = PlanConfig(**options) if config is None else replace(config, **options)
    _check_method(source, config)

    def make(keep: float) -> Plan:
        if isinstance(source, MergeCosts):
            return plan_from_merge_costs(source, config, keep)
        return plan_for_keep(source, config, keep)

    if config.keep is not None:
        return make(config.keep)
    if config.speedup is not None:
        if measure is None:
            raise PmvitError("a speedup is measured, not computed: pass measure=speedup_meter(model, images)")
        times_faster = measure
        return solve(make, lambda made: 1 / times_faster(made), 1 / config.speedup, "of the original's time", steps=7)
    original = source.cost.macs / 1e9
    target = config.gflops if config.gflops is not None else (config.flops_share or 0.0) * original
    if target >= original:
        raise PmvitError(
            f"expected a budget below the {original:.3f} GFLOPs of the original, got {target:.3f}: "
            "there is nothing to compress"
        )
    return solve(make, lambda made: predicted_macs(source, made) / 1e9, target, "GFLOPs", steps=40)


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
        made_by={"plan": record(config), "prices": {**record(merge_costs.config), "images": merge_costs.images}},
    )


def _check_method(source: Scores | MergeCosts, config: PlanConfig) -> None:
    """See that scores or merge costs are what the options ask for."""
    is_measured = isinstance(source, MergeCosts)
    if config.method is not None and is_measured != (config.method == "measured"):
        expected, got = ("merge costs", "scores") if config.method == "measured" else ("scores", "merge costs")
        raise PmvitError(f'method="{config.method}" makes plans from {expected}; got {got}')
    if is_measured and (changed := config.choices_for_scores):
        raise PmvitError(f"{', '.join(changed)}: expected beside scores alone; merge costs leave no such choice")
    if not is_measured and config.least_step != PlanConfig.least_step:
        raise PmvitError("least_step: expected beside merge costs alone; a plan from scores has no such choice")


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
