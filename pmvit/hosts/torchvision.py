"""torchvision's VisionTransformer (`vit_b_16` and its sisters) and Swin Transformers (`swin_t`, `swin_v2_b`, ...).

torchvision is imported only where a model has to be made: whoever has one of its models has imported it.
"""

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from pmvit.adaptive import AdaptiveBlock
from pmvit.hosts.groups import OfGroups
from pmvit.hosts.host import AnyModule, HostChange, PartNames, Reading, TokenLayout, register
from pmvit.hosts.making import IMAGENET, MadeModel
from pmvit.hosts.modes import changed
from pmvit.hosts.parts import PlainParts, inner_block, linear, plain_parts, split_heads
from pmvit.hosts.swin.blocks import Names
from pmvit.hosts.swin.host import SwinHost
from pmvit.merged_mlp import unwrapped
from pmvit.prune_merge import PruneMerge
from pmvit.windows import Windows

TRAITS = ("image_size", "patch_size", "hidden_dim", "mlp_dim", "dropout", "attention_dropout", "num_classes")
SWIN_ARGUMENTS = (
    *("patch_size", "embed_dim", "depths", "num_heads", "window_size", "mlp_ratio", "dropout", "attention_dropout"),
    *("stochastic_depth_prob", "num_classes", "image_size"),
)
# Of the weights torchvision gives, for Swin v1 and v2: the side of an image, and of what it is cut from.
SIDES = ((224, 232), (256, 260))


class TorchvisionModel(MadeModel):
    """A model of torchvision.

    Attributes:
        made_in: The module and the name of its class.
    """

    library = "torchvision"
    made_in: tuple[str, str]

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        return any((base.__module__, base.__name__) == cls.made_in for base in type(model).__mro__)

    def prepared(self, interpolation: str, crop_pct: float) -> dict[str, Any]:
        """How images are prepared: as for the weights that torchvision gives, unless the model says otherwise."""
        mean, std = IMAGENET
        usual = {"interpolation": interpolation, "mean": mean, "std": std, "crop_pct": crop_pct, "crop_mode": "center"}
        return {**usual, **getattr(self.model, "pretrained_cfg", {})}


@register
class TorchvisionViT(TorchvisionModel):
    """All blocks stand in `model.encoder.layers` and take tokens alone; attention is `nn.MultiheadAttention`."""

    key = "torchvision-vit"
    family = "torchvision VisionTransformer"
    takes_attention_bias = True
    accepted = frozenset((*TRAITS, "representation_size", "num_layers", "num_heads"))
    head = "heads"
    made_in = ("torchvision.models.vision_transformer", "VisionTransformer")

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
        attention, bias = block.self_attention, None
        if isinstance(attention, BiasedAttention):
            bias, attention = attention.bias_of_sizes(attention.attention.in_proj_bias), attention.attention
        kinds = [type(layer) for layer in unwrapped(block.mlp).children()]
        if type(block).__name__ != "EncoderBlock" or kinds != [nn.Linear, nn.GELU, nn.Dropout, nn.Linear, nn.Dropout]:
            return None
        qkv = (linear(attention.in_proj_weight, attention.in_proj_bias),)
        return plain_parts(block, attention, qkv, ("ln_1", "ln_2"), ("0", "1", "3"), bias=bias)

    def part_names(self, block: nn.Module) -> PartNames:
        return PartNames(mlp=("ln_2", "mlp"))

    def fit(self, wrapper: PruneMerge | AdaptiveBlock, layout: TokenLayout) -> list[HostChange]:
        block: AnyModule = wrapper.block
        if isinstance(wrapper, PruneMerge) and wrapper.log_sizes is None:
            return []
        return [HostChange.make(block, "self_attention", BiasedAttention(block.self_attention, wrapper))]

    def observed(self, counting: bool = False) -> AbstractContextManager[None]:
        """Write `nn.MultiheadAttention` out: it hides its products from whoever listens or counts."""
        attentions = [module for module in self.model.modules() if isinstance(module, nn.MultiheadAttention)]
        return changed([(attention, "forward", partial(attend, attention, None)) for attention in attentions])

    def describe(self, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
        model = self.model
        read_off = {name: getattr(model, name) for name in (*TRAITS, "representation_size")}
        read_off["num_layers"] = len(model.encoder.layers)
        read_off["num_heads"] = model.encoder.layers[0].num_heads
        described = {**read_off, **(arguments or {})}
        return self.checked({"architecture": type(model).__name__, "arguments": described, "data": self.data_config()})

    @classmethod
    def make(cls, description: dict[str, Any]) -> AnyModule:
        from torchvision.models import VisionTransformer

        return VisionTransformer(**description["arguments"])

    def preparation(self) -> dict[str, Any]:
        return self.prepared("bilinear", 0.875)


def attend(
    attention: nn.MultiheadAttention, bias: Tensor | None, query: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """Self-attention as `nn.MultiheadAttention` computes it, with a bias on its scores."""
    projected = F.linear(query, attention.in_proj_weight, attention.in_proj_bias)
    query, key, value = split_heads(projected, attention.num_heads)
    dropout = attention.dropout if attention.training else 0.0
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout)
    return attention.out_proj(attended.transpose(1, 2).flatten(2)), None


class BiasedAttention(OfGroups):
    """Attention between groups, which counts their members."""

    def __init__(self, attention: nn.MultiheadAttention, wrapper: PruneMerge | AdaptiveBlock) -> None:
        super().__init__(wrapper)
        self.attention = attention

    def forward(self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool = False) -> tuple[Tensor, None]:
        return attend(self.attention, self.bias_of_sizes(query), query)


@register
class TorchvisionSwin(SwinHost, TorchvisionModel):
    """Stages stand in `model.features`, patch merging between them; tokens come as (batch, rows, columns, width).

    These models take images of any size, and a plan is for one: that of torchvision's weights, or `model.image_size`.
    """

    key = "torchvision-swin"
    family = "torchvision Swin (swin_t, swin_s, swin_b, swin_v2_t, swin_v2_s, swin_v2_b)"
    accepted = frozenset(SWIN_ARGUMENTS)
    made_in = ("torchvision.models.swin_transformer", "SwinTransformer")

    def names(self, block: nn.Module) -> Names:
        return Names(dropouts=("attn.attention_dropout", "attn.dropout"), drop_paths=("stochastic_depth",) * 2)

    def stages(self) -> list[str]:
        return [f"features.{place}" for place in range(1, len(self.model.features), 2)]

    def windows(self, block: AnyModule, grid: tuple[int, int]) -> Windows:
        (rows, columns), shift = block.attn.window_size, block.attn.shift_size
        down, right = (
            0 if size >= side + -side % size else by
            for size, side, by in zip((rows, columns), grid, shift, strict=True)
        )
        return Windows((rows, columns), (down, right), pad_first=True)

    def input_size(self) -> tuple[int, int, int]:
        side = getattr(self.model, "image_size", SIDES[self._is_v2()][0])
        height, width = side if isinstance(side, (tuple, list)) else (side, side)
        return self.model.features[0][0].in_channels, height, width

    def _is_v2(self) -> bool:
        first = inner_block(self.model.features[1][0])
        return self.names(first).is_v2(first)

    def describe(self, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
        model = self.model
        stages: list[AnyModule] = [model.get_submodule(path) for path in self.stages()]
        first = stages[0][0]
        read_off = {
            "patch_size": list(model.features[0][0].kernel_size),
            "embed_dim": model.features[0][0].out_channels,
            "depths": [len(stage) for stage in stages],
            "num_heads": [stage[0].attn.num_heads for stage in stages],
            "window_size": list(first.attn.window_size),
            "mlp_ratio": first.mlp[0].out_features / first.mlp[0].in_features,
            "dropout": first.attn.dropout,
            "attention_dropout": first.attn.attention_dropout,
            "stochastic_depth_prob": stages[-1][-1].stochastic_depth.p,
            "num_classes": model.num_classes,
            "image_size": list(self.input_size()[1:]),
        }
        name = f"SwinTransformer{'V2' if self._is_v2() else ''}"
        arguments = {**read_off, **(arguments or {})}
        return self.checked({"architecture": name, "arguments": arguments, "data": self.data_config()})

    @classmethod
    def make(cls, description: dict[str, Any]) -> AnyModule:
        from torchvision.models import swin_transformer as swin

        arguments = dict(description["arguments"])
        size = arguments.pop("image_size", None)
        if description["architecture"] == "SwinTransformerV2":
            arguments |= {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2}
        model: AnyModule = swin.SwinTransformer(**arguments)
        model.image_size = size
        return model

    def preparation(self) -> dict[str, Any]:
        side, before = SIDES[self._is_v2()]
        return self.prepared("bicubic", side / before)
