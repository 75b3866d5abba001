"""timm's plain vision transformers: ViT, DeiT, BEiT, EVA and those built on them."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch.fx
from timm.models import beit, eva, vision_transformer, vision_transformer_relpos
from torch import Tensor, nn

from pmvit.hosts.host import (
    AnyModule,
    HostChange,
    PartNames,
    Reading,
    TokenLayout,
    add_log_sizes,
    bias_at_centres,
    register,
    select_tokens,
)
from pmvit.hosts.parts import PlainParts
from pmvit.hosts.timm.model import TimmModel, input_channels
from pmvit.hosts.timm.parts import parts_of
from pmvit.prune_merge import PruneMerge

# A traced model does not know yet whether it will be given a mask.
torch.fx.wrap("bias_at_centres")
torch.fx.wrap("add_log_sizes")

# Blocks that normalise before their MLP, and scale and drop what it puts out token by token.
PRE_NORM_BLOCKS = (vision_transformer.Block, vision_transformer_relpos.RelPosBlock, beit.Block, eva.EvaBlock)


@register
class TimmViT(TimmModel):
    """All blocks of these models stand in `model.blocks` and take and return tokens of shape (batch, N, D)."""

    key = "timm-vit"
    family = "timm plain ViT (VisionTransformer, DeiT, CLIP and SigLIP towers, hybrids, BEiT, EVA, DINOv3, ViT-RelPos)"
    takes_attention_bias = True
    classes = (
        vision_transformer.VisionTransformer,
        vision_transformer_relpos.VisionTransformerRelPos,
        beit.Beit,
        eva.Eva,
    )
    # What a block calls the additive bias on its attention scores.
    bias_arguments = ("attn_mask", "shared_rel_pos", "shared_rel_pos_bias")

    def block_names(self) -> list[str]:
        return [f"blocks.{index}" for index in range(len(self.model.blocks))]

    def layouts(self) -> list[TokenLayout]:
        height, width = self.model.patch_embed.grid_size
        layout = TokenLayout(
            (int(height), int(width)),
            int(self.model.num_prefix_tokens),
            has_class_token=getattr(self.model, "cls_token", None) is not None,
        )
        return [layout] * len(self.model.blocks)

    def reading(self) -> Reading:
        pools = self.model.global_pool != "token" or getattr(self.model, "attn_pool", None) is not None
        return Reading([self.block_names()], None if pools else int(self.model.num_prefix_tokens))

    def fit(self, wrapper: PruneMerge, layout: TokenLayout) -> list[HostChange]:
        attention: AnyModule = getattr(wrapper.block, "attn", None)
        if getattr(attention, "rel_pos", None) is not None:
            change = HostChange(attention, "rel_pos", attention.rel_pos)
            attention.rel_pos = BiasAtCentres(attention.rel_pos, wrapper)
            return [change]
        if getattr(attention, "relative_position_bias_table", None) is not None:
            index = attention.relative_position_index
            changes = [
                HostChange(attention, "relative_position_index", index),
                HostChange(attention, "window_size", attention.window_size),
            ]
            attention.relative_position_index = select_tokens(index, wrapper.centres.to(index.device), 0, 1)
            attention.window_size = (wrapper.centres.numel() - 1, 1)  # its area + 1 is the side of the bias
            return changes
        return []

    @classmethod
    def arguments_at_centres(cls, wrapper: PruneMerge, arguments: dict[str, Any]) -> dict[str, Any]:
        reduced = dict(arguments)
        if reduced.get("rope") is not None:
            reduced["rope"] = select_tokens(reduced["rope"], wrapper.patch_centres, -2)
        for name in cls.bias_arguments:
            if reduced.get(name) is not None:
                reduced[name] = bias_at_centres(reduced[name], wrapper.centres)
        if wrapper.log_sizes is not None:
            name = next((name for name in cls.bias_arguments if name in reduced), "attn_mask")
            reduced[name] = add_log_sizes(reduced.get(name), wrapper.log_sizes)
        return reduced

    def plain_parts(self, block: nn.Module, arguments: dict[str, Any]) -> PlainParts | None:
        return parts_of(block, arguments)

    def part_names(self, block: nn.Module) -> PartNames:
        return PartNames(
            mlp=("norm2", "mlp") if type(block) in PRE_NORM_BLOCKS else None,
            without_tokens=("attn.rel_pos.mlp",),  # the network behind ViT-RelPos' bias, where a block has one
        )

    def observed(self, counting: bool = False) -> AbstractContextManager[Any]:
        return self._fused()

    @contextmanager
    def _fused(self) -> Iterator[None]:
        fused = {module: module.fused_attn for module in self.model.modules() if hasattr(module, "fused_attn")}
        checkpointing = getattr(self.model, "grad_checkpointing", False)
        try:
            for module in fused:
                module.fused_attn = True
            self.model.grad_checkpointing = False
            yield
        finally:
            for module, value in fused.items():
                module.fused_attn = value
            self.model.grad_checkpointing = checkpointing

    def traits(self) -> dict[str, Any]:
        model, block = self.model, self.model.blocks[0]
        return {
            "num_classes": model.num_classes,
            "in_chans": input_channels(model),
            "img_size": list(model.patch_embed.img_size),
            "patch_size": list(model.patch_embed.patch_size),
            "global_pool": model.global_pool,
            "embed_dim": model.embed_dim,
            "depth": len(model.blocks),
            "num_heads": getattr(getattr(block, "attn", block), "num_heads", None),
        }


class BiasAtCentres(nn.Module):
    """The relative position bias of a block, between the group centres only."""

    centres: Tensor
    log_sizes: Tensor | None

    def __init__(self, full: AnyModule, wrapper: PruneMerge) -> None:
        super().__init__()
        self.full = full
        self.register_buffer("centres", wrapper.centres, persistent=False)
        self.register_buffer("log_sizes", wrapper.log_sizes, persistent=False)

    def get_bias(self) -> Tensor:
        """The bias as timm's attention adds it: (1, heads, groups, groups)."""
        bias = bias_at_centres(self.full.get_bias(), self.centres)
        return bias if self.log_sizes is None else add_log_sizes(bias, self.log_sizes)

    def forward(self, attention: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        """What timm calls where attention is not fused."""
        return attention + self.get_bias()
