"""torchvision's VisionTransformer (`vit_b_16` and its sisters)."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from pmvit.errors import PmvitError
from pmvit.files import check_fields
from pmvit.hosts.host import (
    DATA_KEYS,
    AnyModule,
    Host,
    HostChange,
    PartNames,
    Reading,
    TokenLayout,
    add_log_sizes,
    register,
)
from pmvit.hosts.parts import PlainMlp, PlainParts, linear
from pmvit.merged_mlp import unwrapped
from pmvit.prune_merge import PruneMerge

MODULE = "torchvision.models.vision_transformer"
DATA = {  # of the weights torchvision gives by default: resized to 256, centre crop of 224
    "interpolation": "bilinear",
    "mean": [0.485, 0.456, 0.406],
    "std": [0.229, 0.224, 0.225],
    "crop_pct": 0.875,
    "crop_mode": "center",
}
TRAITS = ("image_size", "patch_size", "hidden_dim", "mlp_dim", "dropout", "attention_dropout", "num_classes")


@register
class TorchvisionViT(Host):
    """All blocks stand in `model.encoder.layers` and take tokens alone; attention is `nn.MultiheadAttention`."""

    key = "torchvision-vit"
    family = "torchvision VisionTransformer"
    takes_attention_bias = True

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        return any(base.__module__ == MODULE and base.__name__ == "VisionTransformer" for base in type(model).__mro__)

    def block_names(self) -> list[str]:
        return [f"encoder.layers.{name}" for name, _ in self.model.encoder.layers.named_children()]

    def layouts(self) -> list[TokenLayout]:
        side = self.model.image_size // self.model.patch_size
        return [TokenLayout((side, side), 1)] * len(self.model.encoder.layers)

    def input_size(self) -> tuple[int, int, int]:
        return 3, self.model.image_size, self.model.image_size

    def reading(self) -> Reading:
        return Reading([self.block_names()], num_read=1)

    def plain_parts(self, block: AnyModule, arguments: dict[str, Any]) -> PlainParts | None:
        return parts_of(block)

    def part_names(self, block: nn.Module) -> PartNames:
        return PartNames(mlp=("ln_2", "mlp"))

    def fit(self, wrapper: PruneMerge, layout: TokenLayout) -> list[HostChange]:
        block: AnyModule = wrapper.block
        if wrapper.log_sizes is None:
            return []
        change = HostChange(block, "self_attention", block.self_attention)
        block.self_attention = BiasedAttention(block.self_attention, wrapper.log_sizes)
        return [change]

    @contextmanager
    def observed(self, counting: bool = False) -> Iterator[None]:
        attentions = [module for module in self.model.modules() if isinstance(module, nn.MultiheadAttention)]
        try:
            for attention in attentions:
                attention.forward = partial(attend, attention)  # type: ignore[method-assign]  # for this while only
            yield
        finally:
            for attention in attentions:
                del attention.forward

    def describe(self, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
        model = self.model
        read_off = {name: getattr(model, name) for name in (*TRAITS, "representation_size")}
        read_off["num_layers"] = len(model.encoder.layers)
        read_off["num_heads"] = model.encoder.layers[0].num_heads
        described = {**read_off, **(arguments or {})}
        return {"architecture": type(model).__name__, "arguments": described, "data": self.data_config()}

    @classmethod
    def build(cls, description: dict[str, Any]) -> AnyModule:
        from torchvision.models import VisionTransformer

        check_fields(description, ("architecture", "arguments", "data"), "the description of the model")
        try:
            model: AnyModule = VisionTransformer(**description["arguments"])
        except (TypeError, ValueError, RuntimeError, AssertionError) as error:
            raise PmvitError(
                f"torchvision cannot make a VisionTransformer with {description['arguments']} ({error})"
            ) from None
        model.pretrained_cfg = check_fields(description["data"], DATA_KEYS, "the model's data configuration")
        return model.eval()

    def data_config(self) -> dict[str, Any]:
        found = {**DATA, **getattr(self.model, "pretrained_cfg", {}), "input_size": list(self.input_size())}
        return {key: found[key] for key in DATA_KEYS}


def parts_of(block: AnyModule) -> PlainParts | None:
    """What a block is made of; `None` if it is not torchvision's own."""
    attention, bias = block.self_attention, None
    if isinstance(attention, BiasedAttention):
        bias, attention = attention.bias, attention.attention
    mlp: AnyModule = unwrapped(block.mlp)
    kinds = [type(layer) for layer in mlp]
    if type(block).__name__ != "EncoderBlock" or kinds != [nn.Linear, nn.GELU, nn.Dropout, nn.Linear, nn.Dropout]:
        return None
    return PlainParts(
        norm1=block.ln_1,
        qkv=(linear(attention.in_proj_weight, attention.in_proj_bias),),
        heads=(attention.num_heads, attention.head_dim),
        scale=attention.head_dim**-0.5,
        projection=attention.out_proj,
        norm2=unwrapped(block.ln_2),
        mlp=PlainMlp(mlp[0], mlp[1], mlp[3]),
        bias=bias,
    )


def attend(
    attention: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, need_weights: bool = False, **_: Any
) -> tuple[Tensor, None]:
    """What `nn.MultiheadAttention` computes, written out: it hides its products from whoever listens or counts."""
    return biased_attention(attention, query, None), None


def biased_attention(attention: nn.MultiheadAttention, tokens: Tensor, bias: Tensor | None) -> Tensor:
    """Self-attention with the weights of an `nn.MultiheadAttention` and a bias on its scores."""
    projected = F.linear(tokens, attention.in_proj_weight, attention.in_proj_bias)
    heads = projected.unflatten(-1, (3, attention.num_heads, attention.head_dim)).permute(2, 0, 3, 1, 4)
    query, key, value = heads.unbind(0)
    dropout = attention.dropout if attention.training else 0.0
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout)
    result: Tensor = attention.out_proj(attended.transpose(1, 2).flatten(2))
    return result


class BiasedAttention(nn.Module):
    """Attention between groups, which counts their members."""

    bias: Tensor

    def __init__(self, attention: nn.MultiheadAttention, log_sizes: Tensor) -> None:
        super().__init__()
        self.attention = attention
        self.register_buffer("bias", add_log_sizes(None, log_sizes), persistent=False)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool = False) -> tuple[Tensor, None]:
        return biased_attention(self.attention, query, self.bias), None
