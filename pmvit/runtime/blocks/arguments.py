"""What a model calls its blocks with beside the tokens: position embeddings, masks, sizes.

None of it depends on the image, only on its size. So it is looked at once, and becomes a part of the rewritten blocks.
"""

import inspect
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from pmvit.adaptive import AdaptiveBlock
from pmvit.errors import PmvitError
from pmvit.hosts import Host
from pmvit.prune_merge import PruneMerge, is_recorded, named_arguments

Half = Literal["attention", "mlp"]  # of a block, each with what normalises before it and the addition after it


class Arguments(NamedTuple):
    """What a block is called with beside the tokens."""

    at_centres: dict[str, Any]  # all by name, as the block itself takes it: for its groups if it is compressed
    given: frozenset[int | str]  # the places and names of what was not left empty
    num_beside: int | None = None  # of what the host's block returns beside the tokens, if that is a tuple


def arguments_of(host: Host) -> dict[str, Arguments]:
    """What each block of a model is called with, by the block's name: the model runs once, on an empty image."""
    found: dict[str, Arguments] = {}

    def keep(name: str, block: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        beside = positional[1:]
        if isinstance(block, PruneMerge):
            at_centres = block.block_arguments(beside, named)
        elif isinstance(block, AdaptiveBlock):  # nobody knows its groups yet
            at_centres = named_arguments(block.argument_names, beside, named)
        else:
            names = list(inspect.signature(block.forward).parameters)[1:]
            at_centres = {**dict(zip(names, beside, strict=False)), **named}
        found[name] = Arguments(at_centres, frozenset(_given(beside, named)))

    def count(name: str, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, tuple):
            found[name] = found[name]._replace(num_beside=len(output) - 1)

    with ExitStack() as hooks, torch.no_grad():
        for name in host.block_names():
            block = host.model.get_submodule(name)
            hooks.enter_context(block.register_forward_pre_hook(partial(keep, name), with_kwargs=True))
            hooks.enter_context(block.register_forward_hook(partial(count, name)))
        host.call(torch.zeros(1, *host.input_size()).to(next(host.model.parameters())))
    return found


def answer_like_block(stage: nn.Module, num_beside: int | None) -> None:
    """Let what stands in the place of a block return a tuple, if the block does, with nothing beside the tokens."""
    if num_beside is not None:
        stage.register_forward_hook(partial(_beside, num_beside))


def _beside(count: int, _: nn.Module, __: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
    is_whole = type(output) is tuple  # a block that was not rewritten
    return output if is_whole else (output, *(None,) * count)


def _given(positional: tuple[object, ...], named: Mapping[str, object]) -> list[int | str]:
    """The places and names of what is not left empty."""
    arguments: list[tuple[int | str, object]] = [*enumerate(positional), *named.items()]
    return [name for name, value in arguments if value is not None and value is not False]


class TokensAlone(nn.Module):
    """A rewritten block, called like the host's: what stands beside the tokens is already a part of it."""

    given: frozenset[int | str] = frozenset()  # when it was rewritten; anything else would be left out

    def check(self, tokens: Tensor, positional: tuple[object, ...], named: dict[str, object]) -> None:
        """Raise `PmvitError` if it is given anything else; in a graph, transformers adds masks that hide nothing."""
        if is_recorded(tokens):
            return
        others = [str(name) for name in _given(positional, named) if name not in self.given]
        if others:
            raise PmvitError(
                f"expected images alone for a model that is optimised for inference; got {', '.join(others)} as well"
            )
