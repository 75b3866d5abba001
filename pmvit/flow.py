"""What goes from one adaptive block of a model to the next beside the tokens."""

import threading
from typing import Any, NamedTuple

from torch import Tensor, nn

from pmvit.prune_merge import is_recorded


class Flow(NamedTuple):
    """What goes from one adaptive block to the next beside the tokens.

    Attributes:
        tokens: All tokens, as the last block gave them out.
        merged: What it made of the groups.
        sizes: How many tokens each of `merged` stands for, (batch, groups, 1); `None` if each for itself.
        groups: The place in `merged` of each token, (batch, all tokens).
        centres: The token that stands for each group where the host needs a position, (batch, groups).
    """

    tokens: Tensor
    merged: Tensor
    sizes: Tensor | None
    groups: Tensor
    centres: Tensor


class Groups(NamedTuple):
    """What a host has to know of the groups that a block runs on, to reduce what it holds or is called with per token.

    Attributes:
        block: The block.
        argument_names: Of its call, after the tokens.
        centres: The token that stands for each group, (batch, groups).
        patch_centres: The same for patches alone, counted without prefix tokens.
        log_sizes: What is added to the attention scores of each group, (batch, groups).
    """

    block: nn.Module
    argument_names: tuple[str, ...]
    centres: Tensor
    patch_centres: Tensor
    log_sizes: Tensor | None


class Channel:
    """Where adaptive blocks of one model leave a `Flow` for the next of them; every thread has its own.

    What the block before left is kept until the next one has run, so that a block can run twice.
    """

    def __init__(self) -> None:
        self._of_thread = threading.local()
        self._recorded: dict[int, Flow] = {}  # while a graph is made, by one thread
        self._recorded_groups: Groups | None = None

    def put(self, number: int, flow: Flow) -> None:
        """Leave what block `number` made."""
        kept = {each: left for each, left in self._flows(flow.tokens).items() if each == number - 1}
        if is_recorded(flow.tokens):
            self._recorded = {**kept, number: flow}
        else:
            self._of_thread.flows = {**kept, number: flow}

    def get(self, number: int, tokens: Tensor) -> Flow:
        """What block `number` left; the tensor is one of those that came out of it."""
        flow = self._flows(tokens).get(number)
        if flow is None:
            raise RuntimeError("expected the blocks of a model with an adaptive plan to run one after the other")
        return flow

    def _flows(self, tokens: Tensor) -> dict[int, Flow]:
        return self._recorded if is_recorded(tokens) else getattr(self._of_thread, "flows", {})

    def run_on(self, groups: Groups | None) -> None:
        """Tell what is inside a block which groups it runs on; `None` when it has run."""
        if groups is None or is_recorded(groups.centres):
            self._recorded_groups = groups
        if groups is None or not is_recorded(groups.centres):
            self._of_thread.groups = groups

    def groups(self, tensor: Tensor) -> Groups | None:
        """What the block that now runs in this thread, and made this tensor, runs on; `None` outside of blocks."""
        return self._recorded_groups if is_recorded(tensor) else getattr(self._of_thread, "groups", None)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Channel":
        memo[id(self)] = copied = Channel()
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return Channel, ()
