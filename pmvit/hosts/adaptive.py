"""Put the blocks of an adaptive plan in the place of a model's own."""

from collections.abc import Sequence

from torch import Tensor, nn

from pmvit.adaptive import adaptive_blocks
from pmvit.hosts.host import Host, HostChange
from pmvit.merged_mlp import MeanOfPatches, MergedNorm, SpreadMlp
from pmvit.prune_merge import TokenMatrices


def place_adaptive_blocks(
    host: Host, merges: Sequence[int], projections: Tensor, *, size_weight: float
) -> list[HostChange]:
    """Let tokens merge before the blocks of a model, in place; return what else was changed.

    Args:
        host: Of the model.
        merges: How many tokens merge before each block.
        projections: What tokens are compared by before each block, (blocks, width, rank).
        size_weight: Part of the logarithm of sizes in attention, if the host can pass them on.
    """
    model, layout, names = host.model, host.layout, host.block_names()
    blocks = [model.get_submodule(name) for name in names]
    changes = host.prepare()
    wrappers = adaptive_blocks(
        blocks,
        merges,
        projections,
        layout.num_patches,
        layout.num_prefix,
        size_weight=size_weight if host.takes_attention_bias else 0.0,
        arguments_at_centres=host.arguments_at_centres,
    )
    if spares_last_mlp(host) and wrappers:
        mean = MeanOfPatches(layout.num_prefix, wrappers[len(blocks) - 1].channel)
        changes += merge_before_mlp(host, blocks[-1], mean)
    for index, wrapper in wrappers.items():
        changes += host.fit(wrapper, layout)
        host.answer_like(wrapper, blocks[index])
        model.set_submodule(names[index], wrapper)
    return changes


def spares_last_mlp(host: Host) -> bool:
    """Whether nobody reads patch tokens behind the last block, and its MLP can do without them."""
    num_read, block = host.reading().num_read, host.model.get_submodule(host.block_names()[-1])
    return num_read is not None and num_read <= host.layout.num_prefix and host.part_names(block).mlp is not None


def merge_before_mlp(
    host: Host, block: nn.Module, matrices: TokenMatrices | MeanOfPatches, rows: int | None = None
) -> list[HostChange]:
    """Give the MLP of a block, which can be told apart, groups of its own; return what was changed.

    If the block has its tokens in a grid, that has so many rows.
    """
    first, *_, last = host.part_names(block).mlp or ()
    norm, mlp = (block.get_submodule(name) for name in (first, last))
    changes = []
    for path, replacement in ((first, MergedNorm(norm, matrices)), (last, SpreadMlp(mlp, matrices, rows))):
        holder, _, name = path.rpartition(".")
        changes.append(HostChange.make(block.get_submodule(holder), name, replacement.train(block.training)))
    return changes
