"""What a benchmark lets run against each other, each made from one compressed model."""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pmvit.adaptive import AdaptiveBlock
from pmvit.compression import compress, compression_of, decompress
from pmvit.config.inference import Target
from pmvit.hosts import Host, TokenLayout, host_of
from pmvit.measuring.flops import flops
from pmvit.merged_mlp import MeanOfPatches, mlp_matrices_of, unwrapped
from pmvit.methods import Tome
from pmvit.methods.budget import nearest
from pmvit.planning import LayerPlan, Plan
from pmvit.prune_merge import PruneMerge, TokenMatrices
from pmvit.runtime.blocks.arguments import Arguments, arguments_of
from pmvit.runtime.blocks.halves import AttentionHalf, MlpHalf
from pmvit.runtime.optimize import in_windows, layouts_of, optimize_for_inference
from pmvit.runtime.transitions import OnGroups

Carried = Tensor | tuple[Tensor, Tensor]  # tokens; between blocks, with those that the first block was given
NO_PASSES: dict[str, Any] = {"tokens": "all", "rewrite": False, "shortcut": False, "drop_dead": False, "fuse": False}


def uncompressed(model: nn.Module) -> nn.Module:
    """The same weights, uncompressed: the model as its library has it."""
    model = copy.deepcopy(model)
    return decompress(model) if compression_of(model) is not None else model


def compressed(model: nn.Module, target: Target) -> nn.Module:
    """The compressed model without the passes; for graphs in a form that they can hold."""
    return copy.deepcopy(model) if target == "eager" else optimize_for_inference(model, target=target, **NO_PASSES)


def bound(model: nn.Module, target: Target) -> nn.Module:
    """The equal-token bound: as many tokens in each block, sliced away, with nothing merged and nothing reconstructed.

    It computes nothing of use, and says what fewer tokens can bring in a runtime. Its blocks are the original's; where
    an MLP has groups of its own, it runs on as many of the first tokens.
    """
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, PruneMerge):
            module.log_sizes = None  # no group has more than one member
    host = host_of(model)
    spans, layouts, arguments = host.reading().spans, layouts_of(host), arguments_of(host)
    # What lies between two spans, or reads all tokens, needs them: those that were sliced away come back.
    is_whole = len(spans) > 1 or host.reading().num_read is None
    for name in (name for names in spans for name in names):
        block, inside, tokens, matrices = _opened(host, name, layouts[name], arguments[name])
        parts = host.plain_parts(inside, arguments[name].at_centres)
        count = tokens.numel() if matrices is None else matrices.num_prefix + matrices.num_groups
        mlp = None
        if parts is not None and (matrices is not None or target != "eager"):  # graphs bring masks of all tokens
            block, mlp = AttentionHalf(parts), MlpHalf(parts)
        elif matrices is not None:
            _run_mlp_on(torch.arange(count).to(tokens), tokens.numel(), host, inside)
        is_last = any(name == names[-1] for names in spans)
        sliced = _Sliced(block, tokens.numel(), mlp, count, is_last, is_whole)
        host.answer_like(sliced, block)
        model.set_submodule(name, sliced)
    return model


def direct(model: nn.Module, target: Target) -> nn.Module:
    """The paper's "Direct" operation (Table IV): take the kept tokens out, run the block, put them back.

    Where an MLP has groups of its own, one token of each is taken out once more inside the block.
    """
    model = copy.deepcopy(model)
    host = host_of(model)
    arguments = arguments_of(host)
    for name, layout in layouts_of(host).items():
        block, inside, tokens, matrices = _opened(host, name, layout, arguments[name])
        if isinstance(matrices, TokenMatrices):
            _run_mlp_on(matrices.merge_columns[matrices.merge_offsets], tokens.numel(), host, inside)
        elif matrices is not None:
            _run_mlp_on(tokens[: matrices.num_prefix + matrices.num_groups], tokens.numel(), host, inside)
        taken = _TakenOut(block, tokens)
        host.answer_like(taken, block)
        model.set_submodule(name, taken)
    return model


def _opened(
    host: Host, name: str, layout: TokenLayout, arguments: Arguments
) -> tuple[nn.Module, nn.Module, Tensor, TokenMatrices | MeanOfPatches | None]:
    """What runs inside a compressed block on as many tokens as it has groups, the host's block in it, which tokens
    those are, and M and R around its MLP, if there are.
    """
    block = in_windows(host.model.get_submodule(name), host, layout)
    inside, tokens = block, torch.arange(layout.num_tokens, device=next(host.model.parameters()).device)
    if isinstance(block, AdaptiveBlock):
        tokens = tokens[: block.count]
        block = inside = block.block
    elif isinstance(block, PruneMerge):
        inside, tokens = block.block, block.centres
        block = OnGroups(block) if arguments.given else inside  # what it is given is for all tokens
    return block, inside, tokens, mlp_matrices_of(inside, host.part_names(inside).mlp)


def _run_mlp_on(chosen: Tensor, num_tokens: int, host: Host, block: nn.Module) -> None:
    """Let the MLP of a block, and the norm before it, run on the chosen of its tokens, with no update for others."""

    def choose(_: nn.Module, given: tuple[Tensor, ...]) -> Tensor:
        return given[0].index_select(1, chosen)

    def spread(_: nn.Module, __: tuple[Tensor, ...], update: Tensor) -> Tensor:
        return update.new_zeros(update.shape[0], num_tokens, update.shape[2]).index_copy(1, chosen, update)

    first, *_, last = host.part_names(block).mlp or ()
    names = (first, last)
    norm, mlp = (unwrapped(block.get_submodule(name)) for name in names)
    norm.register_forward_pre_hook(choose)
    mlp.register_forward_hook(spread)
    for name, part in zip(names, (norm, mlp), strict=True):
        block.set_submodule(name, part)


class _Sliced(nn.Module):
    """A block, or its attention, on the first tokens of what comes; what is missing to its number are tokens of the
    model's input. An MLP apart runs on the first of these. The last block returns tokens alone, all if they are read.
    """

    def __init__(
        self, block: nn.Module, count: int, mlp: nn.Module | None, mlp_count: int, is_last: bool, is_whole: bool
    ) -> None:
        super().__init__()
        self.block, self.count = block, count
        self.mlp, self.mlp_count = mlp, mlp_count
        self.is_last, self.is_whole = is_last, is_whole

    def forward(self, carried: Carried, *positional: object, **arguments: object) -> Carried:
        tokens, given = carried if isinstance(carried, tuple) else (carried.flatten(1, -2), carried)
        everything = given.flatten(1, -2)
        if tokens.shape[1] > self.count:
            tokens = tokens[:, : self.count]
        elif tokens.shape[1] < self.count:
            tokens = torch.cat([tokens, everything[:, tokens.shape[1] : self.count]], dim=1)
        tokens = self.block(tokens, *positional, **arguments)
        if self.mlp is not None:
            tokens = self.mlp(tokens[:, : self.mlp_count])
        if not self.is_last:
            return tokens, given
        if self.is_whole:
            tokens = torch.cat([tokens, everything[:, tokens.shape[1] :]], dim=1).view(given.shape)
        return tokens


class _TakenOut(nn.Module):
    """A block on some of the tokens; the others stay as they are."""

    tokens: Tensor

    def __init__(self, block: nn.Module, tokens: Tensor) -> None:
        super().__init__()
        self.block = block
        self.register_buffer("tokens", tokens, persistent=False)

    def forward(self, tokens: Tensor, *positional: object, **arguments: object) -> Tensor:
        everything = tokens.flatten(1, -2)
        taken = self.block(everything.index_select(1, self.tokens), *positional, **arguments)
        return everything.index_copy(1, self.tokens, taken).view(tokens.shape)


def tome_as_costly(model: nn.Module) -> nn.Module:
    """ToMe with the tokens a block that come nearest to the FLOPs of the compressed model."""
    whole = uncompressed(model)
    return compress(whole, nearest(whole, Tome, flops(model).gflops)[0])


VARIANTS: dict[str, Callable[[nn.Module, Target], nn.Module]] = {
    "original": lambda model, _: uncompressed(model),
    "original-optimized": lambda model, target: optimize_for_inference(uncompressed(model), target=target),
    "compressed": compressed,
    "optimized": lambda model, target: optimize_for_inference(model, target=target),
    "bound": bound,
    "direct": direct,
    "tome": lambda model, _: tome_as_costly(model),
}


def variant(name: str, model: nn.Module, target: Target) -> nn.Module:
    """Make a variant of a compressed model, in evaluation mode and without gradients."""
    return VARIANTS[name](model, target).eval().requires_grad_(False)


def in_place_plan(grid: tuple[int, ...], depth: int, grids: tuple[tuple[int, ...], ...] = ()) -> Plan:
    """A plan that keeps every token but hands them to the blocks in another order: everything runs, nothing changes."""
    layers = {}
    for layer, count in enumerate(map(math.prod, grids or (grid,) * depth)):
        centres = torch.randperm(count, generator=torch.Generator().manual_seed(layer))
        layers[layer] = LayerPlan(tuple(torch.argsort(centres).tolist()), tuple(centres.tolist()), (1.0,) * count)
    return Plan(grid, depth, layers, grids=grids)
