"""SAM, SAM-HQ and ViTDet of Hugging Face transformers: blocks that keep tokens in a grid, most of them inside windows.

Attention inside windows stays as it is, on all tokens; the MLP behind it works on each token by itself and can have
groups. The few blocks that attend over the whole grid run on groups like any other, each at the place of its centre.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pmvit.adaptive import AdaptiveBlock
from pmvit.hosts.hf.hooks import answer_like_host
from pmvit.hosts.hf.model import HuggingFaceModel
from pmvit.hosts.hf.tower import SAMS, num_read
from pmvit.hosts.host import HostChange, PartNames, Reading, TokenLayout, register
from pmvit.hosts.modes import changed
from pmvit.hosts.parts import AnyModule, inner_block, split_heads
from pmvit.prune_merge import PruneMerge


class PlacedAttention(nn.Module):
    """Attention over a grid with decomposed relative positions: a bias for each query, along rows and along columns.

    Args:
        attention: The host's, of tokens in a grid.
        grid: That of all tokens.
        centres: The tokens at whose places those that come are, one after the other or in a grid of any shape.
        log_sizes: What is added to the attention scores of each, if anything.
    """

    log_sizes: Tensor | None
    from_rows: Tensor
    from_columns: Tensor
    rows: Tensor
    columns: Tensor

    def __init__(
        self, attention: AnyModule, grid: tuple[int, ...], centres: Tensor, log_sizes: Tensor | None = None
    ) -> None:
        super().__init__()
        self.attention = attention
        places = {"rows": centres // grid[1], "columns": centres % grid[1]}
        for side, (name, place) in zip(grid, places.items(), strict=True):
            steps = place[:, None] - torch.arange(side, device=centres.device) + side - 1
            self.register_buffer(name, place, persistent=False)
            self.register_buffer(f"from_{name}", steps, persistent=False)
        self.register_buffer("log_sizes", log_sizes, persistent=False)

    def forward(self, hidden_states: Tensor, output_attentions: bool = False) -> tuple[Tensor, None]:
        """As the host calls it; there are no attention maps to return."""
        host = self.attention
        heads = host.num_attention_heads if hasattr(host, "num_attention_heads") else host.num_heads
        query, key, value = split_heads(host.qkv(hidden_states.flatten(1, -2)), heads)
        dropped = getattr(host, "dropout", 0.0) if self.training else 0.0
        bias = self._bias(query)
        attended = F.scaled_dot_product_attention(query, key, value, bias, dropout_p=dropped, scale=host.scale)
        return host.proj(attended.transpose(1, 2).flatten(2)).view(hidden_states.shape), None

    def _bias(self, query: Tensor) -> Tensor | None:
        """What is added to the scores, (batch, heads, queries, keys) or what broadcasts to it."""
        if not hasattr(self.attention, "rel_pos_h"):
            return None if self.log_sizes is None else self.log_sizes.to(query.dtype).expand(1, 1, 1, -1)
        along = (
            torch.einsum("bhqd,qsd->bhqs", query, table[steps]).index_select(-1, place)
            for table, steps, place in (
                (self.attention.rel_pos_h, self.from_rows, self.rows),
                (self.attention.rel_pos_w, self.from_columns, self.columns),
            )
        )
        bias = next(along) + next(along)
        return bias if self.log_sizes is None else bias + self.log_sizes.to(bias.dtype)


class OneRow(nn.Module):
    """A block that takes tokens in a grid, given groups: to it, they are a grid of one row."""

    def __init__(self, host: nn.Module) -> None:
        super().__init__()
        self.host = host
        self.is_first = channels_first(host)

    def forward(self, groups: Tensor, *positional: Any, **arguments: Any) -> Any:
        row = groups[:, None]
        output = self.host(row.movedim(-1, 1) if self.is_first else row, *positional, **arguments)
        if not self.is_first:
            return output.squeeze(1)
        return (output[0].movedim(1, -1).squeeze(1), *output[1:])


@register
class HuggingFaceSam(HuggingFaceModel):
    """What the model makes of images is the image embedding: prompts and masks come behind it."""

    key = "hf-sam"
    family = "Hugging Face SAM and ViTDet (SAM, SAM-HQ, ViTDet)"
    takes_attention_bias = True
    keeps_grid = True
    families = SAMS

    def call(self, images: Tensor) -> Any:
        return self.tower.host(images)

    def block_names(self) -> list[str]:
        return self.tower.blocks[: num_read(self.model, self.tower)]

    def layouts(self) -> list[TokenLayout]:
        sides = zip(self.input_size()[1:], self.tower.projection.stride, strict=True)
        height, width = (side // patch for side, patch in sides)
        blocks = [inner_block(self.model.get_submodule(name)) for name in self.block_names()]
        return [
            # What follows the MLP of a residual block of ViTDet are convolutions.
            TokenLayout((height, width), 0, only_mlp=block.window_size > 0 or hasattr(block, "residual"))
            for block in blocks
        ]

    def reading(self) -> Reading:
        return Reading([[name] for name in self.block_names()])

    def part_names(self, block: nn.Module) -> PartNames:
        prefix = "host." if isinstance(block, OneRow) else ""
        norm = "layer_norm2" if hasattr(inner_block(block), "layer_norm2") else "norm2"
        return PartNames((f"{prefix}{norm}", f"{prefix}mlp"))

    def fit(self, wrapper: PruneMerge | AdaptiveBlock, layout: TokenLayout) -> list[HostChange]:
        if not isinstance(wrapper, PruneMerge):
            raise TypeError(f"expected groups of a fixed plan beside windows, got a {type(wrapper).__name__}")
        block = wrapper.block
        name, attention = attention_of(block)
        placed = PlacedAttention(attention, layout.grid, wrapper.centres, wrapper.log_sizes).train(block.training)
        one_row = OneRow(block).train(block.training)
        return [HostChange.make(block, name, placed), HostChange.make(wrapper, "block", one_row)]

    def answer_like(self, module: nn.Module, block: nn.Module) -> None:
        block = inner_block(block)
        if channels_first(block):
            module.register_forward_pre_hook(_to_rows)
            module.register_forward_hook(_to_channels)
            return
        answer_like_host(module, 0)
        module.window_size = block.window_size  # SAM-HQ reads behind blocks that have none

    @contextmanager
    def observed(self, counting: bool = False) -> Iterator[None]:
        """Attention over the grid through `scaled_dot_product_attention`; channels last around blocks of ViTDet."""
        changes: list[tuple[Any, str, Any]] = []
        with ExitStack() as hooks:
            for name, layout in zip(self.block_names(), self.layouts(), strict=True):
                block = self.model.get_submodule(name)
                attention = attention_of(inner_block(block))[1]
                if not (layout.only_mlp or isinstance(attention, PlacedAttention)):
                    tokens = torch.arange(layout.num_tokens, device=attention.qkv.weight.device)
                    placed = PlacedAttention(attention, layout.grid, tokens).train(attention.training)
                    changes.append((attention, "forward", placed.forward))
                if channels_first(block) and not counting:
                    for handle in (
                        block.register_forward_pre_hook(_to_rows),
                        block.register_forward_hook(_to_channels),
                    ):
                        hooks.enter_context(handle)
                    changes.append((block, "forward", partial(_run_on_rows, block.forward)))
            hooks.enter_context(changed(changes))
            yield


def channels_first(block: nn.Module) -> bool:
    """Whether a block takes and returns tokens as convolutions do: a block of ViTDet."""
    return type(block).__name__ == "VitDetLayer"


def attention_of(block: AnyModule) -> tuple[str, AnyModule]:
    """What a host's block calls its attention, and that."""
    name = "attn" if hasattr(block, "attn") else "attention"
    return name, getattr(block, name)


def _to_rows(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return (arguments[0].movedim(1, -1), *arguments[1:])


def _to_channels(_: nn.Module, __: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
    tokens, *others = output if isinstance(output, tuple) else (output,)
    return (tokens.movedim(-1, 1), *others)


def _run_on_rows(forward: Any, tokens: Tensor, *positional: Any, **arguments: Any) -> tuple[Any, ...]:
    """A block that takes channels first, called with channels last."""
    output = forward(tokens.movedim(-1, 1), *positional, **arguments)
    return (output[0].movedim(1, -1), *output[1:])
