"""Compress a model, by a plan or another method, and take that off again."""

import copy
import warnings
from dataclasses import replace
from functools import singledispatch
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, get_args

import torch
from torch import Tensor, nn

from pmvit.adaptive import AdaptiveBlock
from pmvit.config import PlanOptions
from pmvit.config.training import Learn
from pmvit.errors import PmvitError, PmvitWarning
from pmvit.hosts import Host, HostChange, TokenLayout, host_of
from pmvit.hosts.adaptive import merge_before_mlp, place_adaptive_blocks
from pmvit.hosts.host import Resizable, for_one_size
from pmvit.hosts.making import sides_of
from pmvit.hosts.modes import check_trainable, evaluation_mode
from pmvit.measuring.flops import block_width, model_cost
from pmvit.measuring.probe import check_measurable
from pmvit.merged_mlp import groups_of_groups
from pmvit.planning import LayerPlan, Plan
from pmvit.planning.adaptive import AdaptivePlan
from pmvit.prune_merge import PruneMerge, TokenMatrices
from pmvit.wrapping import Compression, Recipe, Tuned, fingerprint, take_off
from pmvit.wrapping import Original as Original
from pmvit.wrapping import compression_of as compression_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

Model = TypeVar("Model", bound=nn.Module)
SAVING_VERBS = ("save_pretrained", "push_to_hub")  # of other libraries' models


def compress(model: Model, what: Recipe, *, learn: Learn = "group", inplace: bool = False) -> Model:
    """Wrap blocks of a model so that they run on fewer tokens: same class, same call.

    Args:
        model: The model to compress; a copy is, unless `inplace`.
        what: What `plan` returned: an `AdaptivePlan`, which says how many tokens merge before each block, or a fixed
            `Plan`, which says which do. Blocks in which nothing merges stay unwrapped, and as many tokens leave a block
            as entered it. Or a method of `pmvit.methods`, as `Tome(r=13)`.
        learn: What fine-tuning may change of a fixed plan's M and R: `group` weights of the planned members, or `dense`
            matrices.
        inplace: Change the given model instead of a copy of it.

    An adaptive plan also fits the same model made for images of another size, of which as large a share merges. A plan
    that was measured on other weights than the model's, such as resized position embeddings, gives a `PmvitWarning`
    that names both by their fingerprints.

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
    _warn_of_other_weights(model, what, original.fingerprint)
    return model


def wrap(model: nn.Module, what: Recipe, learn: Learn, original: Original, tuned: tuple[Tuned, ...] = ()) -> None:
    """Compress a model in place that is known to be uncompressed, to be made of this original, and tuned so."""
    if isinstance(what, AdaptivePlan):
        what = _at_own_grid(what, model)
    changes = (*wrap_blocks(what, model, learn), *_without_save_pretrained(model))
    model.compression = Compression(what, learn, changes, original, tuned)  # type: ignore[assignment]  # a record


def _without_save_pretrained(model: nn.Module) -> list[HostChange]:
    """Have a compressed model refuse `save_pretrained` of its own library, which knows nothing of wrapped blocks.

    It would write weights by names that `from_pretrained` does not find, and no plan. Models inside it that hold the
    blocks, as the tower of a classifier, refuse it, too; so does whatever calls it, as a Trainer. `push_to_hub` would
    first make a repository.
    """
    blocks = host_of(model).block_names()
    changes = []
    for name, module in model.named_modules():
        if not name or any(block.startswith(f"{name}.") for block in blocks):
            able = [verb for verb in SAVING_VERBS if callable(getattr(module, verb, None))]
            changes += [HostChange.make(module, verb, _refuse_save_pretrained) for verb in able]
    return changes


def _refuse_save_pretrained(*_: Any, **__: Any) -> NoReturn:
    raise PmvitError(
        "expected pmvit.save for a compressed model, got its library's own, which would lose the compression: use "
        "pmvit.save(model, folder) and pmvit.load(folder), or pmvit.decompress the model first"
    )


def _warn_of_other_weights(model: nn.Module, what: Recipe, weights: str | None) -> None:
    """Say so if a plan was measured on another model than it is put on.

    Weights in half precision are not told from the same ones in full precision: of them nothing is said.
    """
    measured_on = what.metric.model if isinstance(what, AdaptivePlan) else getattr(what, "measured_on", None)
    is_full = next(model.parameters()).dtype == torch.float32
    if measured_on is not None and measured_on != weights and is_full:
        grids = (what.metric.grid, host_of(model).layout.grid) if isinstance(what, AdaptivePlan) else ((), ())
        before, now = (f" for {_grid(grid)} tokens" if len(set(grids)) > 1 else "" for grid in grids)
        warnings.warn(
            f"the plan was measured on weights {measured_on}{before}, and is put on a {type(model).__name__} with "
            f"weights {weights}{now}: it fits, but a plan that is measured on this model itself keeps more of it",
            PmvitWarning,
            stacklevel=3,
        )


@singledispatch
def wrap_blocks(what: Any, model: nn.Module, learn: Learn) -> list[HostChange]:
    """Put `WrappedBlock`s in the place of blocks of a model, as one kind of `what` does; one is registered a kind.

    It checks that all fits before it changes the model, and returns what else it changed.
    """
    raise PmvitError(
        f"expected a plan or a method of pmvit.methods, as Tome(r=13), to compress with; got a {type(what).__name__}: "
        "plans are made of images by pmvit.plan(pmvit.measure(model, images), keep=0.6)"
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
        if layout.only_mlp and index in plan.layers and not plan.layers[index].is_identity:
            raise PmvitError(
                f"block {index}: expected a plan with groups for its MLP alone, as its attention stays inside windows: "
                'make it from merge costs, method="measured"'
            )
    if plan.attention_bias and not host.takes_attention_bias:
        raise PmvitError(
            f"the host {host.key} says of no argument that takes an attention bias: "
            "make the plan with attention_bias=False"
        )
    changes: list[HostChange] = host.prepare()
    for index, layer in sorted(plan.layers.items()):
        block = model.get_submodule(names[index])
        if layer.mlp is not None:
            changes += _merge_before_mlp(block, layer, layer.mlp, layouts[index], learn, host)
        if layer.is_identity:
            continue
        wrapper = PruneMerge(
            block,
            *layer.tensors(),
            num_prefix=layouts[index].num_prefix,
            reconstruct=plan.reconstruct,
            learn=learn,
            attention_bias=plan.attention_bias,
            arguments_at_centres=host.arguments_at_centres,
        )
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
    metric = plan.metric
    return place_adaptive_blocks(host_of(model), plan.merges, metric.projections, size_weight=metric.config.size_weight)


def _at_own_grid(plan: AdaptivePlan, model: nn.Module) -> AdaptivePlan:
    """An adaptive plan for the grid of a model that is not compressed yet; `PmvitError` if it is for another one."""
    host = host_of(model)
    check_measurable(host, "adaptive", "merge tokens by the image")
    layout, names, metric = host.layout, host.block_names(), plan.metric
    if (len(metric.grid), metric.num_prefix) != (len(layout.grid), layout.num_prefix):
        raise PmvitError(
            f"expected a plan for {_grid(layout.grid)} tokens after {layout.num_prefix}, got one for "
            f"{_grid(metric.grid)} after {metric.num_prefix}: is it for another model?"
        )
    if plan.depth != len(names):
        raise PmvitError(f"expected a plan for {len(names)} blocks, got one for {plan.depth}: is it for another model?")
    width = block_width(host, model.get_submodule(names[0]))
    if metric.projections.shape[1] != width:
        raise PmvitError(
            f"expected a plan for an embedding dimension of {width}, got one for {metric.projections.shape[1]}: is it "
            "for another model?"
        )
    return plan if metric.grid == layout.grid else plan.at_grid(layout.grid, model_cost(model))


def _merge_before_mlp(
    block: nn.Module, layer: LayerPlan, mlp: LayerPlan, layout: TokenLayout, learn: Learn, host: Host
) -> list[HostChange]:
    """Give the MLP of a block groups of its own; return what was changed."""
    if host.part_names(block).mlp is None:
        raise PmvitError(
            f"the plan has groups for MLPs alone, and that of a {type(block).__name__} cannot be told apart: "
            'make a plan from merge costs with parts="whole"'
        )
    groups, _, weights = mlp.tensors()
    of_groups = groups_of_groups(torch.tensor(layer.groups), groups, weights)
    matrices = TokenMatrices(*of_groups, num_prefix=layout.num_prefix, learn=learn).to(next(block.parameters()))
    rows = (layout.grid[0] if layer.is_identity else 1) if host.keeps_grid else None
    return merge_before_mlp(host, block, matrices, rows)


def decompress(model: Model) -> Model:
    """Unwrap the blocks, in place: the model is again made of the very objects it was made of before `compress`.

    The exact inverse of `compress(..., inplace=True)`. What fine-tuning did to the blocks stays; M and R, or what
    another method brought, are gone.
    """
    compression = compression_of(model)
    if compression is None:
        raise PmvitError("expected a compressed model; this one is not compressed")
    take_off(model, compression.changes)
    del model.compression
    return model


def plan_of(model: nn.Module) -> Plan | None:
    """The fixed plan that a model was compressed by; `None` if it is not compressed, or by something else."""
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
    wrap(model, plan, compression.learn, compression.original, compression.tuned)
    return model


def at_size(model: Model, img_size: int | tuple[int, int]) -> Model:
    """A copy of a model for images of another size: the size it is counted, measured, benchmarked and exported at.

    Position embeddings are resized as the model's library does it, and of an adaptive plan as large shares merge. A
    model that takes any size (`dynamic_img_size` of timm, DINOv2, ...) still does.

    Args:
        model: An original model, or one with an adaptive plan.
        img_size: The side of its images in pixels, or their height and width.

    Raises:
        PmvitError: If the model is for one size, or was compressed by something else.
    """
    return resize(copy.deepcopy(model), img_size)


def resize(model: Model, img_size: int | tuple[int, int]) -> Model:
    """Do to a model itself what `at_size` does to a copy."""
    check_trainable(model)
    height, width = sides_of(img_size)
    compression = compression_of(model)
    if compression is None:
        _set_size(model, height, width)
        return model
    if not isinstance(compression.what, AdaptivePlan):
        raise PmvitError(
            f"img_size: expected a model with an adaptive plan, or none; this one has a "
            f"{type(compression.what).__name__}, which is for one size: make the model for the other, and compress that"
        )
    decompress(model)
    original = compression.original
    is_original = original.fingerprint == fingerprint(model)
    _set_size(model, height, width)
    if is_original:
        original = replace(original, fingerprint=fingerprint(model))
    wrap(model, compression.what, compression.learn, original, compression.tuned)
    return model


def _set_size(model: nn.Module, height: int, width: int) -> None:
    host = host_of(model)
    if not isinstance(host, Resizable):
        raise for_one_size(model)
    host.set_size(height, width)


def plan_of_image(model: nn.Module, image: Tensor) -> Plan | None:
    """The groups that an image, as the model takes it, has in each block, as a fixed plan; `None` without a plan."""
    compression = compression_of(model)
    if compression is None or not isinstance(compression.what, AdaptivePlan):
        return plan_of(model)
    if tuple(image.shape) != host_of(model).input_size():
        height, width = image.shape[-2:]
        return plan_of_image(at_size(model, (height, width)), image)
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


def record_tuning(model: nn.Module, tuned: Tuned) -> None:
    """Write down that the weights of a model are calibrated or fine-tuned now, if it is a compressed one."""
    compression = compression_of(model)
    if compression is not None and compression.tuned[-1:] != (tuned,):
        model.compression = replace(compression, tuned=(*compression.tuned, tuned))  # type: ignore[assignment]


def _grid(grid: tuple[int, ...]) -> str:
    return " x ".join(map(str, grid))
