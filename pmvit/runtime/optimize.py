"""Deployment passes: the same logits from fewer operations.

Every pass is exact; together they make a compressed model run on little more than the tokens it kept:

- *rewritten blocks*: a plain block is put together anew for what runs it (see `blocks`);
- *last-block shortcut*: where the head reads only prefix tokens, the last block computes only those;
- *dead-token removal*: what no later block and no head depends on is neither computed nor carried;
- *fused transition*: leaving a block and entering the next is one constant matrix (see `maps`);
- *form*: each transition runs in the form that is cheapest where it runs (see `transitions`).
"""

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from pmvit.compression import compression_of
from pmvit.config import InferenceConfig, InferenceOptions, with_keywords
from pmvit.config.inference import Target
from pmvit.hosts import Host, host_of
from pmvit.hosts.modes import check_trainable
from pmvit.hosts.parts import PlainParts
from pmvit.merged_mlp import mlp_matrices_of, unwrapped
from pmvit.prune_merge import PruneMerge, TokenMatrices
from pmvit.runtime.blocks.build import Half, inference_block
from pmvit.runtime.chain import BlockMaps, Step, chain, halves_of, identity_maps, maps_of
from pmvit.runtime.stages import Handed, Narrowed, Stage
from pmvit.runtime.transitions import FORMS, Transition, cheapest_form, transitions
from pmvit.runtime.window_chain import chain_windows

if TYPE_CHECKING:
    from typing_extensions import Unpack

Model = TypeVar("Model", bound=nn.Module)


@with_keywords(InferenceConfig)
def optimize_for_inference(model: Model, **options: "Unpack[InferenceOptions]") -> Model:
    """A copy of a model, compressed or not, that gives the same output faster and can no longer be trained or saved.

    Save the model itself, and optimise it after loading. It is for calling: what looks between its blocks, as timm's
    `forward_intermediates` does, finds tables there instead of tokens, unless the model was made with
    `features_only=True`.

    Args:
        model: What `compress` or `load` returned, or an original model. If it reads tokens between its blocks (a
            feature pyramid), all tokens are there after every block, and less can be left out.
        options: Fields of `InferenceConfig`.
    """
    config = InferenceConfig(**options)
    check_trainable(model)
    host_of(model)  # says which models are supported
    model = copy.deepcopy(model).eval().requires_grad_(False)
    host = host_of(model)
    host.freeze_control_flow()
    if any(layout.windows is not None for layout in host.layouts()):
        chain_windows(model, host, config.target, config.fuse)
    else:
        spans, num_read, _ = host.reading()
        read = num_read if config.tokens == "head" and len(spans) == 1 else None
        for names in spans:
            if len(spans) == 1 or any(_can_gain(host, model.get_submodule(name)) for name in names):
                _place_stages(model, host, names, read, config)
    if compression_of(model) is not None:
        del model.compression
    for module in model.modules():
        if getattr(module, "grad_checkpointing", False):
            cast("Any", module).grad_checkpointing = False
    model.inference_config = config  # type: ignore[assignment]  # a record, not a module
    return model.to(next(model.parameters()).device)


def _can_gain(host: Host, block: nn.Module) -> bool:
    """Whether the passes know what to do with a block."""
    has_own_mlp = mlp_matrices_of(block, host.part_names(block).mlp) is not None
    return has_own_mlp or isinstance(block, PruneMerge) or host.plain_parts(block) is not None


def _place_stages(model: nn.Module, host: Host, names: list[str], read: int | None, config: InferenceConfig) -> None:
    """Replace a run of blocks: all tokens go in, and the first `read` of them come out, all if it is `None`."""
    num_inputs = num_outputs = host.layout.num_tokens

    def form(matrix: Tensor) -> type[Transition]:
        return FORMS[config.form if config.form != "auto" else cheapest_form(matrix, config.target == "eager")]

    num_read = num_outputs if read is None else read
    parts = [
        _part(host, model.get_submodule(name), config.rewrite, read is not None and name == names[-1]) for name in names
    ]
    for part in parts:
        if config.target != "eager" and not part.computes_partly:
            _unfold_mlp(part.block, host, form)
    tables = chain(
        [maps for part in parts for maps in part.maps(num_inputs)],
        torch.arange(num_read),
        skip_outputs=[part.computes_partly for part in parts for _ in part.halves],
        is_mlp=[half == "mlp" for part in parts for half in part.halves],
        shortcut=config.shortcut,
        drop_dead=config.drop_dead,
        fuse=config.fuse,
    )
    steps = iter(tables.steps)
    for name, part in zip(names, parts, strict=True):
        num_inputs, halves = num_outputs, []
        for half in part.halves:
            step = next(steps)
            transition = transitions(step.transition, num_outputs, step.num_tokens, form)
            is_own = bool(transition) or name != names[0] or half == "mlp"  # not what the model gives to its blocks
            halves.append((transition, _runnable(part, half, step, config.target, is_own)))
            num_outputs = step.num_outputs
        to_head = transitions(tables.to_head, num_outputs, num_read, form) if name == names[-1] else None
        stage = Stage(num_inputs, *halves[0], to_head, mlp=halves[1] if len(halves) > 1 else None)
        if len(names) == 1 and part.wrapper is not None:
            host.answer_like(stage, part.block)
        model.set_submodule(name, stage)


class _Part(NamedTuple):
    """A block as the passes see it.

    Attributes:
        block: What runs.
        wrapper: Its compression, if that becomes part of the tables.
        plain: What it is made of, if it is rewritten, and can compute some of its tokens only.
        mlp: M and R around its MLP, if that becomes a block of its own in the tables.
    """

    block: nn.Module
    wrapper: Any
    plain: PlainParts | None
    mlp: TokenMatrices | None = None

    @property
    def computes_partly(self) -> bool:
        return self.plain is not None

    @property
    def halves(self) -> tuple[Half | None, ...]:
        return (None,) if self.mlp is None else ("attention", "mlp")

    def maps(self, num_tokens: int) -> tuple[BlockMaps, ...]:
        """One for each of the halves."""
        around = maps_of(self.wrapper) if self.wrapper is not None else identity_maps(num_tokens)
        return (around,) if self.mlp is None else halves_of(around, maps_of(self.mlp))


def _part(host: Host, block: nn.Module, rewrite: bool, feeds_head: bool) -> _Part:
    """Open a compressed block.

    Full learned matrices would only grow if they were multiplied: such a block is left as it is, unless it is the last
    one, of whose reconstruction nothing remains but the prefix tokens.
    """
    wrapper = block if isinstance(block, PruneMerge) else None
    inside = block if wrapper is None else wrapper.block
    mlp = mlp_matrices_of(inside, host.part_names(inside).mlp)
    plain = host.plain_parts(inside) if rewrite else None
    is_dense = any(matrices is not None and matrices.learn == "dense" for matrices in (wrapper, mlp))
    if is_dense and not (feeds_head and plain is not None):
        return _Part(block, None, None)
    return _Part(inside, wrapper, plain, mlp if plain is not None else None)


def _runnable(part: _Part, half: Half | None, step: Step, target: Target, is_own: bool) -> nn.Module:
    """What runs a block, or a half of it, on the tokens of its step; they may be written to if they are its own."""
    if part.plain is None:
        return part.block if part.wrapper is None else Narrowed(part.wrapper)
    has_bias = half != "mlp" and part.wrapper is not None and part.wrapper.log_sizes is not None
    bias = part.wrapper.log_sizes[step.order] if has_bias else None
    inplace = target == "eager" and is_own
    return inference_block(part.plain, step.num_tokens, step.num_outputs, bias, target, inplace, half)


def _unfold_mlp(block: nn.Module, host: Host, form: Callable[[Tensor], type[Transition]]) -> None:
    """Let a block that is not rewritten multiply with M and R around its MLP in a form that graphs can hold."""
    parts = host.part_names(block).mlp
    matrices = mlp_matrices_of(block, parts)
    if parts is None or matrices is None:
        return
    maps = maps_of(matrices)
    norm, mlp = (unwrapped(block.get_submodule(part)) for part in parts)
    merge, spread = (form(matrix)(matrix, matrix.shape[1], len(matrix)) for matrix in (maps.merge, maps.from_groups))
    block.set_submodule(parts[0], Handed(norm, before=merge))
    block.set_submodule(parts[1], Handed(mlp, after=spread))
