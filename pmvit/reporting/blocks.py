"""What happens to the patches of every block of a compressed model, as plain data: for pictures and for pages."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pmvit.compression import compression_of, plan_of, plan_of_image
from pmvit.errors import PmvitError
from pmvit.hosts import TokenLayout, host_of
from pmvit.measuring import Scores
from pmvit.planning import LayerPlan
from pmvit.planning.planner import AnyPlan
from pmvit.prune_merge import PRUNED, PruneMerge


class Block(NamedTuple):
    """One block of a model as it is now, fine-tuned or not."""

    number: int  # from 0
    name: str  # where it stands in the model
    layout: TokenLayout  # its grid and windows
    layer: LayerPlan  # its groups, and the weights with which patches are merged
    returns: tuple[float, ...]  # with which weight each patch gets back what its group became; 0 where it is pruned


def blocks_of(model: nn.Module, image: Tensor | None = None) -> list[Block]:
    """The blocks of a compressed model, first to last; raise `PmvitError` if no plan compressed it.

    With an adaptive plan, groups are those of a prepared image, as the model takes it; fixed ones are the same for
    all. Where tuning filled the matrices (`learn="dense"`), the weights are those of the planned members.
    """
    title, host = planned(model).title, host_of(model)
    plan = plan_of(model) if image is None else plan_of_image(model, image)
    if plan is None:
        raise PmvitError(f"expected an image to show the blocks of, for {title} lets every image choose; got none")
    made = []
    for number, (name, layout) in enumerate(zip(host.block_names(), host.layouts(), strict=True)):
        layer = plan.layers.get(number, LayerPlan.keep_all(layout.num_patches))
        returns = (1.0,) * layer.num_tokens
        wrapper = model.get_submodule(name)
        if isinstance(wrapper, PruneMerge):
            groups = torch.tensor(layer.groups)
            layer = replace(layer, weights=_entries(wrapper.merge_matrix().t(), groups))
            returns = _entries(wrapper.reconstruct_matrix(), groups)
        made.append(Block(number, name, layout, layer, returns))
    return made


def describe_blocks(
    model: nn.Module, scores: Scores | None = None, image: Tensor | None = None
) -> list[dict[str, Any]]:
    """Describe every block of a compressed model, first to last, as JSON data.

    Patches are numbered row by row, from 0 at the top left, of videos frame after frame; lists are in that order:
    `states` (`kept`: it stands for its group; `merged`; `pruned`: it passes the block by), `groups` (-1 where it is
    pruned), `weights` in the groups, as the model has them now, and `scores` (`None` without scores). `centres` are the
    kept patches of the groups. `block` is the number of a block, `name` its place in the model, `compressed` whether it
    runs on fewer tokens than it gets; `grid` the rows and columns of its patches, of videos time before them; `windows`
    those of its attention (`None`: the whole grid), `prefix` its tokens before the patches. `patches`, `kept`, `merged`
    and `pruned` are counts; `kept_in_mlp` is that of the MLP, which may have groups of its own; `share_kept` is their
    mean.

    Args:
        model: What `compress` or `load` returned.
        scores: What the plan was made from, to have them in the description.
        image: With an adaptive plan, the prepared image or video that chooses, as the model takes it.

    Raises:
        PmvitError: If the model is not compressed, or by a method without a plan; the scores are of another one; or
            there is no image to choose.
    """
    check_scores(scores, model)
    return [
        {
            "block": number,
            "name": name,
            "compressed": layer.mlp is not None or not layer.is_identity,
            "grid": list(layout.grid),
            "windows": layout.windows and {"size": list(layout.windows.size), "shift": list(layout.windows.shift)},
            "prefix": layout.num_prefix,
            "patches": layer.num_tokens,
            **layer.counts,
            "share_kept": layer.share_kept,
            "states": layer.states(),
            "groups": list(layer.groups),
            "centres": list(layer.centres),
            "weights": list(layer.weights),
            "scores": None if scores is None else scores.of(number).tolist(),
        }
        for number, name, layout, layer, _ in blocks_of(model, image)
    ]


def _entries(matrix: Tensor, groups: Tensor) -> tuple[float, ...]:
    """The entry of each token at its group, of a matrix of shape (tokens, groups)."""
    entries = matrix.detach().float().cpu()[torch.arange(len(groups)), groups.clamp(min=0)]
    return tuple(entries.masked_fill(groups == PRUNED, 0.0).tolist())


def planned(model: nn.Module) -> AnyPlan:
    """The plan that compressed a model; raise `PmvitError` if none did."""
    compression = compression_of(model)
    if compression is None:
        raise PmvitError("expected a compressed model, got one that is not: compress it first")
    if not isinstance(compression.what, AnyPlan):
        raise PmvitError(
            f"expected a model that a plan compressed, got one with {compression.what.title}: it chooses tokens anew "
            "for every image, so there is no plan to draw"
        )
    return compression.what


def check_scores(scores: Scores | None, model: nn.Module) -> None:
    """Raise `PmvitError` if there are scores and they are of a model with other blocks or grids."""
    grids = [layout.grid for layout in host_of(model).layouts()]
    if scores is not None and list(scores.grids) != grids:
        wanted, got = (f"{len(each)} blocks of {sizes(each)} patches" for each in (grids, scores.grids))
        raise PmvitError(f"expected scores of {wanted}, as the model has them; got some of {got}")


def sizes(grids: Sequence[tuple[int, ...]], times: str = "x") -> str:
    """Grids in words, each once."""
    return ", ".join(f" {times} ".join(map(str, grid)) for grid in dict.fromkeys(grids))
