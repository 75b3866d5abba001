"""Apply a plan to a model and take it off again."""

import copy
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

import torch
from torch import Tensor, nn

from pmvit.config.training import Learn
from pmvit.errors import PmvitError
from pmvit.hosts import Adapter, HostChange, adapter_for
from pmvit.hosts.modes import check_trainable
from pmvit.merged_mlp import MergedNorm, SpreadMlp, mlp_matrices
from pmvit.methods.base import method_of, remove
from pmvit.planning import LayerPlan, Plan
from pmvit.prune_merge import PruneMerge

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Compression:
    """What was done to a model; `compress` leaves it on the model as `model.compression`."""

    plan: Plan
    learn: Learn
    changes: tuple[HostChange, ...]


def compression_of(model: nn.Module) -> Compression | None:
    """What was done to the model, `None` if it is not compressed."""
    found = getattr(model, "compression", None)
    return found if isinstance(found, Compression) else None


def is_compressed(model: nn.Module) -> bool:
    """Whether a plan or another method (`pmvit.methods`) was applied to the model."""
    return compression_of(model) is not None or method_of(model) is not None


def compress(model: Model, plan: Plan, *, learn: Learn = "group", inplace: bool = False) -> Model:
    """Wrap the planned blocks of a model: same class, same call, as many tokens in and out as before.

    Args:
        model: The model to compress; a copy is, unless `inplace`.
        plan: What happens in each block. Blocks where it keeps every token are left unwrapped.
        learn: What fine-tuning may change of M and R: `group` weights of the planned members, or `dense` matrices.
        inplace: Change the given model instead of a copy of it.

    Raises:
        PmvitError: If the plan does not fit the model.
    """
    if learn not in get_args(Learn):
        raise PmvitError(f"learn: expected {' or '.join(get_args(Learn))}, got {learn!r}")
    check_trainable(model)
    if is_compressed(model):
        raise PmvitError("expected an uncompressed model; this one is compressed already: decompress it first")
    adapter = adapter_for(model)
    layouts = adapter.layouts(model)
    names = adapter.block_names(model)
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
    if plan.attention_bias and not adapter.takes_attention_bias:
        raise PmvitError(
            f"the adapter for {adapter.family} says of no argument that takes an attention bias: "
            "make the plan with attention_bias=False"
        )
    if not inplace:
        model = copy.deepcopy(model)
    changes: list[HostChange] = adapter.prepare(model)
    for index, layer in sorted(plan.layers.items()):
        block = model.get_submodule(names[index])
        parameter = next(block.parameters())
        if layer.mlp is not None:
            changes += _merge_before_mlp(block, layer, layer.mlp, layouts[index].num_prefix, learn, adapter)
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
            narrow_arguments=adapter.narrow_arguments,
            device=parameter.device,
            dtype=parameter.dtype,
        )
        wrapper.train(block.training)
        changes += adapter.fit(wrapper, layouts[index])
        adapter.stand_in(wrapper, block)
        model.set_submodule(names[index], wrapper)
    model.compression = Compression(plan, learn, tuple(changes))  # type: ignore[assignment]  # a record, not a module
    return model


def _merge_before_mlp(
    block: nn.Module, layer: LayerPlan, mlp: LayerPlan, num_prefix: int, learn: Learn, adapter: Adapter
) -> list[HostChange]:
    """Give the MLP of a block groups of its own; return what was changed."""
    parts = adapter.mlp_parts(block)
    if parts is None:
        raise PmvitError(
            f"the plan has groups for MLPs alone, and that of a {type(block).__name__} cannot be told apart: "
            'make a plan from merge costs with parts="whole"'
        )
    parameter = next(block.parameters())
    groups, _, weights = mlp.tensors()
    matrices = mlp_matrices(
        torch.tensor(layer.groups),
        groups,
        weights,
        num_prefix=num_prefix,
        learn=learn,
        device=parameter.device,
        dtype=parameter.dtype,
    )
    hosts = [block.get_submodule(part) for part in parts]
    stand_ins = (MergedNorm(hosts[0], matrices), SpreadMlp(hosts[1], matrices))
    for name, stand_in in zip(parts, stand_ins, strict=True):
        setattr(block, name, stand_in.train(block.training))
    return [HostChange(block, name, host) for name, host in zip(parts, hosts, strict=True)]


def decompress(model: Model) -> Model:
    """Unwrap the blocks, in place: the model is again made of the very objects it was made of before `compress`.

    The exact inverse of `compress(..., inplace=True)`. What fine-tuning did to the blocks stays; M and R are gone.
    Other methods (`pmvit.methods`) are taken off just so.
    """
    if method_of(model) is not None:
        return remove(model)
    compression = compression_of(model)
    if compression is None:
        raise PmvitError("expected a compressed model; this one is not compressed")
    for change in reversed(compression.changes):
        setattr(change.module, change.attribute, _on_device_of(change.module, change.original))
    for name, module in list(model.named_modules()):
        if isinstance(module, PruneMerge):
            model.set_submodule(name, module.block)
    del model.compression
    return model


def _on_device_of(module: nn.Module, value: Any) -> Any:
    """A tensor that was set aside follows its module, which may have moved since."""
    return value.to(next(module.parameters()).device) if isinstance(value, Tensor) else value


def _grid(grid: tuple[int, int]) -> str:
    return f"{grid[0]} x {grid[1]}"
