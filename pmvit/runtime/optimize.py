"""Deployment passes: the same logits from fewer operations.

Every pass is exact; together they make a compressed model run on little more than the tokens it kept:

- *last-block shortcut*: where the head reads only prefix tokens, the last block computes only those;
- *dead-token removal*: what no later block and no head depends on is neither computed nor carried;
- *fused hand-over*: leaving a block and entering the next is one constant matrix (see `maps`);
- *form*: each hand-over runs in the form that is cheapest where it runs (see `stages`).
"""

import copy
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn

from pmvit.compress import check_trainable, compression_of
from pmvit.errors import PmvitError
from pmvit.models import adapter_for
from pmvit.prune_merge import PruneMerge
from pmvit.runtime.maps import chain, identity_maps, maps_of
from pmvit.runtime.stages import FORMS, Form, HandOver, Narrowed, Stage

Model = TypeVar("Model", bound=nn.Module)
Target = Literal["eager", "graph"]


@dataclass(frozen=True)
class InferenceConfig:
    """Which passes run, and for what.

    Attributes:
        target: `eager` for PyTorch as it is; `graph` for exporters and compilers, which want no writing in place.
        tokens: `head` if only what the head reads is needed of the last block; `all` if tokens are read too, as by a
            segmentation decoder.
        drop_dead: Leave out what nothing depends on.
        fuse: Leave a block and enter the next in one matrix.
        form: Of the hand-overs; `auto` is `segment` in eager PyTorch and `gather` in graphs.
    """

    target: Target = "eager"
    tokens: Literal["head", "all"] = "head"
    drop_dead: bool = True
    fuse: bool = True
    form: Form | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        for name, expected in (("target", get_args(Target)), ("tokens", ("head", "all")), ("form", ("auto", *FORMS))):
            if getattr(self, name) not in expected:
                raise PmvitError(f"{name}: expected {' or '.join(expected)}, got {getattr(self, name)!r}")


def optimize_for_inference(model: Model, **options: Any) -> Model:
    """A copy of a model, compressed or not, that gives the same output faster and can no longer be trained or saved.

    Save the model itself, and optimise it after loading.

    Args:
        model: What `compress` or `load` returned, or an original model.
        options: Fields of `InferenceConfig`.
    """
    config = InferenceConfig(**options)
    check_trainable(model)
    adapter = adapter_for(model)
    layout = adapter.layout(model)
    names = adapter.block_names(model)
    model = copy.deepcopy(model).eval().requires_grad_(False)
    blocks = [model.get_submodule(name) for name in names]
    read = adapter.tokens_read(model) if config.tokens == "head" else None
    num_read = layout.num_tokens if read is None else read
    partly = [adapter.computes_partly(_inside(block)) for block in blocks]
    opened = [isinstance(block, PruneMerge) and block.learn == "group" for block in blocks]
    if isinstance(blocks[-1], PruneMerge) and partly[-1] and read is not None:
        opened[-1] = True  # of a dense reconstruction nothing is left but prefix tokens
    maps = [
        maps_of(b) if is_open else identity_maps(layout.num_tokens) for b, is_open in zip(blocks, opened, strict=True)
    ]
    closed = [isinstance(b, PruneMerge) and not is_open for b, is_open in zip(blocks, opened, strict=True)]
    tables = chain(
        maps,
        torch.arange(num_read),
        skip_outputs=[can and not is_closed for can, is_closed in zip(partly, closed, strict=True)],
        drop_dead=config.drop_dead,
        fuse=config.fuse,
    )
    num_outputs = layout.num_tokens
    for name, block, step, can, is_closed in zip(names, blocks, tables.steps, partly, closed, strict=True):
        hand_over = _hand_overs(step.hand_over, num_outputs, step.num_tokens, config)
        if can and not is_closed:
            bias = (
                block.log_sizes[step.order] if isinstance(block, PruneMerge) and block.log_sizes is not None else None
            )
            inplace = config.target == "eager" and (bool(hand_over) or name != names[0])
            inside = adapter.inference_block(_inside(block), step.num_outputs, bias, inplace)
        else:
            inside = Narrowed(block) if isinstance(block, PruneMerge) and not is_closed else block
        num_outputs = step.num_outputs
        to_head = _hand_overs(tables.to_head, num_outputs, num_read, config) if name == names[-1] else None
        model.set_submodule(name, Stage(hand_over, inside, to_head))
    if compression_of(model) is not None:
        del model.compression
    model.inference_config = config  # type: ignore[assignment]  # a record, not a module
    return model.to(next(model.parameters()).device)


def _inside(block: nn.Module) -> nn.Module:
    return block.block if isinstance(block, PruneMerge) else block


def _hand_overs(
    matrices: tuple[Tensor, ...], num_outputs: int, num_tokens: int, config: InferenceConfig
) -> list[HandOver]:
    """Modules for the factors of a hand-over; none for an identity."""
    form: Form = config.form if config.form != "auto" else "segment" if config.target == "eager" else "gather"
    result: list[HandOver] = []
    for place, matrix in enumerate(matrices):
        is_last = place == len(matrices) - 1
        width = num_tokens if is_last else len(matrix)
        is_identity = len(matrix) == matrix.shape[1] and torch.equal(matrix, torch.eye(len(matrix), dtype=matrix.dtype))
        if not (is_identity and width == num_outputs):
            result.append(FORMS[form](matrix, num_outputs, width))
        num_outputs = width
    return result
