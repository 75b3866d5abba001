"""Following the output of the blocks of a model."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from pmvit.hosts import host_of


@contextmanager
def block_hooks(model: nn.Module, hook: Callable[..., Any]) -> Iterator[None]:
    """Call `hook(number, block, arguments, options, output)` after each block; what it returns replaces the output."""
    with ExitStack() as hooks:
        for number, name in enumerate(host_of(model).block_names()):
            block = model.get_submodule(name)
            hooks.enter_context(block.register_forward_hook(partial(hook, number), with_kwargs=True))
        yield


def output_tokens(output: Any) -> Tensor:
    """The tokens in what a block puts out, in the shape it has them."""
    tokens: Tensor = output[0] if isinstance(output, tuple) else output
    return tokens
