"""Adapter for timm's plain vision transformers: ViT, DeiT, BEiT, EVA and those built on them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import timm
import torch
from timm.data.config import resolve_data_config
from timm.models.beit import Beit
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_relpos import VisionTransformerRelPos
from torch import Tensor, nn

from pmvit.errors import PmvitError
from pmvit.files import check_fields
from pmvit.models.adapter import (
    DATA_KEYS,
    Adapter,
    HostChange,
    Target,
    TokenLayout,
    add_log_sizes,
    narrow_bias,
    register,
    select_tokens,
)
from pmvit.models.inference import inference_block
from pmvit.models.timm_inference import is_plain, parts_of
from pmvit.prune_merge import PruneMerge

Host = Any  # timm's models: nn.Modules whose attributes have no types
FORBIDDEN_ARGUMENTS = {"pretrained", "pretrained_cfg", "checkpoint_path", "cache_dir"}  # they read other files


@register
class TimmViT(Adapter):
    """All blocks of these models stand in `model.blocks` and take and return tokens of shape (batch, N, D)."""

    family = "timm plain ViT (VisionTransformer, DeiT, CLIP and SigLIP towers, hybrids, BEiT, EVA, DINOv3, ViT-RelPos)"
    takes_attention_bias = True
    classes: tuple[type[nn.Module], ...] = (VisionTransformer, VisionTransformerRelPos, Beit, Eva)
    # What a block calls the additive bias on its attention scores.
    bias_arguments = ("attn_mask", "shared_rel_pos", "shared_rel_pos_bias")

    def matches(self, model: Host) -> bool:
        return isinstance(model, self.classes)

    def layout(self, model: Host) -> TokenLayout:
        height, width = model.patch_embed.grid_size
        return TokenLayout((int(height), int(width)), int(model.num_prefix_tokens))

    def block_names(self, model: Host) -> list[str]:
        return [f"blocks.{index}" for index in range(len(model.blocks))]

    def input_size(self, model: Host) -> tuple[int, int, int]:
        height, width = model.patch_embed.img_size
        return input_channels(model), height, width

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

    def gives_logits(self, model: Host) -> bool:
        return bool(model.num_classes)

    def has_class_token(self, model: Host) -> bool:
        return getattr(model, "cls_token", None) is not None

    def parts_without_tokens(self, block: Host) -> list[str]:
        return ["attn.rel_pos.mlp"]  # the network behind ViT-RelPos' bias, where a block has one

    def tokens_read(self, model: Host) -> int | None:
        pooled_by_attention = getattr(model, "attn_pool", None) is not None
        return int(model.num_prefix_tokens) if model.global_pool == "token" and not pooled_by_attention else None

    def computes_partly(self, block: nn.Module) -> bool:
        return is_plain(block)

    def inference_block(
        self, block: nn.Module, num_tokens: int, num_outputs: int, bias: Tensor | None, target: Target, inplace: bool
    ) -> nn.Module:
        return inference_block(parts_of(block), num_tokens, num_outputs, bias, target, inplace)

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

    def describe(self, model: Host, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
        architecture = getattr(model, "pretrained_cfg", {}).get("architecture")
        if not architecture:
            raise PmvitError(
                f"expected a model made by timm.create_model, which can make it again; got a {type(model).__name__} "
                "made by hand"
            )
        with torch.device("meta"):
            default = self.traits(timm.create_model(architecture))
        read_off = {name: value for name, value in self.traits(model).items() if value != default[name]}
        arguments = {**read_off, **getattr(model, "built_with", {}), **(arguments or {})}
        description = {"architecture": architecture, "arguments": arguments, "data": self.data_config(model)}
        with torch.device("meta"):
            rebuilt = self.build(description)
        expected, got = _shapes(model), _shapes(rebuilt)
        if expected != got:
            differing = sorted(expected.items() ^ got.items())
            raise PmvitError(
                f"timm.create_model({architecture!r}, **{arguments}) does not make this model again (first difference: "
                f"{differing[0][0]}): pass `arguments=` with what else it was created with"
            )
        return description

    def build(self, description: dict[str, Any]) -> Host:
        check_fields(description, ("architecture", "arguments", "data"), "the description of the model")
        architecture, arguments = description["architecture"], description["arguments"]
        if not (isinstance(architecture, str) and timm.is_model(architecture)):
            raise PmvitError(f"expected one of timm's architectures, got {architecture!r}: is timm too old for it?")
        if not isinstance(arguments, dict) or FORBIDDEN_ARGUMENTS & set(arguments):
            raise PmvitError(f"expected arguments that describe the architecture, got {arguments!r}")
        try:
            model: Host = timm.create_model(architecture, pretrained=False, **arguments)
            model.built_with = arguments  # so that a loaded model can be saved again
            model.pretrained_cfg.update(check_fields(description["data"], DATA_KEYS, "the model's data configuration"))
        except (TypeError, ValueError, RuntimeError, AssertionError) as error:
            raise PmvitError(f"timm cannot make {architecture} with {arguments} ({error})") from None
        return model

    def traits(self, model: Host) -> dict[str, Any]:
        """The arguments of `timm.create_model` that can be read off a model."""
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

    def data_config(self, model: Host) -> dict[str, Any]:
        config = resolve_data_config(pretrained_cfg=getattr(model, "pretrained_cfg", {}))
        config["input_size"] = self.input_size(model)
        channels = config["input_size"][0]
        for key in ("mean", "std"):
            if len(config[key]) != channels:  # made for other channels: their mean serves for each
                config[key] = (sum(config[key]) / len(config[key]),) * channels
        return {key: list(v) if isinstance(v := config[key], tuple) else v for key in DATA_KEYS}


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


def input_channels(model: Host) -> int:
    return next(m.in_channels for m in model.patch_embed.modules() if isinstance(m, nn.Conv2d))


def _shapes(model: Host) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}
