"""Following a batch through the blocks of a model, whatever library it is of, and what is read on the way.

`ScoreRecorder` reads what Eq. 9 and the scorers of the ablation need; `EffectRecorder`, how much the output depends on
each token having its own key, value and update.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pmvit.config.measuring import Scorer
from pmvit.errors import PmvitError
from pmvit.hosts.host import TokenLayout
from pmvit.measuring.merge_costs import ALONE, HALVES, BlockPart, Part

ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")  # of attention, by their places


def precise(tensor: Tensor) -> Tensor:
    """Half precision as float32; the rest as it is."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class Listener(TorchFunctionMode):
    """Follows a batch through the blocks: `entered` and `left` are called at each, and `attended` for every call of
    `scaled_dot_product_attention` in between, where a subclass reads what it needs.

    It serves every model whose blocks call that function.
    """

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.layer: int | None = None
        self.heard = [False] * len(blocks)
        self.hooks = []
        for layer, block in enumerate(blocks):
            self.hooks.append(block.register_forward_pre_hook(partial(self._enter, layer)))
            self.hooks.append(block.register_forward_hook(self._leave, prepend=True))  # as the block has its tokens

    def remove_hooks(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def entered(self, layer: int, tokens: Tensor) -> None:
        """A batch of tokens enters a block."""

    def left(self, layer: int, tokens: Tensor) -> None:
        """A batch of tokens leaves a block."""

    def attended(self, layer: int, call: dict[str, Any], output: Tensor) -> None:
        """A block called attention with these arguments, by their names, and this came out."""

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

    def _enter(self, layer: int, _: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        self.layer = layer
        tokens, *others = arguments
        if layer == 0:
            tokens = tokens.detach().requires_grad_(torch.is_grad_enabled())
        self.entered(layer, tokens)
        return (tokens, *others)

    def _leave(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        if self.layer is not None:
            self.left(self.layer, output[0] if isinstance(output, tuple) else output)
        self.layer = None

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, arguments: tuple[Any, ...] = (), keywords: Any = None
    ) -> Any:
        output = function(*arguments, **(keywords or {}))
        if function is F.scaled_dot_product_attention and self.layer is not None:
            self.heard[self.layer] = True
            self.attended(self.layer, {**dict(zip(ARGUMENTS, arguments, strict=False)), **(keywords or {})}, output)
        return output


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


class ScoreRecorder(Listener):
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

    def attended(self, layer: int, call: dict[str, Any], output: Tensor) -> None:
        query, key, value, mask = call["query"], call["key"], call["value"], call.get("attn_mask")
        values = value.detach()  # a hook that held the tensor it hangs on would keep the graph alive
        if self.scorer == "attn":
            weights = attention_map(query, key, mask, call.get("scale"))
            self._add_heard(layer, precise(weights).sum(2).mean(1))
        elif self.scorer == "grad_attn" and value is not self.scored[layer]:
            self.scored[layer] = value  # differential attention uses one value tensor twice; its gradient comes once
            value.register_hook(lambda gradient: self._add_heard(layer, score_values(values, gradient)))
        elif self.scorer in ("class_attn", "grad_class_attn"):
            mask = None if mask is None else mask[..., :1, :]
            row = attention_map(query[:, :, :1].detach(), key.detach(), mask, call.get("scale"))[:, :, 0]
            if self.scorer == "class_attn":
                self._add_heard(layer, precise(row).mean(1))
            else:
                output.register_hook(lambda gradient: self._add_heard(layer, _class_row(row, values, gradient)))

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


class EffectRecorder(Listener):
    """Collects `E[i, j] = g_i . y_j` of every block and image, while a batch runs forward and backward.

    y_j is the key, the value or the update of token j, and g_i the gradient of the output at that of token i: to first
    order, E[i, j] is what the output gains if y_j is added at token i. Two matrices are collected: that of
    the keys, which say where attention goes, and the sum of those of values and updates, which say what it brings. A
    block that is split has both for attention and a third one, of the MLP's updates, for its MLP; or the third alone.

    Args:
        blocks: To listen to.
        layouts: Of their tokens; where it says `only_mlp`, nothing else of the block is listened to.
        mlps: What normalises the tokens before the MLP, and the MLP, of each block that is split; `None` for others.
    """

    tokens: Tensor  # that entered the block or half of it that runs now

    def __init__(
        self, blocks: list[nn.Module], layouts: list[TokenLayout], mlps: list[tuple[nn.Module, nn.Module] | None]
    ) -> None:
        super().__init__(blocks)
        self.layout = layouts[0]
        self.effects: dict[tuple[BlockPart, bool], Tensor] = {}
        self.listened: dict[int, list[Tensor]] = {}
        self.parts: list[tuple[Part, ...]] = [
            ("block",) if mlp is None else ALONE if layout.only_mlp else HALVES
            for mlp, layout in zip(mlps, layouts, strict=True)
        ]
        self.block_parts = [(layer, part) for layer, parts in enumerate(self.parts) for part in parts]  # as they run
        for parts, split in zip(self.parts, mlps, strict=True):
            if split is not None and parts == ALONE:
                self.hooks.append(split[1].register_forward_hook(self._after_mlp))
            elif split is not None:
                self.hooks.append(split[0].register_forward_pre_hook(self._before_mlp))

    def entered(self, layer: int, tokens: Tensor) -> None:
        self.tokens = tokens.detach()

    def _before_mlp(self, _: nn.Module, arguments: tuple[Any, ...]) -> None:
        if self.layer is not None:
            self._updated((self.layer, "attention"), arguments[0])

    def _after_mlp(self, _: nn.Module, __: tuple[Any, ...], update: Tensor) -> None:
        if self.layer is not None:
            self._listen((self.layer, "mlp"), update, update.detach(), is_key=False)

    def left(self, layer: int, tokens: Tensor) -> None:
        if self.parts[layer] != ALONE:
            self._updated((layer, self.parts[layer][-1]), tokens)

    def _updated(self, part: BlockPart, tokens: Tensor) -> None:
        self._listen(part, tokens, tokens.detach() - self.tokens, is_key=False)
        self.tokens = tokens.detach()

    def attended(self, layer: int, call: dict[str, Any], output: Tensor) -> None:
        if self.parts[layer] == ALONE:
            return
        for name in ("key", "value"):
            tensor: Tensor = call[name]
            if not any(tensor is other for other in self.listened.setdefault(layer, [])):
                self.listened[layer].append(tensor)  # one that is used twice gets its gradient once
                self._listen((layer, self.parts[layer][0]), tensor, tensor.detach(), is_key=name == "key")

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

    def collect(self) -> list[Tensor]:
        """The effects of this batch in each of `block_parts`, (2 or 1, batch, patches, patches)."""
        first = [((layer, parts[0]), parts != ALONE) for layer, parts in enumerate(self.parts)]
        self.check_heard([layer for layer, key in enumerate(first) if key not in self.effects])
        result = []
        for part in self.block_parts:
            found = [self.effects[part, is_key] for is_key in (True, False) if (part, is_key) in self.effects]
            result.append(torch.stack([effect.cpu() for effect in found]))
        self.effects, self.listened = {}, {}
        return result
