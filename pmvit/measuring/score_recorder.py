"""Listening to attention: what Eq. 9 and the scorers of the ablation read while a batch runs."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pmvit.config.measuring import Scorer
from pmvit.hosts.host import TokenLayout
from pmvit.measuring.listener import Listener, precise


def score_values(values: Tensor, gradient: Tensor) -> Tensor:
    """Eq. 9, signed, for each image: `<V_k, dL/dV_k>` averaged over heads; (batch, heads, N, d) gives (batch, N)."""
    return (precise(values) * precise(gradient)).sum((1, 3)) / values.shape[1]


def score_tokens(tokens: Tensor, gradient: Tensor) -> Tensor:
    """Eq. 8, signed, for each image: the mean over the width of `Z * dL/dZ`; (batch, N, D) gives (batch, N)."""
    return (precise(tokens) * precise(gradient)).mean(-1)


def attention_map(query: Tensor, key: Tensor, mask: Tensor | None = None, scale: float | None = None) -> Tensor:
    """Softmax of the scaled products of queries and keys: A of Eq. 1, written out."""
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1)


class Recorder(Listener):
    """Collects the per-image scores of every layer while a batch runs forward and backward."""

    def __init__(self, scorer: Scorer, blocks: list[nn.Module], layouts: list[TokenLayout]) -> None:
        super().__init__(blocks)
        self.scorer = scorer
        self.layouts = layouts
        self.values: list[list[Tensor]] = [[] for _ in blocks]
        self.scored: list[Tensor | None] = [None] * len(blocks)

    def entered(self, layer: int, tokens: Tensor) -> None:
        if self.scorer == "grad":
            values = tokens.detach()  # a hook that held the tensor it hangs on would keep the graph alive
            tokens.register_hook(lambda gradient: self._add(layer, score_tokens(values, gradient).flatten(1)))

    def _add(self, layer: int, scores: Tensor) -> None:
        self.values[layer].append(scores.detach()[:, self.layouts[layer].num_prefix :])

    def _add_heard(self, layer: int, scores: Tensor) -> None:
        """Add what attention told: of the tokens of an image, or of the places of each window."""
        layout = self.layouts[layer]
        self._add(layer, scores if layout.windows is None else layout.windows.to_grid(scores, layout.grid))

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
        scale = options.get("scale")
        if self.scorer == "attn":
            weights = attention_map(query, key, attn_mask, scale)
            self._add_heard(layer, precise(weights).sum(2).mean(1))
            return weights @ value
        output = attention(query, key, value, attn_mask=attn_mask, **options)
        values = value.detach()  # a hook that held the tensor it hangs on would keep the graph alive
        if self.scorer == "grad_attn" and value is not self.scored[layer]:
            self.scored[layer] = value  # differential attention uses one value tensor twice; its gradient comes once
            value.register_hook(lambda gradient: self._add_heard(layer, score_values(values, gradient)))
        elif self.scorer in ("class_attn", "grad_class_attn"):
            mask = None if attn_mask is None else attn_mask[..., :1, :]
            row = attention_map(query[:, :, :1].detach(), key.detach(), mask, scale)[:, :, 0]
            if self.scorer == "class_attn":
                self._add_heard(layer, precise(row).mean(1))
            else:
                output.register_hook(lambda gradient: self._add_heard(layer, _class_row(row, values, gradient)))
        return output

    def collect(self) -> Tensor:
        """The scores of this batch, (layers, batch, patches), with zeros behind those of smaller grids.

        A block with several attentions gets their mean.
        """
        self.check_heard([layer for layer, values in enumerate(self.values) if not values])
        rows = [torch.stack(values).mean(0) for values in self.values]
        most = max(row.shape[1] for row in rows)
        result = torch.stack([F.pad(row, (0, most - row.shape[1])) for row in rows])
        self.values = [[] for _ in self.values]
        self.scored = [None] * len(self.scored)
        return result


def _class_row(row: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
    """`A * dL/dA` of the class token's query, averaged over heads, where `dL/dA = G V^T`."""
    gradient_of_row = torch.einsum("bhd,bhnd->bhn", precise(gradient[:, :, 0]), precise(value))
    return (precise(row) * gradient_of_row).mean(1)
