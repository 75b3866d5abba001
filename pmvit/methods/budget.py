"""How strong a method has to be for a model to cost what it should."""

import copy
from collections.abc import Sequence

from torch import nn

from pmvit.cost import flops
from pmvit.errors import PmvitError
from pmvit.methods.base import apply, numbers_of_blocks
from pmvit.methods.tome import Tome
from pmvit.models import adapter_for

TOLERANCE = 0.01  # of the FLOPs asked for


def tome_r_for(model: nn.Module, gflops: float, *, skip: Sequence[int] = ()) -> tuple[int, ...]:
    """The tokens that ToMe has to merge in each block for a model to cost so many GFLOPs, as `flops` counts them.

    All blocks but those of `skip` merge r tokens, and the first few of them one more.

    Raises:
        PmvitError: If nothing comes within 1 % of it.
    """
    schedule, reached = nearest_tome(model, gflops, skip=skip)
    if abs(reached - gflops) > TOLERANCE * gflops:
        raise PmvitError(
            f"expected GFLOPs that ToMe can reach with this model; got {gflops:.4g}, and the nearest is {reached:.4g}"
        )
    return schedule


def nearest_tome(model: nn.Module, gflops: float, *, skip: Sequence[int] = ()) -> tuple[tuple[int, ...], float]:
    """What `tome_r_for` returns, as near as it comes, and its GFLOPs. Only shapes are computed, on no device."""
    shapes = copy.deepcopy(model).to("meta")
    adapter = adapter_for(model)
    depth = len(adapter.block_names(model))
    merging = [block for block in range(depth) if block not in numbers_of_blocks(skip, depth, "skip")]

    def schedule(total: int) -> tuple[int, ...]:
        """Part a number of tokens among the blocks that merge, as evenly as it goes."""
        rs = [0] * depth
        for rank, block in enumerate(merging):
            rs[block] = (total - rank + len(merging) - 1) // len(merging)
        return tuple(rs)

    def cost(total: int) -> float:
        return flops(apply(shapes, Tome(schedule(total)))).gflops

    low, high = 0, len(merging) * (adapter.layout(model).num_patches // 2)
    while high - low > 1:  # the more tokens are merged, the less it costs
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) >= gflops else (low, middle)
    costs = {total: cost(total) for total in (low, high)}
    nearest = min(costs, key=lambda total: abs(costs[total] - gflops))
    return schedule(nearest), costs[nearest]
