"""Deployment passes: the same logits from fewer operations.

Every pass is exact; together they make a compressed model run on little more than the tokens it kept:

- *rewritten blocks*: a plain block is put together anew for what runs it (see `blocks`);
- *last-block shortcut*: where the head reads only prefix tokens, the last block computes only those;
- *dead-token removal*: what no later block and no head depends on is neither computed nor carried;
- *fused transition*: leaving a block and entering the next is one constant matrix (see `chain`);
- *form*: each transition runs in the form that is cheapest where it runs (see `transitions`).
"""

import copy
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
from torch import nn

from pmvit.adaptive import AdaptiveBlock
from pmvit.compression import compression_of
from pmvit.config import InferenceConfig, InferenceOptions, with_keywords
from pmvit.hosts import Host, TokenLayout, host_of
from pmvit.hosts.modes import check_trainable
from pmvit.hosts.parts import PlainParts
from pmvit.hosts.swin.blocks import WindowBlock
from pmvit.merged_mlp import MeanOfPatches, mlp_matrices_of, unwrapped
from pmvit.prune_merge import PruneMerge, TokenMatrices
from pmvit.runtime.adaptive import place_adaptive_stages
from pmvit.runtime.blocks.arguments import Arguments, Half, answer_like_block, arguments_of
from pmvit.runtime.blocks.build import inference_block
from pmvit.runtime.blocks.packed import Packable
from pmvit.runtime.chain import BlockMaps, ChainedBlock, chain, halves_of, identity_maps, maps_of
from pmvit.runtime.transitions import OnGroups, PartWithTransition, Stage, form_of, transitions

if TYPE_CHECKING:
    from typing_extensions import Unpack

Model = TypeVar("Model", bound=nn.Module)


@with_keywords(InferenceConfig)
def optimize_for_inference(model: Model, **options: "Unpack[InferenceOptions]") -> Model:
    """A copy of a model, compressed or not, that gives the same output faster and can no longer be trained or saved.

    Save the model itself, and optimise it after loading. It is for images of the model's own size: `at_size` gives it
    another before. It is for calling: what looks between its blocks, as timm's `forward_intermediates` does, finds
    groups there instead of tokens, unless the model was made with `features_only=True`.

    Args:
        model: What `compress` or `load` returned, or an original model. If it reads tokens between its blocks (a
            feature pyramid), all tokens are there after every block, and less can be left out.
        options: Fields of `InferenceConfig`.
    """
    config = InferenceConfig(**options)
    check_trainable(model)
    model = copy.deepcopy(model).eval().requires_grad_(False)
    host = host_of(model)
    host.freeze_control_flow()
    if any(isinstance(module, AdaptiveBlock) for module in model.modules()):
        place_adaptive_stages(model, host, config)
    else:
        _place_chains(model, host, config)
    if compression_of(model) is not None:
        del model.compression
    model.inference_config = config  # type: ignore[assignment]  # a record, not a module
    model = model.to(next(model.parameters()).device)
    for module in model.modules():
        if getattr(module, "grad_checkpointing", False):
            cast("Any", module).grad_checkpointing = False
        if isinstance(module, Packable) and config.pack is not False:
            module.pack(even_if_slower=bool(config.pack))
    return model


def _place_chains(model: nn.Module, host: Host, config: InferenceConfig) -> None:
    """Replace the blocks of every span by stages."""
    layouts = layouts_of(host)
    arguments = arguments_of(host) if config.rewrite and host.layout.windows is None else {}
    spans, num_read = host.reading()[:2]
    num_read = num_read if config.tokens == "head" and len(spans) == 1 else None
    for names in spans:
        before_head = None if num_read is None else names[-1]
        parts = {
            name: _part(host, model.get_submodule(name), layouts[name], arguments.get(name), name == before_head)
            for name in names
        }
        if layouts[names[0]].only_mlp:  # it runs on all tokens but for its MLP, and all come out
            part = parts[names[0]]
            if part.mlp_matrices is not None and config.target != "eager":
                _unfold_mlp(part.block, part.mlp_matrices, host, config)
        elif len(spans) == 1 or any(part.wrapper or part.plain or part.mlp_matrices for part in parts.values()):
            _place_stages(model, host, parts, num_read, config)


def layouts_of(host: Host) -> dict[str, TokenLayout]:
    """What the tokens of each block are, by its name."""
    return dict(zip(host.block_names(), host.layouts(), strict=True))


class _Part(NamedTuple):
    """A block as the passes see it."""

    block: nn.Module  # what runs
    layout: TokenLayout
    wrapper: PruneMerge | None = None  # its compression, if that becomes part of the chain
    plain: PlainParts | None = None  # what it is made of, if it is put together anew
    mlp_matrices: TokenMatrices | None = None  # M and R around its MLP, if there are
    given: frozenset[int | str] = frozenset()  # what the host gives it beside the tokens, by place or name
    num_beside: int | None = None  # as in `Arguments`

    def maps(self) -> dict[Half | None, BlockMaps]:
        """The maps around it, or around its halves: where it is rewritten, an MLP on groups is a block of its own."""
        around = maps_of(self.wrapper) if self.wrapper is not None else identity_maps(self.layout.num_tokens)
        around = around._replace(skips_outputs=self.plain is not None)
        if self.plain is None or self.mlp_matrices is None:
            return {None: around}
        attention, mlp = halves_of(around, maps_of(self.mlp_matrices))
        return {"attention": attention, "mlp": mlp}


def _part(host: Host, block: nn.Module, layout: TokenLayout, arguments: Arguments | None, feeds_head: bool) -> _Part:
    """Open a compressed block.

    Full learned matrices would only grow if they were multiplied: such a block is left as it is, unless it is the last
    one, of whose reconstruction nothing remains but the prefix tokens.
    """
    block = in_windows(block, host, layout)
    wrapper = block if isinstance(block, PruneMerge) else None
    inside = block if wrapper is None else wrapper.block
    matrices = mlp_matrices_of(inside, host.part_names(inside).mlp)
    if isinstance(matrices, MeanOfPatches):
        raise TypeError("expected a fixed plan: adaptive ones have passes of their own")
    plain = None if arguments is None else host.plain_parts(inside, arguments.at_centres)
    is_dense = any(some is not None and some.learn == "dense" for some in (wrapper, matrices))
    if is_dense and not (feeds_head and plain is not None):
        return _Part(block, layout)
    given, num_beside = (frozenset[int | str](), None) if arguments is None else (arguments.given, arguments.num_beside)
    return _Part(inside, layout, wrapper, plain, matrices, given, num_beside)


def in_windows(block: nn.Module, host: Host, layout: TokenLayout) -> nn.Module:
    """The block; if it runs on windows and on all tokens, as a compressed one that takes them window by window."""
    if isinstance(block, PruneMerge) or layout.windows is None:
        return block
    tokens = torch.argsort(layout.windows.places(layout.grid))
    wrapper = PruneMerge(block, torch.argsort(tokens), tokens, torch.ones(len(tokens)))
    host.fit(wrapper, layout)
    return wrapper.eval().requires_grad_(False)


def _place_stages(
    model: nn.Module, host: Host, parts: dict[str, _Part], num_read: int | None, config: InferenceConfig
) -> None:
    """Replace a span of blocks: all tokens go in, and the first `num_read` of them come out, all if it is `None`."""
    first, last = next(iter(parts)), next(reversed(parts))
    num_outputs = parts[first].layout.num_tokens
    num_read = num_outputs if num_read is None else num_read
    maps = {name: part.maps() for name, part in parts.items()}
    chained, from_last = chain([half for halves in maps.values() for half in halves.values()], num_read, config)
    blocks = iter(chained)
    for name, part in parts.items():
        num_inputs, halves = num_outputs, []
        for half in maps[name]:
            block = next(blocks)
            transition = transitions(block.transition, num_outputs, len(block.order), config)
            is_own = bool(transition) or name != first or half == "mlp"  # not what the model gives to its blocks
            halves.append((transition, _runnable(host, part, half, block, is_own, config)))
            num_outputs = block.num_outputs
        to_head = transitions(from_last, num_outputs, num_read, config) if name == last else None
        grid = part.layout.grid if host.keeps_grid else None
        stage = Stage(num_inputs, *halves[0], to_head, halves[1] if len(halves) > 1 else None, grid)
        if part.layout.windows is not None or (first == last and part.wrapper is not None):
            host.answer_like(stage, part.block)
        answer_like_block(stage, part.num_beside)
        model.set_submodule(name, stage)


def _runnable(
    host: Host, part: _Part, half: Half | None, chained: ChainedBlock, is_own: bool, config: InferenceConfig
) -> nn.Module:
    """What runs a block, or a half of it, on the tokens of the chain; they may be written to if they are its own."""
    target = config.target
    inplace = target == "eager" and is_own
    if part.plain is not None:
        return inference_block(part.plain, chained.order, chained.num_outputs, target, inplace, half, part.given)
    inside = part.block.block if isinstance(part.block, PruneMerge) else part.block
    if isinstance(inside, WindowBlock):
        inside.freeze(explicit=target == "onnx", inplace=inplace and part.wrapper is not None)
        part.block._forward_hooks.clear()  # the stage answers like the host's block in its place
        return part.block
    if part.mlp_matrices is not None and target != "eager":
        _unfold_mlp(part.block, part.mlp_matrices, host, config)
    return part.block if part.wrapper is None else OnGroups(part.wrapper)


def _unfold_mlp(block: nn.Module, matrices: TokenMatrices, host: Host, config: InferenceConfig) -> None:
    """Let a block that is not rewritten multiply with M and R around its MLP in a form that graphs can hold."""
    first, *_, last = host.part_names(block).mlp or ()
    names = (first, last)
    maps, groups = maps_of(matrices), torch.arange(matrices.num_prefix + matrices.num_groups)
    merge, spread = (
        form_of(matrix, config)(matrix, matrix.shape[1], matrix.shape[0])
        for matrix in (maps.enter.index_select(0, groups).coalesce(), maps.leave.index_select(1, groups).coalesce())
    )
    merged, spreads = (block.get_submodule(name) for name in names)
    rows = getattr(spreads, "rows", None)
    block.set_submodule(names[0], PartWithTransition(unwrapped(merged), before=merge))
    block.set_submodule(names[1], PartWithTransition(unwrapped(spreads), after=spread, rows=rows))
