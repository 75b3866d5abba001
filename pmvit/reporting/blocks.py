"""What happens to the patches of every block of a compressed model, as plain data: for pictures and for pages."""

from dataclasses import replace
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor, nn

from pmvit.compression import compression_of, plan_of
from pmvit.errors import PmvitError
from pmvit.hosts import TokenLayout, host_of
from pmvit.measuring import Scores
from pmvit.planning import LayerPlan, Plan
from pmvit.planning.plan import TokenState
from pmvit.prune_merge import PRUNED, PruneMerge


class WindowsDescription(TypedDict):
    """Inside which parts of its grid a block attends: see `pmvit.windows.Windows`."""

    size: list[int]
    shift: list[int]


class BlockDescription(TypedDict):
    """One block. Patches are numbered row by row, from 0 at the top left; every list a patch is in that order.

    Attributes:
        block: Its number, from 0.
        name: Where it stands in the model.
        compressed: Whether it runs on fewer tokens than it gets.
        grid: Rows and columns of its patches. Blocks of a Swin have grids of their own.
        windows: The windows of its attention; `None` where it is over the whole grid.
        prefix: Tokens before the patches (class, distillation, registers), which are always kept.
        patches: How many patches come in, and go out.
        kept: How many groups there are: the patch tokens that the block itself runs on.
        kept_in_mlp: How many of them its MLP runs on: fewer, where the MLP has groups of its own.
        merged: How many patches are merged into another one.
        pruned: How many patches pass the block by.
        states: For each patch, `kept` (it stands for its group), `merged` or `pruned`.
        groups: For each patch, the number of its group, from 0; -1 where it is pruned.
        centres: For each group, the kept patch that stands for it.
        weights: For each patch, its weight in its group as the model has it now, fine-tuned or not; 0 where it is
            pruned.
        scores: For each patch, its score; `None` if there are no scores.
    """

    block: int
    name: str
    compressed: bool
    grid: list[int]
    windows: WindowsDescription | None
    prefix: int
    patches: int
    kept: int
    kept_in_mlp: int
    merged: int
    pruned: int
    states: list[TokenState]
    groups: list[int]
    centres: list[int]
    weights: list[float]
    scores: list[float] | None


def describe_blocks(model: nn.Module, scores: Scores | None = None) -> list[BlockDescription]:
    """Describe every block of a compressed model, first to last, as JSON data.

    Args:
        model: What `compress` or `load` returned.
        scores: What the plan was made from, to have them in the description.

    Raises:
        PmvitError: If the model is not compressed, or by a method without a plan; or the scores are of another one.
    """
    blocks = blocks_of(model)
    if scores is not None:
        check_scores(scores, [block.layout.grid for block in blocks])
    described: list[BlockDescription] = []
    for number, name, layout, layer, _ in blocks:
        windows = layout.windows
        described.append(
            {
                "block": number,
                "name": name,
                "compressed": layer.mlp is not None or not layer.is_identity,
                "grid": list(layout.grid),
                "windows": None if windows is None else {"size": list(windows.size), "shift": list(windows.shift)},
                "prefix": layout.num_prefix,
                "patches": layer.num_tokens,
                "kept": layer.num_kept,
                "kept_in_mlp": (layer.mlp or layer).num_kept,
                "merged": layer.num_merged,
                "pruned": layer.num_pruned,
                "states": layer.states(),
                "groups": list(layer.groups),
                "centres": list(layer.centres),
                "weights": list(layer.weights),
                "scores": None if scores is None else scores.of(number).tolist(),
            }
        )
    return described


class Block(NamedTuple):
    """One block of a model as it is now, fine-tuned or not.

    Attributes:
        number: From 0.
        name: Where it stands in the model.
        layout: Its grid and windows.
        layer: Its groups, and the weights with which patches are merged.
        returns: The weight with which each patch gets back what its group became; 0 where it is pruned.
    """

    number: int
    name: str
    layout: TokenLayout
    layer: LayerPlan
    returns: tuple[float, ...]


def blocks_of(model: nn.Module) -> list[Block]:
    """The blocks of a compressed model, first to last.

    Where tuning filled the matrices (`learn="dense"`), the weights are those of the planned members.

    Raises:
        PmvitError: If the model is not compressed, or by a method without a plan.
    """
    plan = planned(model)
    host = host_of(model)
    made = []
    for number, (name, layout) in enumerate(zip(host.block_names(), host.layouts(), strict=True)):
        layer = plan.layers.get(number, LayerPlan.keep_all(plan.num_patches(number)))
        returns = (1.0,) * layer.num_tokens
        wrapper = model.get_submodule(name)
        if isinstance(wrapper, PruneMerge):
            groups = torch.tensor(layer.groups)
            layer = replace(layer, weights=_entries(wrapper.merge_matrix().t(), groups))
            returns = _entries(wrapper.reconstruct_matrix(), groups)
        made.append(Block(number, name, layout, layer, returns))
    return made


def _entries(matrix: Tensor, groups: Tensor) -> tuple[float, ...]:
    """The entry of each token at its group, of a matrix of shape (tokens, groups)."""
    entries = matrix.detach().float().cpu()[torch.arange(len(groups)), groups.clamp(min=0)]
    return tuple(entries.masked_fill(groups == PRUNED, 0.0).tolist())


def planned(model: nn.Module) -> Plan:
    """The plan that compressed a model.

    Raises:
        PmvitError: If none did.
    """
    compression, plan = compression_of(model), plan_of(model)
    if compression is None:
        raise PmvitError("expected a compressed model, got one that is not: compress it first")
    if plan is None:
        raise PmvitError(
            f"expected a model that a plan compressed, got one with {compression.what.title}: it chooses tokens anew "
            "for every image, so there is no plan to draw"
        )
    return plan


def check_scores(scores: Scores, grids: list[tuple[int, int]]) -> None:
    """Raise `PmvitError` if scores are of a model with other blocks or grids."""
    if list(scores.grids) != grids:
        wanted, got = (
            f"{len(each)} blocks of {', '.join(f'{rows} x {columns}' for rows, columns in dict.fromkeys(each))} patches"
            for each in (grids, scores.grids)
        )
        raise PmvitError(f"expected scores of {wanted}, as the model has them; got some of {got}")
