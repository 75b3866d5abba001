"""From merge costs to a plan: the cheapest merges of all blocks, per multiply-accumulate that they save."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from pmvit.measuring import Merge, MergeCosts
from pmvit.measuring.merge_costs import ALONE, BlockPart, before_each
from pmvit.planning.plan import LayerPlan


def merged_layers(
    merge_costs: MergeCosts, layers: Sequence[int], keep: float, least_step: float
) -> dict[int, LayerPlan]:
    """Keep this share of the patch tokens of these blocks by the cheapest merges, and at least one in each block.

    Where attention and MLP of a block have groups of their own, the share is the mean of both; where the MLP alone has,
    attention keeps every token. Where merges are nested, a block or half a block that would have hardly fewer groups
    than the one before it takes those.
    """
    merges = [merge for merge in merge_costs.merges if merge.block in layers]
    parts = [(layer, part) for layer in layers for part in merge_costs.parts[layer]]
    before = before_each(parts, ALONE in merge_costs.parts)
    on_all = sum(merge_costs.parts[layer] == ALONE for layer in layers)  # attention, in so many blocks
    wanted = (keep * (len(parts) + on_all) - on_all) * merge_costs.num_patches
    least = least_step if merge_costs.config.nested else -math.inf

    def groups_after(count: int) -> dict[BlockPart, tuple[int, BlockPart | None]]:
        """How many groups each part has after the first so many merges, and whose; `None`: every token is one."""
        done = Counter((merge.block, merge.part) for merge in merges[:count])
        every: tuple[int, BlockPart | None] = merge_costs.num_patches, None
        left, result = every, {}
        for part, last in zip(parts, before, strict=True):
            own = merge_costs.num_patches - done[part]
            left = left if last is not None else every
            if left[0] - own >= least * left[0]:
                left = own, part
            result[part] = left
        return result

    def kept(count: int) -> int:
        return sum(own for own, _ in groups_after(count).values())

    count = bisect_left(range(len(merges)), -wanted - 0.5, key=lambda count: -kept(count))
    sources = {part: source for part, (_, source) in groups_after(count).items()}
    groups = {
        source: merged_layer(
            [merge for merge in merges[:count] if (merge.block, merge.part) == source], merge_costs.grid
        )
        for source in set(sources.values())
    }
    result = {}
    for layer in layers:
        of_parts = [groups[sources[layer, part]] for part in merge_costs.parts[layer]]
        if merge_costs.parts[layer] == ALONE:
            of_parts = [LayerPlan.keep_all(merge_costs.num_patches), *of_parts]
        is_split = len(set(of_parts)) > 1
        result[layer] = replace(of_parts[0], mlp=of_parts[1]) if is_split else of_parts[0]
    return result


def merged_layer(merges: Sequence[Merge], grid: tuple[int, ...]) -> LayerPlan:
    """The plan of a block after these merges: plain means, each group at the member next to its middle."""
    members = {token: [token] for token in range(math.prod(grid))}
    for merge in merges:
        members[merge.first] += members.pop(merge.second)
    by_centre = sorted((_centre(tokens, grid), tokens) for tokens in members.values())
    groups, weights = [0] * math.prod(grid), [0.0] * math.prod(grid)
    for number, (_, tokens) in enumerate(by_centre):
        for token in tokens:
            groups[token] = number
            weights[token] = float(f"{1 / len(tokens):.8g}")
    return LayerPlan(tuple(groups), tuple(centre for centre, _ in by_centre), tuple(weights))


def _centre(tokens: list[int], grid: tuple[int, ...]) -> int:
    """The token nearest to the mean place of all; of several, the first."""
    places = {token: _place(token, grid) for token in tokens}
    middle = [sum(along) / len(tokens) for along in zip(*places.values(), strict=True)]

    def squared_distance(token: int) -> float:
        total = 0.0
        for own, mean in zip(places[token], middle, strict=True):
            total += (own - mean) ** 2
        return total

    return min(tokens, key=lambda token: (squared_distance(token), token))


def _place(token: int, grid: tuple[int, ...]) -> list[int]:
    """Where a token is along each axis of the grid."""
    place: list[int] = []
    for side in reversed(grid):
        token, along = divmod(token, side)
        place.insert(0, along)
    return place
