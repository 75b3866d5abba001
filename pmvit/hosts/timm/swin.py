"""timm's Swin Transformers, v1 and v2."""

from typing import Any

import torch
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2 import SwinTransformerV2, SwinTransformerV2Block
from torch import Tensor, nn

from pmvit.hosts.host import AnyModule, register
from pmvit.hosts.swin.host import SwinHost, inner_block
from pmvit.hosts.swin.recipe import Recipe, UsualBlock, UsualV2Block, split_heads
from pmvit.hosts.timm.model import TimmModel, input_channels
from pmvit.windows import Windows


class TimmSwinBlock(UsualBlock):
    """The block of Swin v1."""

    def project(self, block: AnyModule, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = split_heads(block.attn.qkv(tokens), block.attn.num_heads)
        return query * block.attn.scale, key, value

    def output(self, block: AnyModule, attended: Tensor) -> Tensor:
        projected: Tensor = block.attn.proj_drop(block.attn.proj(attended))
        return projected


class TimmSwinV2Block(UsualV2Block, TimmSwinBlock):
    """The block of Swin v2."""

    def qkv_bias(self, block: AnyModule) -> Tensor | None:
        attention = block.attn
        if attention.q_bias is None:
            return None
        return torch.cat([attention.q_bias, attention.k_bias, attention.v_bias])


@register
class TimmSwin(SwinHost, TimmModel):
    """Stages stand in `model.layers`; their blocks take and return tokens of shape (batch, rows, columns, width)."""

    key = "timm-swin"
    family = "timm Swin (SwinTransformer, SwinTransformerV2)"
    classes = (SwinTransformer, SwinTransformerV2)
    recipes = (TimmSwinBlock(), TimmSwinV2Block())

    def recipe(self, block: nn.Module) -> Recipe:
        return self.recipes[isinstance(block, SwinTransformerV2Block)]

    def stages(self) -> list[str]:
        return [f"layers.{index}.blocks" for index in range(len(self.model.layers))]

    def first_grid(self) -> tuple[int, int]:
        height, width = self.model.patch_embed.grid_size
        return (int(height), int(width))

    def windows(self, block: AnyModule, grid: tuple[int, int]) -> Windows:
        return Windows(tuple(block.window_size), tuple(block.shift_size))

    def traits(self) -> dict[str, Any]:
        model = self.model
        firsts: list[AnyModule] = [inner_block(stage.blocks[0]) for stage in model.layers]
        patch = model.patch_embed.patch_size
        return {
            "num_classes": model.num_classes,
            "in_chans": input_channels(model),
            "img_size": list(model.patch_embed.img_size),
            "patch_size": patch[0] if patch[0] == patch[1] else list(patch),
            "global_pool": model.global_pool,
            "embed_dim": model.embed_dim,
            "depths": [len(stage.blocks) for stage in model.layers],
            "num_heads": [block.attn.num_heads for block in firsts],
            "window_size": _window_size(firsts),
            "mlp_ratio": _one_or_all([block.mlp_ratio for block in firsts]),
            "always_partition": firsts[0].always_partition,
            "strict_img_size": not firsts[0].dynamic_mask,
        }


def _window_size(firsts: list[AnyModule]) -> Any:
    """The window all stages were made with, each of which made it no larger than its grid; or one a stage."""
    sizes = [tuple(block.window_size) for block in firsts]
    largest = (max(rows for rows, _ in sizes), max(columns for _, columns in sizes))
    for block, size in zip(firsts, sizes, strict=True):
        fitting = largest if block.always_partition else tuple(map(min, block.input_resolution, largest))
        if size != fitting:
            return [_one_or_all(list(size)) for size in sizes]
    return _one_or_all(list(largest))


def _one_or_all(values: list[Any]) -> Any:
    return values[0] if len(set(values)) == 1 else values
