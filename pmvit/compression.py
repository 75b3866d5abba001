"""Compress a model, by a plan or another method, and take that off again."""

import copy
from dataclasses import replace
from functools import singledispatch
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import torch
from torch import Tensor, nn

from pmvit.adaptive import AdaptiveBlock, adaptive_blocks
from pmvit.config import PlanOptions
from pmvit.config.training import Learn
from pmvit.errors import PmvitError
from pmvit.hosts import Host, HostChange, host_of
from pmvit.hosts.modes import check_trainable, evaluation_mode
from pmvit.measuring.flops import block_width
from pmvit.measuring.metric import check_attends_everywhere
from pmvit.merged_mlp import MergedNorm, SpreadMlp, groups_of_groups
from pmvit.planning import AdaptivePlan, LayerPlan, Plan
from pmvit.prune_merge import PruneMerge, TokenMatrices
from pmvit.wrapping import Compression, Original, Recipe, WrappedBlock, compression_of, fingerprint

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "Compression",
    "Original",
    "compress",
    "compression_of",
    "decompress",
    "plan_of",
    "plan_of_image",
    "record_source",
    "set_budget",
]

Model = TypeVar("Model", bound=nn.Module)


def compress(model: Model, what: Recipe, *, learn: Learn = "group", inplace: bool = False) -> Model:
    """Wrap blocks of a model so that they run on fewer tokens: same class, same call.

    Args:
        model: The model to compress; a copy is, unless `inplace`.
        what: A `Plan`, which says what happens in each block (those where it keeps every token are left unwrapped, and
            as many tokens come out as went in); or a method of `pmvit.methods`, as `Tome(r=13)`.
        learn: What fine-tuning may change of a plan's M and R: `group` weights of the planned members, or `dense`
            matrices.
        inplace: Change the given model instead of a copy of it.

    Raises:
        PmvitError: If the plan does not fit the model, or the method cannot do what the model needs.
    """
    if learn not in get_args(Learn):
        raise PmvitError(f"learn: expected {' or '.join(get_args(Learn))}, got {learn!r}")
    check_trainable(model)
    if compression_of(model) is not None:
        raise PmvitError("expected an uncompressed model; this one is compressed already: decompress it first")
    original = Original(fingerprint(model))
    if not inplace:
        model = copy.deepcopy(model)
    wrap(model, what, learn, original)
    return model


def wrap(model: nn.Module, what: Recipe, learn: Learn, original: Original) -> None:
    """Compress a model in place that is known to be uncompressed, and to be made of this original."""
    changes = wrap_blocks(what, model, learn)
    model.compression = Compression(what, learn, tuple(changes), original)  # type: ignore[assignment]  # a record


@singledispatch
def wrap_blocks(what: Any, model: nn.Module, learn: Learn) -> list[HostChange]:
    """Put `WrappedBlock`s in the place of blocks of a model, as one kind of `what` does; one is registered a kind.

    It checks that all fits before it changes the model, and returns what else it changed.
    """
    raise PmvitError(
        f"expected a plan or a method of pmvit.methods to compress with, as Tome(r=13); got a {type(what).__name__}"
    )


@wrap_blocks.register
def _(plan: Plan, model: nn.Module, learn: Learn) -> list[HostChange]:
    host = host_of(model)
    layouts = host.layouts()
    names = host.block_names()
    if plan.grid != layouts[0].grid:
        raise PmvitError(
            f"expected a plan for {_grid(layouts[0].grid)} tokens, got one for {_grid(plan.grid)}: "
            "was the plan made for another image or patch size?"
        )
    if plan.depth != len(names):
        raise PmvitError(f"expected a plan for {len(names)} blocks, got one for {plan.depth}: is it for another model?")
    for index, layout in enumerate(layouts):
        if plan.grids[index] != layout.grid:
            raise PmvitError(
                f"block {index}: expected a plan for {_grid(layout.grid)} tokens, got one for "
                f"{_grid(plan.grids[index])}: is it for another model?"
            )
    if plan.attention_bias and not host.takes_attention_bias:
        raise PmvitError(
            f"the host {host.key} says of no argument that takes an attention bias: "
            "make the plan with attention_bias=False"
        )
    changes: list[HostChange] = host.prepare()
    for index, layer in sorted(plan.layers.items()):
        block = model.get_submodule(names[index])
        parameter = next(block.parameters())
        if layer.mlp is not None:
            changes += _merge_before_mlp(block, layer, layer.mlp, layouts[index].num_prefix, learn, host)
        if layer.is_identity:
            continue
        groups, centres, weights = layer.tensors()
        wrapper = PruneMerge(
            block,
            groups,
            centres,
            weights,
            num_prefix=layouts[index].num_prefix,
            reconstruct=plan.reconstruct,
            learn=learn,
            attention_bias=plan.attention_bias,
            arguments_at_centres=host.arguments_at_centres,
            device=parameter.device,
            dtype=parameter.dtype,
        )
        wrapper.train(block.training)
        changes += host.fit(wrapper, layouts[index])
        host.answer_like(wrapper, block)
        model.set_submodule(names[index], wrapper)
    return changes


@wrap_blocks.register
def _(plan: AdaptivePlan, model: nn.Module, learn: Learn) -> list[HostChange]:
    if learn != "group":
        raise PmvitError(
            f"learn: it is for the matrices of a fixed plan, of which an adaptive one has none; got {learn!r}"
        )
    host = host_of(model)
    check_attends_everywhere(host)
    layout, names, metric = host.layout, host.block_names(), plan.metric
    blocks = [model.get_submodule(name) for name in names]
    if (metric.grid, metric.num_prefix) != (layout.grid, layout.num_prefix):
        raise PmvitError(
            f"expected a plan for {_grid(layout.grid)} tokens after {layout.num_prefix}, got one for "
            f"{_grid(metric.grid)} after {metric.num_prefix}: was it measured at another image or patch size?"
        )
    if plan.depth != len(names):
        raise PmvitError(f"expected a plan for {len(names)} blocks, got one for {plan.depth}: is it for another model?")
    width = block_width(host, blocks[0])
    if metric.projections.shape[1] != width:
        raise PmvitError(
            f"expected a plan for tokens of {width} numbers, got one for {metric.projections.shape[1]}: is it for "
            "another model?"
        )
    changes: list[HostChange] = host.prepare()
    wrappers = adaptive_blocks(
        blocks,
        plan.merges,
        metric.projections,
        layout.num_patches,
        layout.num_prefix,
        isolation=metric.config.isolation,
        size_weight=metric.config.size_weight if host.takes_attention_bias else 0.0,
        arguments_at_centres=host.arguments_at_centres,
    )
    for index, wrapper in wrappers.items():
        changes += host.fit(wrapper, layout)
        host.answer_like(wrapper, blocks[index])
        model.set_submodule(names[index], wrapper)
    return changes


def _merge_before_mlp(
    block: nn.Module, layer: LayerPlan, mlp: LayerPlan, num_prefix: int, learn: Learn, host: Host
) -> list[HostChange]:
    """Give the MLP of a block groups of its own; return what was changed."""
    parts = host.part_names(block).mlp
    if parts is None:
        raise PmvitError(
            f"the plan has groups for MLPs alone, and that of a {type(block).__name__} cannot be told apart: "
            'make a plan from merge costs with parts="whole"'
        )
    parameter = next(block.parameters())
    groups, _, weights = mlp.tensors()
    matrices = TokenMatrices(
        *groups_of_groups(torch.tensor(layer.groups), groups, weights),
        num_prefix=num_prefix,
        learn=learn,
        device=parameter.device,
        dtype=parameter.dtype,
    )
    hosts = [block.get_submodule(part) for part in parts]
    replacements = (MergedNorm(hosts[0], matrices), SpreadMlp(hosts[1], matrices))
    for name, replacement in zip(parts, replacements, strict=True):
        setattr(block, name, replacement.train(block.training))
    return [HostChange(block, name, host) for name, host in zip(parts, hosts, strict=True)]


def decompress(model: Model) -> Model:
    """Unwrap the blocks, in place: the model is again made of the very objects it was made of before `compress`.

    The exact inverse of `compress(..., inplace=True)`. What fine-tuning did to the blocks stays; M and R, or what
    another method brought, are gone.
    """
    compression = compression_of(model)
    if compression is None:
        raise PmvitError("expected a compressed model; this one is not compressed")
    for module, attribute, before in reversed(compression.changes):
        HostChange(module, attribute, _on_device_of(module, before)).undo()
    for name, module in list(model.named_modules()):
        if isinstance(module, WrappedBlock):
            model.set_submodule(name, module.block)
    del model.compression
    return model


def plan_of(model: nn.Module) -> Plan | None:
    """The plan that a model was compressed by, `None` if none was."""
    compression = compression_of(model)
    return compression.what if compression is not None and isinstance(compression.what, Plan) else None


def set_budget(model: Model, **budget: "Unpack[PlanOptions]") -> Model:
    """Give a model with an adaptive plan another budget, in place and without measuring again: only counts change.

    Args:
        model: What `compress` or `load` returned.
        budget: One of `keep`, `gflops` and `flops_share`, and other options of `plan`.

    Raises:
        PmvitError: If the model has no adaptive plan, or the budget cannot be met.
    """
    compression = compression_of(model)
    if compression is None or not isinstance(compression.what, AdaptivePlan):
        got = "is not compressed" if compression is None else f"has a {type(compression.what).__name__}"
        raise PmvitError(f"expected a model with an adaptive plan to give another budget; this one {got}")
    plan = compression.what.at(**budget)
    decompress(model)
    wrap(model, plan, compression.learn, compression.original)
    return model


def plan_of_image(model: nn.Module, image: Tensor) -> Plan | None:
    """The groups that an image, (3, height, width), has in each block, as a fixed plan; `None` without a plan."""
    compression = compression_of(model)
    if compression is None or not isinstance(compression.what, AdaptivePlan):
        return plan_of(model)
    host, adaptive = host_of(model), compression.what
    prefix = host.layout.num_prefix
    layers = {index: LayerPlan.keep_all(host.layout.num_patches) for index in range(adaptive.depth)}

    def listen(index: int) -> Any:
        def hook(block: AdaptiveBlock, _: Any, output: Any) -> None:
            groups, centres = block.last_groups(output[0] if isinstance(output, tuple) else output)
            of_patches, of_groups = groups[0, prefix:] - prefix, centres[0, prefix:] - prefix
            sizes = torch.bincount(of_patches)
            weights = (1 / sizes)[of_patches]
            layers[index] = LayerPlan(tuple(of_patches.tolist()), tuple(of_groups.tolist()), tuple(weights.tolist()))

        return hook

    blocks = [model.get_submodule(name) for name in host.block_names()]
    hooks = [
        block.register_forward_hook(listen(index))
        for index, block in enumerate(blocks)
        if isinstance(block, AdaptiveBlock)
    ]
    try:
        with evaluation_mode(model), torch.no_grad():
            host.call(image[None].to(next(model.parameters())))
    finally:
        for handle in hooks:
            handle.remove()
    return Plan(adaptive.metric.grid, adaptive.depth, layers, attention_bias=True, made_by=adaptive.made_by)


def record_source(
    model: nn.Module, source: str, weights: str | None = None, arguments: dict[str, Any] | None = None
) -> None:
    """Write down where the original of a compressed model was opened from, as `create_model` takes it."""
    compression = compression_of(model)
    if compression is None:
        raise PmvitError("expected a compressed model; this one is not compressed")
    original = replace(compression.original, source=source, weights=weights, arguments=arguments or {})
    model.compression = replace(compression, original=original)  # type: ignore[assignment]  # a record


def _on_device_of(module: nn.Module, value: Any) -> Any:
    """A tensor that was set aside follows its module, which may have moved since."""
    return value.to(next(module.parameters()).device) if isinstance(value, Tensor) else value


def _grid(grid: tuple[int, int]) -> str:
    return f"{grid[0]} x {grid[1]}"
