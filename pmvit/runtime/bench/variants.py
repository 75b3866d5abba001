"""What a benchmark lets run against each other, each made from one compressed model."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pmvit.compression import compress, compression_of, decompress
from pmvit.config.inference import Target
from pmvit.errors import PmvitError
from pmvit.hosts import Host, TokenLayout, host_of
from pmvit.measuring.flops import flops
from pmvit.merged_mlp import mlp_matrices_of, unwrapped
from pmvit.methods import Tome
from pmvit.methods.budget import nearest
from pmvit.planning import LayerPlan, Plan
from pmvit.prune_merge import PruneMerge
from pmvit.runtime.blocks.arguments import Arguments, arguments_of
from pmvit.runtime.blocks.halves import AttentionHalf, MlpHalf
from pmvit.runtime.optimize import in_windows, optimize_for_inference
from pmvit.runtime.transitions import OnGroups

Carried = Tensor | tuple[Tensor, Tensor]  # tokens; between blocks, with those that the first block was given
NO_PASSES: dict[str, Any] = {"tokens": "all", "rewrite": False, "shortcut": False, "drop_dead": False, "fuse": False}


def original(model: nn.Module, target: Target) -> nn.Module:
    """The same weights, uncompressed: the model as its library has it."""
    model = copy.deepcopy(model)
    return decompress(model) if compression_of(model) is not None else model


def original_optimized(model: nn.Module, target: Target) -> nn.Module:
    """The same weights, uncompressed, after the passes."""
    return optimize_for_inference(original(model, "eager"), target=target)


def compressed(model: nn.Module, target: Target) -> nn.Module:
    """The compressed model without the passes; for graphs in a form that they can hold."""
    return copy.deepcopy(model) if target == "eager" else optimize_for_inference(model, target=target, **NO_PASSES)


def optimized(model: nn.Module, target: Target) -> nn.Module:
    """The compressed model after the passes."""
    return optimize_for_inference(model, target=target)


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
    runs, layouts, arguments = host.reading().spans, _layouts(host), arguments_of(host)
    # What lies between two runs, or labels pixels, needs all tokens: those that were sliced away come back.
    is_whole = len(runs) > 1 or host.outputs().pixel_classes is not None
    for names in runs:
        for name in names:
            whole = model.get_submodule(name)
            inside = whole.block if isinstance(whole, PruneMerge) else whole
            parts = host.plain_parts(inside, arguments[name].at_centres)
            matrices = mlp_matrices_of(inside, host.part_names(inside).mlp)
            block, tokens = _inside(host, name, layouts[name], arguments[name])
            if parts is not None and (matrices is not None or target != "eager"):  # graphs bring masks of all tokens
                count = tokens.numel() if matrices is None else matrices.num_prefix + matrices.num_groups
                block = _SlicedBetween(AttentionHalf(parts), MlpHalf(parts), count)
            else:
                _rewire_mlp(host, whole, first=True)
            sliced = _Sliced(block, tokens.numel(), name == names[-1], is_whole)
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
    for name, layout in _layouts(host).items():
        block, tokens = _inside(host, name, layout, arguments[name])
        _rewire_mlp(host, model.get_submodule(name), first=False)
        taken = _TakenOut(block, tokens)
        host.answer_like(taken, block)
        model.set_submodule(name, taken)
    return model


def _layouts(host: Host) -> dict[str, TokenLayout]:
    return dict(zip(host.block_names(), host.layouts(), strict=True))


def _inside(host: Host, name: str, layout: TokenLayout, arguments: Arguments) -> tuple[nn.Module, Tensor]:
    """What a compressed block runs inside, on as many tokens as it has groups, and which tokens those are."""
    block = in_windows(host.model.get_submodule(name), host, layout)
    tokens = torch.arange(layout.num_tokens)
    if isinstance(block, PruneMerge):
        tokens = block.centres
        block = OnGroups(block) if arguments.given else block.block  # what it is given is for all tokens
    return block, tokens


def _rewire_mlp(host: Host, block: nn.Module, *, first: bool) -> None:
    """Let an MLP with groups of its own, and the norm before it, run on the first tokens or on one of each group."""
    inside = block.block if isinstance(block, PruneMerge) else block
    parts = host.part_names(inside).mlp
    matrices = mlp_matrices_of(inside, parts)
    if parts is None or matrices is None:
        return
    chosen = matrices.merge_columns[matrices.merge_offsets]
    num_tokens = matrices.num_prefix + matrices.num_patches
    for name, kind in zip(parts, (_NormOfSome, _MlpOfSome), strict=True):
        inside.set_submodule(name, kind(unwrapped(inside.get_submodule(name)), chosen, num_tokens, first))


class _OnSome(nn.Module):
    """A part of a block that runs on as many of its tokens as its MLP has groups."""

    chosen: Tensor

    def __init__(self, part: nn.Module, chosen: Tensor, num_tokens: int, first: bool) -> None:
        super().__init__()
        self.part = part
        self.num_others = num_tokens - chosen.numel()
        self.first = first
        self.register_buffer("chosen", chosen, persistent=False)


class _NormOfSome(_OnSome):
    """The first tokens, or the chosen ones, normalised."""

    def forward(self, tokens: Tensor) -> Tensor:
        some = tokens[:, : self.chosen.numel()] if self.first else tokens.index_select(1, self.chosen)
        normed: Tensor = self.part(some)
        return normed


class _MlpOfSome(_OnSome):
    """An MLP on them, its updates put where they belong, with none for the other tokens."""

    def forward(self, tokens: Tensor, *positional: object, **arguments: object) -> Tensor:
        update: Tensor = self.part(tokens, *positional, **arguments)
        if self.first:
            return F.pad(update, (0, 0, 0, self.num_others))
        nothing = update.new_zeros(update.shape[0], update.shape[1] + self.num_others, update.shape[2])
        return nothing.index_copy(1, self.chosen, update)


class _SlicedBetween(nn.Module):
    """A block of whose tokens the first ones go on to its MLP, and the others nowhere."""

    def __init__(self, attention: nn.Module, mlp: nn.Module, count: int) -> None:
        super().__init__()
        self.attention = attention
        self.mlp = mlp
        self.count = count

    def forward(self, tokens: Tensor, *_: object, **__: object) -> Tensor:
        attended: Tensor = self.attention(tokens)
        result: Tensor = self.mlp(attended[:, : self.count])
        return result


class _Sliced(nn.Module):
    """A block on the first tokens of what comes; what is missing to its number are tokens of the model's input."""

    def __init__(self, block: nn.Module, count: int, is_last: bool, is_whole: bool = False) -> None:
        super().__init__()
        self.block = block
        self.count = count
        self.is_last = is_last
        self.is_whole = is_whole

    def forward(self, carried: Carried, *positional: object, **arguments: object) -> Carried:
        tokens, given = carried if isinstance(carried, tuple) else (carried.flatten(1, -2), carried)
        everything = given.flatten(1, -2)
        if tokens.shape[1] > self.count:
            tokens = tokens[:, : self.count]
        elif tokens.shape[1] < self.count:
            tokens = torch.cat([tokens, everything[:, tokens.shape[1] : self.count]], dim=1)
        tokens = self.block(tokens, *positional, **arguments)
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


def tome_as_costly(model: nn.Module, target: Target) -> nn.Module:
    """ToMe with the tokens a block that come nearest to the FLOPs of the compressed model."""
    whole = original(model, "eager")
    return compress(whole, nearest(whole, Tome, flops(model).gflops)[0])


VARIANTS: dict[str, Callable[[nn.Module, Target], nn.Module]] = {
    "original": original,
    "original-optimized": original_optimized,
    "compressed": compressed,
    "optimized": optimized,
    "bound": bound,
    "direct": direct,
    "tome": tome_as_costly,
}


def variant(name: str, model: nn.Module, target: Target) -> nn.Module:
    """Make a variant of a compressed model, in evaluation mode and without gradients."""
    if name not in VARIANTS:
        raise PmvitError(f"expected variants among {', '.join(VARIANTS)}; got {name!r}")
    result: nn.Module = VARIANTS[name](model, target)
    return result.eval().requires_grad_(False)


def in_place_plan(grid: tuple[int, int], depth: int, grids: tuple[tuple[int, int], ...] = ()) -> Plan:
    """A plan that keeps every token but hands them to the blocks in another order: everything runs, nothing changes."""
    layers = {}
    for layer, (height, width) in enumerate(grids or (grid,) * depth):
        count = height * width
        centres = torch.randperm(count, generator=torch.Generator().manual_seed(layer))
        layers[layer] = LayerPlan(tuple(torch.argsort(centres).tolist()), tuple(centres.tolist()), (1.0,) * count)
    return Plan(grid, depth, layers, grids=grids)


def with_operations_in_place(model: nn.Module) -> nn.Module:
    """A model with all operations of Prune and Merge in place and nothing compressed (the paper's Table IV)."""
    grids = _grids(model)
    return compress(original(model, "eager"), in_place_plan(grids[0], len(grids), grids))


def with_all_kept(model: nn.Module) -> nn.Module:
    """A model compressed by a plan that keeps every token where it is."""
    grids = _grids(model)
    return compress(original(model, "eager"), Plan.keep_all(grids[0], len(grids), grids=grids))


def _grids(model: nn.Module) -> tuple[tuple[int, int], ...]:
    return tuple(layout.grid for layout in host_of(model).layouts())
