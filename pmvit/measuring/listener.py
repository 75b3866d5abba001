"""Following a batch through the blocks of a model, whatever library it is of."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pmvit.errors import PmvitError


def precise(tensor: Tensor) -> Tensor:
    """Half precision as float32; the rest as it is."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class Listener(TorchFunctionMode):
    """Says when a batch enters and leaves a block, and when the block calls `scaled_dot_product_attention`.

    A subclass reads what it needs there. It serves every model whose blocks call that function.
    """

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.layer: int | None = None
        self.heard = [False] * len(blocks)
        self.hooks = []
        for layer, block in enumerate(blocks):
            self.hooks.append(block.register_forward_pre_hook(self._enter(layer)))
            self.hooks.append(block.register_forward_hook(self._leave))

    def remove_hooks(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def entered(self, layer: int, tokens: Tensor) -> None:
        """A batch of tokens enters a block."""

    def left(self, layer: int, tokens: Tensor) -> None:
        """A batch of tokens leaves a block."""

    def attend(
        self,
        layer: int,
        attention: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Stand in for the call of attention in a block."""
        return attention(query, key, value, attn_mask=attn_mask, **options)

    def check_heard(self, silent: list[int]) -> None:
        """Raise `PmvitError` that says why nothing was read in the first of these blocks, if there are any."""
        if silent and self.heard[silent[0]]:
            raise PmvitError(
                f"block {silent[0]}: no gradient arrives, so what the model puts out does not depend on this block: "
                "leave it out of the host's block names"
            )
        if silent:
            raise PmvitError(
                f"block {silent[0]} made no call of torch.nn.functional.scaled_dot_product_attention, where scores are "
                "read: switch the model to its `sdpa` attention"
            )

    def _enter(self, layer: int) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
        def enter(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
            self.layer = layer
            tokens, *others = arguments
            if layer == 0:
                tokens = tokens.detach().requires_grad_(torch.is_grad_enabled())
            self.entered(layer, tokens)
            return (tokens, *others)

        return enter

    def _leave(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        if self.layer is not None:
            self.left(self.layer, output[0] if isinstance(output, tuple) else output)
        self.layer = None

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, arguments: tuple[Any, ...] = (), keywords: Any = None
    ) -> Any:
        keywords = keywords or {}
        if function is not F.scaled_dot_product_attention or self.layer is None:
            return function(*arguments, **keywords)
        self.heard[self.layer] = True
        return self.attend(self.layer, function, *arguments, **keywords)
