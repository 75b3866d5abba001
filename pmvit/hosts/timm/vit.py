"""Adapter for timm's plain vision transformers: ViT, DeiT, BEiT, EVA and those built on them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from timm.models import beit, eva, vision_transformer, vision_transformer_relpos
from torch import Tensor, nn

from pmvit.hosts.host import (
    HostChange,
    Run,
    TokenLayout,
    add_log_sizes,
    narrow_bias,
    register,
    select_tokens,
)
from pmvit.hosts.timm.model import TimmModel, input_channels
from pmvit.hosts.timm.parts import AttentionHalf, MlpHalf, is_plain, parts_of
from pmvit.prune_merge import PruneMerge
from pmvit.runtime.blocks.build import inference_block

# Blocks that normalise before their MLP, and scale and drop what it puts out token by token.
PRE_NORM_BLOCKS = (vision_transformer.Block, vision_transformer_relpos.RelPosBlock, beit.Block, eva.EvaBlock)

Host = Any  # timm's models: nn.Modules whose attributes have no types


@register
class TimmViT(TimmModel):
    """All blocks of these models stand in `model.blocks` and take and return tokens of shape (batch, N, D)."""

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

    def layout(self, model: Host) -> TokenLayout:
        height, width = model.patch_embed.grid_size
        return TokenLayout((int(height), int(width)), int(model.num_prefix_tokens))

    def block_names(self, model: Host) -> list[str]:
        return [f"blocks.{index}" for index in range(len(model.blocks))]

    def narrow(self, wrapper: PruneMerge) -> list[HostChange]:
        attention: Host = getattr(wrapper.block, "attn", None)
        if getattr(attention, "rel_pos", None) is not None:
            change = HostChange(attention, "rel_pos", attention.rel_pos)
            attention.rel_pos = NarrowBias(attention.rel_pos, wrapper)
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

    def narrow_arguments(self, wrapper: PruneMerge, arguments: dict[str, Any]) -> dict[str, Any]:
        narrowed = dict(arguments)
        if narrowed.get("rope") is not None:
            narrowed["rope"] = select_tokens(narrowed["rope"], wrapper.patch_centres, -2)
        for name in self.bias_arguments:
            if narrowed.get(name) is not None:
                narrowed[name] = narrow_bias(narrowed[name], wrapper.centres)
        if wrapper.log_sizes is not None:
            name = next((name for name in self.bias_arguments if name in narrowed), "attn_mask")
            narrowed[name] = add_log_sizes(narrowed.get(name), wrapper.log_sizes)
        return narrowed

    def has_class_token(self, model: Host) -> bool:
        return getattr(model, "cls_token", None) is not None

    def parts_without_tokens(self, block: Host) -> list[str]:
        return ["attn.rel_pos.mlp"]  # the network behind ViT-RelPos' bias, where a block has one

    def mlp_parts(self, block: nn.Module) -> tuple[str, str] | None:
        return ("norm2", "mlp") if type(block) in PRE_NORM_BLOCKS else None

    def tokens_read(self, model: Host) -> int | None:
        pooled_by_attention = getattr(model, "attn_pool", None) is not None
        return int(model.num_prefix_tokens) if model.global_pool == "token" and not pooled_by_attention else None

    def halves(self, block: nn.Module) -> tuple[nn.Module, nn.Module] | None:
        return (AttentionHalf(block), MlpHalf(block)) if is_plain(block) else None

    def computes_partly(self, block: nn.Module) -> bool:
        return is_plain(block)

    def inference_block(self, block: nn.Module, run: Run) -> nn.Module:
        return inference_block(parts_of(block), run)

    @contextmanager
    def for_scoring(self, model: Host) -> Iterator[None]:
        fused = {module: module.fused_attn for module in model.modules() if hasattr(module, "fused_attn")}
        checkpointing = getattr(model, "grad_checkpointing", False)
        try:
            for module in fused:
                module.fused_attn = True
            model.grad_checkpointing = False
            yield
        finally:
            for module, value in fused.items():
                module.fused_attn = value
            model.grad_checkpointing = checkpointing

    def traits(self, model: Host) -> dict[str, Any]:
        block = model.blocks[0]
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


class NarrowBias(nn.Module):
    """The relative position bias of a block, between the group centres only."""

    centres: Tensor
    log_sizes: Tensor | None

    def __init__(self, full: Host, wrapper: PruneMerge) -> None:
        super().__init__()
        self.full = full
        self.register_buffer("centres", wrapper.centres, persistent=False)
        self.register_buffer("log_sizes", wrapper.log_sizes, persistent=False)

    def get_bias(self) -> Tensor:
        """The bias as timm's attention adds it: (1, heads, groups, groups)."""
        bias = narrow_bias(self.full.get_bias(), self.centres)
        return bias if self.log_sizes is None else add_log_sizes(bias, self.log_sizes)

    def forward(self, attention: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        """What timm calls where attention is not fused."""
        return attention + self.get_bias()
