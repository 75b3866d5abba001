"""What happens to the patches of every block of a compressed model, as plain data: for pictures and for pages."""

from dataclasses import replace
from typing import TypedDict

import torch
from torch import nn

from pmvit.compress import Compression, compression_of
from pmvit.errors import PmvitError
from pmvit.methods.base import method_of
from pmvit.models import adapter_for
from pmvit.planning import LayerPlan
from pmvit.planning.plan import State
from pmvit.prune_merge import PRUNED, PruneMerge
from pmvit.scoring import Scores


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
    merged: int
    pruned: int
    states: list[State]
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
    layers = current_layers(model)
    adapter = adapter_for(model)
    layouts, names = adapter.layouts(model), adapter.block_names(model)
    if scores is not None:
        check_scores(scores, [layout.grid for layout in layouts])
    described: list[BlockDescription] = []
    for index, (layer, layout, name) in enumerate(zip(layers, layouts, names, strict=True)):
        windows = layout.windows
        described.append(
            {
                "block": index,
                "name": name,
                "compressed": not layer.is_identity,
                "grid": list(layout.grid),
                "windows": None if windows is None else {"size": list(windows.size), "shift": list(windows.shift)},
                "prefix": layout.num_prefix,
                "patches": layer.num_tokens,
                "kept": layer.num_kept,
                "merged": layer.num_merged,
                "pruned": layer.num_pruned,
                "states": layer.states(),
                "groups": list(layer.groups),
                "centres": list(layer.centres),
                "weights": list(layer.weights),
                "scores": None if scores is None else scores.of(index).tolist(),
            }
        )
    return described


def current_layers(model: nn.Module) -> list[LayerPlan]:
    """The plan of each block, first to last, with the weights that the model has now; fine-tuning may have moved them.

    Where tuning filled the matrices (`learn="dense"`), these are the weights of the planned members.
    """
    plan = planned(model).plan
    layers = []
    for index, name in enumerate(adapter_for(model).block_names(model)):
        layer = plan.layers.get(index, LayerPlan.keep_all(plan.num_patches(index)))
        wrapper = model.get_submodule(name)
        if isinstance(wrapper, PruneMerge):
            groups = torch.tensor(layer.groups)
            matrix = wrapper.merge_matrix().detach().float().cpu()
            weights = matrix[groups.clamp(min=0), torch.arange(len(groups))].masked_fill(groups == PRUNED, 0.0)
            layer = replace(layer, weights=tuple(weights.tolist()))
        layers.append(layer)
    return layers


def planned(model: nn.Module) -> Compression:
    """What was done to a model that a plan compressed.

    Raises:
        PmvitError: If none did.
    """
    if (method := method_of(model)) is not None:
        raise PmvitError(
            f"expected a model that a plan compressed, got one with {method.name}: it chooses tokens anew for every "
            "image, so there is no plan to draw"
        )
    compression = compression_of(model)
    if compression is None:
        raise PmvitError("expected a compressed model, got one that is not: compress it first")
    return compression


def check_scores(scores: Scores, grids: list[tuple[int, int]]) -> None:
    """Raise `PmvitError` if scores are of a model with other blocks or grids."""
    if list(scores.grids) != grids:
        wanted, got = (
            f"{len(each)} blocks of {', '.join(f'{rows} x {columns}' for rows, columns in dict.fromkeys(each))} patches"
            for each in (grids, scores.grids)
        )
        raise PmvitError(f"expected scores of {wanted}, as the model has them; got some of {got}")
