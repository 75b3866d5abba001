"""Listening to blocks: how much the output depends on each token having its own key, value and update."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pmvit.hosts.host import TokenLayout
from pmvit.measuring.listener import Listener, precise
from pmvit.measuring.merge_costs import HALVES, Part

BlockPart = tuple[int, Part]  # a block, and what of it


class EffectRecorder(Listener):
    """Collects `E[i, j] = g_i . y_j` of every block and image, while a batch runs forward and backward.

    Here y_j is the key, the value or the update of a token and g_i the gradient at another's. There are two of them:
    that of the keys, which say where attention goes, and the sum of the others, which say what it brings. A block that
    is split has them for attention, and one of the MLP's updates for its MLP.

    Args:
        blocks: To listen to.
        layout: Of their tokens.
        norms: What normalises the tokens before the MLP of each block that is split, `None` for the others.
    """

    def __init__(self, blocks: list[nn.Module], layout: TokenLayout, norms: list[nn.Module | None]) -> None:
        super().__init__(blocks)
        self.layout = layout
        self.tokens: Tensor | None = None
        self.effects: dict[tuple[BlockPart, bool], Tensor] = {}
        self.listened: dict[int, list[Tensor]] = {}
        self.attention: list[Part] = ["block" if norm is None else "attention" for norm in norms]
        self.last: list[Part] = ["block" if norm is None else "mlp" for norm in norms]
        for norm in norms:
            if norm is not None:
                self.hooks.append(norm.register_forward_pre_hook(self._before_mlp))

    def entered(self, layer: int, tokens: Tensor) -> None:
        self.tokens = tokens.detach()

    def _before_mlp(self, _: nn.Module, arguments: tuple[Any, ...]) -> None:
        if self.layer is not None and self.tokens is not None:
            self._listen_to_update((self.layer, "attention"), arguments[0])
            self.tokens = arguments[0].detach()

    def left(self, layer: int, tokens: Tensor) -> None:
        if self.tokens is not None:
            self._listen_to_update((layer, self.last[layer]), tokens)
        self.tokens = None

    def _listen_to_update(self, part: BlockPart, tokens: Tensor) -> None:
        if self.tokens is not None:
            self._listen(part, tokens, tokens.detach() - self.tokens, is_key=False)

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
        for tensor, is_key in ((key, True), (value, False)):
            if not any(tensor is other for other in self.listened.setdefault(layer, [])):
                self.listened[layer].append(tensor)  # one that is used twice gets its gradient once
                self._listen((layer, self.attention[layer]), tensor, tensor.detach(), is_key)
        return attention(query, key, value, attn_mask=attn_mask, **options)

    def _listen(self, part: BlockPart, tensor: Tensor, quantity: Tensor, is_key: bool) -> None:
        tensor.register_hook(lambda gradient: self._add((part, is_key), gradient, quantity))

    def _add(self, part: tuple[BlockPart, bool], gradient: Tensor, quantity: Tensor) -> None:
        of_patches = [precise(self._rows(tensor))[:, self.layout.num_prefix :] for tensor in (gradient, quantity)]
        effect = of_patches[0] @ of_patches[1].transpose(1, 2)
        self.effects[part] = self.effects[part] + effect if part in self.effects else effect

    def _rows(self, tensor: Tensor) -> Tensor:
        """One row a token: of (batch, N, D) tokens, of tokens in a grid, or of (batch, heads, N, d) keys or values."""
        if tensor.dim() == 4 and tensor.shape[2] == self.layout.num_tokens:
            return tensor.transpose(1, 2).flatten(2)
        return tensor.flatten(1, -2)

    def block_parts(self) -> list[BlockPart]:
        """What is listened to, in the order in which it runs."""
        return [(layer, part) for layer in range(len(self.heard)) for part in self._parts(layer)]

    def _parts(self, layer: int) -> tuple[Part, ...]:
        return (self.attention[layer],) if self.attention[layer] == "block" else HALVES

    def collect(self) -> list[Tensor]:
        """The effects of this batch in each part, (2 or 1, batch, patches, patches)."""
        of_keys = [(layer, part) for layer, part in enumerate(self.attention)]
        self.check_heard([layer for layer, part in of_keys if ((layer, part), True) not in self.effects])
        result = []
        for part in self.block_parts():
            found = [self.effects[part, is_key] for is_key in (True, False) if (part, is_key) in self.effects]
            result.append(torch.stack([effect.cpu() for effect in found]))
        self.effects, self.listened = {}, {}
        return result
