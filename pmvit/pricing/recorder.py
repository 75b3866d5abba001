"""Listening to blocks: how much the output depends on each token having its own key, value and update."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pmvit.models.adapter import TokenLayout
from pmvit.scoring.listener import Listener, precise


class EffectRecorder(Listener):
    """Collects `E[i, j] = g_i . y_j` of every block and image, while a batch runs forward and backward.

    Here y_j is the key, the value or the update of a token and g_i the gradient at another's. There are two of them:
    that of the keys, which say where attention goes, and the sum of the others, which say what it brings.

    Args:
        blocks: To listen to.
        layout: Of their tokens.
    """

    def __init__(self, blocks: list[nn.Module], layout: TokenLayout) -> None:
        super().__init__(blocks)
        self.layout = layout
        self.tokens: Tensor | None = None
        self.effects: dict[tuple[int, bool], Tensor] = {}
        self.listened: dict[int, list[Tensor]] = {}

    def entered(self, layer: int, tokens: Tensor) -> None:
        self.tokens = tokens.detach()

    def left(self, layer: int, tokens: Tensor) -> None:
        if self.tokens is not None:
            self._listen(layer, tokens, tokens.detach() - self.tokens, is_key=False)
        self.tokens = None

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
                self._listen(layer, tensor, tensor.detach(), is_key)
        return attention(query, key, value, attn_mask=attn_mask, **options)

    def _listen(self, layer: int, tensor: Tensor, quantity: Tensor, is_key: bool) -> None:
        tensor.register_hook(lambda gradient: self._add((layer, is_key), gradient, quantity))

    def _add(self, place: tuple[int, bool], gradient: Tensor, quantity: Tensor) -> None:
        of_patches = [precise(self._rows(tensor))[:, self.layout.num_prefix :] for tensor in (gradient, quantity)]
        effect = of_patches[0] @ of_patches[1].transpose(1, 2)
        self.effects[place] = self.effects[place] + effect if place in self.effects else effect

    def _rows(self, tensor: Tensor) -> Tensor:
        """One row a token: of (batch, N, D) tokens, of tokens in a grid, or of (batch, heads, N, d) keys or values."""
        if tensor.dim() == 4 and tensor.shape[2] == self.layout.num_tokens:
            return tensor.transpose(1, 2).flatten(2)
        return tensor.flatten(1, -2)

    def collect(self) -> list[Tensor]:
        """The effects of this batch in each block, (2, batch, patches, patches)."""
        layers = range(len(self.heard))
        self.check_heard([layer for layer in layers if (layer, True) not in self.effects])
        result = [torch.stack([self.effects[layer, is_key].cpu() for is_key in (True, False)]) for layer in layers]
        self.effects, self.listened = {}, {}
        return result
