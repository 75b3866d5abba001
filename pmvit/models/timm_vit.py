"""Adapter for timm's plain vision transformers: ViT, DeiT, BEiT, EVA and those built on them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.data.config import resolve_data_config
from timm.layers import Attention
from timm.models.beit import Beit
from timm.models.eva import Eva
from timm.models.vision_transformer import Block, VisionTransformer
from timm.models.vision_transformer_relpos import VisionTransformerRelPos
from torch import Tensor, nn

from pmvit.errors import PmvitError
from pmvit.files import check_fields
from pmvit.models.adapter import Adapter, HostChange, Target, TokenLayout, register, select_tokens
from pmvit.prune_merge import PruneMerge

Host = Any  # timm's models: nn.Modules whose attributes have no types
FORBIDDEN_ARGUMENTS = {"pretrained", "pretrained_cfg", "checkpoint_path", "cache_dir"}  # they read other files
DATA_KEYS = ("input_size", "interpolation", "mean", "std", "crop_pct", "crop_mode")


@register
class TimmViT(Adapter):
    """All blocks of these models stand in `model.blocks` and take and return tokens of shape (batch, N, D)."""

    family = "timm plain ViT (VisionTransformer, DeiT, CLIP and SigLIP towers, hybrids, BEiT, EVA, DINOv3, ViT-RelPos)"
    takes_attention_bias = True
    classes = (VisionTransformer, VisionTransformerRelPos, Beit, Eva)
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
        return _input_channels(model), height, width

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
                narrowed[name] = _narrow_bias(narrowed[name], wrapper.centres)
        if wrapper.log_sizes is not None:
            name = next((name for name in self.bias_arguments if name in narrowed), "attn_mask")
            narrowed[name] = _add_log_sizes(narrowed.get(name), wrapper.log_sizes)
        return narrowed

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
        self, block: nn.Module, num_outputs: int, bias: Tensor | None, target: Target, inplace: bool
    ) -> nn.Module:
        return PartialBlock(block, num_outputs, bias, target, inplace)

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
            default = _traits(timm.create_model(architecture))
        read_off = {name: value for name, value in _traits(model).items() if value != default[name]}
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

    def data_config(self, model: Host) -> dict[str, Any]:
        config = resolve_data_config(pretrained_cfg=getattr(model, "pretrained_cfg", {}))
        config["input_size"] = self.input_size(model)
        channels = config["input_size"][0]
        for key in ("mean", "std"):
            if len(config[key]) != channels:  # made for other channels: their mean serves for each
                config[key] = (sum(config[key]) / len(config[key]),) * channels
        return {key: list(v) if isinstance(v := config[key], tuple) else v for key in DATA_KEYS}


def is_plain(block: nn.Module) -> bool:
    """Whether a block is timm's usual one: normalise, attend, add; normalise, MLP, add."""
    return type(block) is Block and type(block.attn) is Attention


class PartialBlock(nn.Module):
    """timm's usual block for inference: its first `num_outputs` tokens, with keys and values of all.

    For graphs, query, key and value are projected apart, so that no runtime has to take them out of one tensor again;
    the scale of the scores goes into the query's weights. The bias of the keys adds the same to all scores of a query,
    and that of the values the same to every output: the first is left out, the second goes into the output projection.
    """

    bias: Tensor | None

    def __init__(self, block: Host, num_outputs: int, bias: Tensor | None, target: Target, inplace: bool) -> None:
        super().__init__()
        self.block = block
        self.num_outputs = num_outputs
        self.target = target
        self.inplace = inplace
        self.register_buffer("bias", None if bias is None else bias[None, None, None], persistent=False)
        self.parts = _Projections(block.attn) if target != "eager" else None

    def forward(self, tokens: Tensor) -> Tensor:
        block: Host = self.block
        count = tokens.shape[1]
        if self.parts is None and self.num_outputs == count:
            add = Tensor.add_ if self.inplace else Tensor.add
            tokens = add(tokens, block.ls1(block.attn(block.norm1(tokens), attn_mask=self.bias)))
            tokens = add(tokens, block.ls2(block.mlp(block.norm2(tokens))))
            return tokens
        normed = block.norm1(tokens)
        if self.num_outputs < count:
            tokens = tokens[:, : self.num_outputs]
        tokens = tokens + block.ls1(self._attend(normed, self.num_outputs < count))
        tokens = tokens + block.ls2(block.mlp(block.norm2(tokens)))
        return tokens

    def _attend(self, tokens: Tensor, partly: bool) -> Tensor:
        attention: Host = self.block.attn
        asking = tokens[:, : self.num_outputs] if partly else tokens
        query, key, value = self.parts(asking, tokens) if self.parts is not None else self._project(asking, tokens)
        scale = None if self.parts is None else 1.0
        if self.target == "onnx":
            scores = query @ key.transpose(-2, -1)
            attended = (scores if self.bias is None else scores + self.bias).softmax(-1) @ value
        else:
            attended = F.scaled_dot_product_attention(query, key, value, attn_mask=self.bias, scale=scale)
        attended = attention.norm(attended.transpose(1, 2).flatten(2))
        if attention.gate is not None:
            attended = attended * attention.gate(asking).sigmoid()
        projected: Tensor = (self.parts.output if self.parts is not None else attention.proj)(attended)
        return projected

    def _project(self, asking: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value with the weights where they are."""
        attention: Host = self.block.attn
        heads = (attention.num_heads, attention.head_dim)
        weight, bias, size = attention.qkv.weight, attention.qkv.bias, attention.attn_dim
        biases = (None, None) if bias is None else (bias[:size], bias[size:])
        query = F.linear(asking, weight[:size], biases[0]).unflatten(-1, heads).transpose(1, 2)
        both = F.linear(tokens, weight[size:], biases[1]).unflatten(-1, (2, *heads))
        key, value = both.permute(2, 0, 3, 1, 4).unbind(0)
        return attention.q_norm(query), attention.k_norm(key), value


class _Projections(nn.Module):
    """The projections of an attention apart from each other, their biases and scale folded where that is exact."""

    def __init__(self, attention: Host) -> None:
        super().__init__()
        self.heads = (attention.num_heads, attention.head_dim)
        self.q_norm, self.k_norm = attention.q_norm, attention.k_norm
        is_normed = not (isinstance(self.q_norm, nn.Identity) and isinstance(self.k_norm, nn.Identity))
        has_plain_output = isinstance(attention.norm, nn.Identity) and attention.gate is None
        weights = attention.qkv.weight.chunk(3)
        biases = attention.qkv.bias.chunk(3) if attention.qkv.bias is not None else (None, None, None)
        self.late_scale = attention.scale if is_normed else None
        scale = 1.0 if is_normed else attention.scale
        self.query = _linear(weights[0] * scale, None if biases[0] is None else biases[0] * scale)
        self.key = _linear(weights[1], biases[1] if is_normed else None)
        self.value = _linear(weights[2], None if has_plain_output else biases[2])
        output_bias = attention.proj.bias
        if has_plain_output and biases[2] is not None:
            moved = attention.proj.weight @ biases[2]
            output_bias = moved if output_bias is None else output_bias + moved
        self.output = _linear(attention.proj.weight, output_bias)

    def forward(self, asking: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = (
            layer(read).unflatten(-1, self.heads).transpose(1, 2)
            for layer, read in ((self.query, asking), (self.key, tokens), (self.value, tokens))
        )
        query = self.q_norm(query)
        return query if self.late_scale is None else query * self.late_scale, self.k_norm(key), value


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return layer


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
        bias = _narrow_bias(self.full.get_bias(), self.centres)
        return bias if self.log_sizes is None else _add_log_sizes(bias, self.log_sizes)

    def forward(self, attention: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        """What timm calls where attention is not fused."""
        return attention + self.get_bias()


def _narrow_bias(bias: Tensor, centres: Tensor) -> Tensor:
    """Keep the rows and columns of the centres; a dimension of size 1 is broadcast and stays."""
    return select_tokens(bias, centres, *(dim for dim in (-2, -1) if bias.shape[dim] > 1))


def _add_log_sizes(bias: Tensor | None, log_sizes: Tensor) -> Tensor:
    """Add the logarithm of each key's group size to the bias; a boolean mask becomes an additive one."""
    if bias is None:
        return log_sizes[None, None, None, :]
    if bias.dtype == torch.bool:
        return log_sizes.expand(bias.shape).masked_fill(~bias, float("-inf"))
    return bias + log_sizes.to(bias.dtype)


def _input_channels(model: Host) -> int:
    return next(m.in_channels for m in model.patch_embed.modules() if isinstance(m, nn.Conv2d))


def _traits(model: Host) -> dict[str, Any]:
    """The arguments of `timm.create_model` that can be read off a model."""
    block = model.blocks[0]
    return {
        "num_classes": model.num_classes,
        "in_chans": _input_channels(model),
        "img_size": list(model.patch_embed.img_size),
        "patch_size": list(model.patch_embed.patch_size),
        "global_pool": model.global_pool,
        "embed_dim": model.embed_dim,
        "depth": len(model.blocks),
        "num_heads": getattr(getattr(block, "attn", block), "num_heads", None),
    }


def _shapes(model: Host) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}
