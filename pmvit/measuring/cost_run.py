"""Merge costs: run images forward and backward, and merge the tokens of every block in the cheapest order."""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from pmvit.config import MergeCostConfig
from pmvit.errors import PmvitError
from pmvit.hosts import host_of
from pmvit.hosts.modes import evaluation_mode, frozen_parameters
from pmvit.hosts.outputs import predict
from pmvit.measuring.flops import BlockCost, ModelCost, model_cost
from pmvit.measuring.listener import EffectRecorder
from pmvit.measuring.merge_costs import HALVES, BlockPart, MergeCosts
from pmvit.measuring.merging import BlockMerges, Clusters, mirrored, neighbours, order_merges
from pmvit.measuring.probe import opened, probe
from pmvit.progress import Bar
from pmvit.wrapping import fingerprint

ROWS = 512  # combinations of the images' effects that are kept; what is lost changes a cost by about 6 %


def measure_merge_costs(
    model: nn.Module, loader: Iterable[Any], config: MergeCostConfig, *, progress: bool = True
) -> MergeCosts:
    """Measure what merging tokens costs in every block; see `measure`."""
    host, batches = opened(model, loader, config.limit, "measured", "measure merges")
    layout, cost = host.layout, model_cost(model)
    near = torch.ones(2 * (layout.num_patches,), dtype=torch.bool)
    if config.groups == "neighbours":
        near = neighbours(layout.grid)
    parts, effects = _effects(model, batches, config, progress)
    merging = [BlockMerges(*part, Clusters(effects.pop(0), near), _cost(cost, part)) for part in parts]
    merges = order_merges(merging, layout.num_prefix, early=config.early, nested=config.nested)
    return MergeCosts(
        merges=tuple(merges),
        grid=layout.grid,
        num_prefix=layout.num_prefix,
        cost=cost,
        config=config,
        images=sum(map(len, batches)),
        model=fingerprint(model),
        data=str(getattr(loader, "name", type(loader).__name__)),
        skip=host.reading().default_skip,
    )


def _cost(cost: ModelCost, part: BlockPart) -> BlockCost:
    """What the multiply-accumulates of a block or of one of its halves are."""
    block, half = part
    return cost.blocks[block] if half == "block" else cost.blocks[block].halves()[HALVES.index(half)]


def _effects(
    model: nn.Module, batches: list[Tensor], config: MergeCostConfig, progress: bool
) -> tuple[list[BlockPart], list[Tensor]]:
    """Random combinations of the `E` of all images, for each block or half of one: (rows, patches, patches)."""
    host = host_of(model)
    layout = host.layout
    blocks = [model.get_submodule(name) for name in host.block_names()]
    mlps = [
        (block.get_submodule(names[0]), block.get_submodule(names[1]))
        if (names := host.part_names(block).mlp) is not None and (config.parts == "split" or each.only_mlp)
        else None
        for block, each in zip(blocks, host.layouts(), strict=True)
    ]
    generator = torch.Generator().manual_seed(config.seed)
    mirrors = config.mirror and len(host.input_size()) > 2  # a spectrogram has no left and right
    is_logits = host.outputs().gives_logits
    with ExitStack() as states:
        states.enter_context(evaluation_mode(model))
        states.enter_context(frozen_parameters(model))
        states.enter_context(host.observed())
        recorder = EffectRecorder(blocks, host.layouts(), mlps)
        states.callback(recorder.remove_hooks)
        parts = recorder.block_parts
        rows = max(min(int(config.memory * 1e9 / (8 * len(parts) * layout.num_patches**2)), ROWS), 1)
        scale = (sum(map(len, batches)) * (2 if mirrors else 1)) ** -0.5
        sums = [torch.zeros(rows, layout.num_patches, layout.num_patches) for _ in parts]
        bar = states.enter_context(Bar("measure", len(batches), show=progress))
        for images in batches:
            with torch.inference_mode(False), torch.enable_grad():
                with recorder:
                    output = predict(model, images.to(next(model.parameters()).device))
                (probe(output, is_logits, generator) * output).sum().backward()
            for part, total, kinds in zip(parts, sums, recorder.collect(), strict=True):
                effect = kinds.flatten(0, 1)
                if not torch.isfinite(effect).all():
                    raise PmvitError(
                        f"block {part[0]}: what is measured is not finite: are the logits of these images finite?"
                    )
                add_combinations(total, effect, scale, generator)
                if mirrors:
                    add_combinations(total, mirrored(effect, layout.grid), scale, generator)
            bar.advance()
    return parts, sums


def add_combinations(total: Tensor, effect: Tensor, scale: float, generator: torch.Generator) -> None:
    """Add the effect of each image to some row, with a random sign: squares add up over the rows as over images."""
    rows = torch.randint(len(total), (len(effect),), generator=generator).tolist()
    signs = (torch.randint(0, 2, (len(effect),), generator=generator) * 2 - 1).tolist()
    sums = total.numpy()  # small sums, for which waiting for threads would take longer than adding
    for row, sign, of_image in zip(rows, signs, effect.numpy(), strict=True):
        sums[row] += sign * scale * of_image
