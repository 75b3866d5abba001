"""What a model calls its blocks with beside the tokens: position embeddings, masks, sizes.

None of it depends on the image, only on its size. So it is looked at once, and becomes a part of the rewritten blocks.
"""

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pmvit.errors import PmvitError
from pmvit.hosts import Host
from pmvit.prune_merge import PruneMerge, is_recorded


class Arguments(NamedTuple):
    """What a block is called with beside the tokens.

    Attributes:
        at_centres: All by name, as the block itself takes it: for its groups if it is compressed.
        given: The places and names of what was not left empty.
    """

    at_centres: dict[str, Any]
    given: frozenset[int | str]


def arguments_of(host: Host) -> dict[str, Arguments]:
    """What each block of a model is called with, by the block's name: the model runs once, on an empty image."""
    found: dict[str, Arguments] = {}

    def keep(name: str) -> Any:
        def hook(block: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
            beside = positional[1:]
            given = [place for place, value in enumerate(beside) if not _is_empty(value)]
            given_names = [name for name, value in named.items() if not _is_empty(value)]
            if isinstance(block, PruneMerge):
                at_centres = block.block_arguments(beside, named)
            else:
                names = list(inspect.signature(block.forward).parameters)[1:]
                at_centres = {**dict(zip(names, beside, strict=False)), **named}
            found[name] = Arguments(at_centres, frozenset([*given, *given_names]))

        return hook

    handles = [
        host.model.get_submodule(name).register_forward_pre_hook(keep(name), with_kwargs=True)
        for name in host.block_names()
    ]
    try:
        with torch.no_grad():
            host.call(torch.zeros(1, *host.input_size()).to(next(host.model.parameters())))
    finally:
        for handle in handles:
            handle.remove()
    return found


def _is_empty(value: Any) -> bool:
    return value is None or value is False


class TokensAlone(nn.Module):
    """A rewritten block, called like the host's: what stands beside the tokens is already a part of it.

    Attributes:
        given: The places and names of what it was given when it was rewritten; anything else would be left out.
    """

    given: frozenset[int | str] = frozenset()

    def check(self, tokens: Tensor, positional: tuple[object, ...], named: dict[str, object]) -> None:
        """Raise `PmvitError` if it is given anything else; in a graph, transformers adds masks that hide nothing."""
        if is_recorded(tokens):
            return
        others = [name for name, value in (*enumerate(positional), *named.items()) if not _is_empty(value)]
        if any(name not in self.given for name in others):
            raise PmvitError(
                f"expected images alone for a model that is optimised for inference; got "
                f"{', '.join(str(name) for name in others if name not in self.given)} as well"
            )
