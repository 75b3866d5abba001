"""torchvision's Swin Transformers, v1 and v2 (`swin_t`, `swin_v2_b` and their sisters)."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from pmvit.errors import PmvitError
from pmvit.files import check_fields
from pmvit.hosts.host import DATA_KEYS, AnyModule, register
from pmvit.hosts.swin.host import SwinHost, inner_block
from pmvit.hosts.swin.recipe import Recipe, UsualBlock, UsualV2Block, split_heads
from pmvit.windows import Windows

MODULE = "torchvision.models.swin_transformer"
DATA = {"interpolation": "bicubic", "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225], "crop_mode": "center"}
# Of the weights torchvision gives, for v1 and v2: the side of an image, and of what it is cut from.
SIDES = ((224, 232), (256, 260))


class TorchvisionSwinBlock(UsualBlock):
    """The block of Swin v1."""

    def project(self, block: AnyModule, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = split_heads(block.attn.qkv(tokens), block.attn.num_heads)
        return query * query.shape[-1] ** -0.5, key, value

    def output(self, block: AnyModule, attended: Tensor) -> Tensor:
        return F.dropout(block.attn.proj(attended), block.attn.dropout, block.training)

    def drop_paths(self, block: AnyModule) -> tuple[nn.Module, nn.Module]:
        return block.stochastic_depth, block.stochastic_depth

    def dropout(self, block: AnyModule) -> float:
        return float(block.attn.attention_dropout)


class TorchvisionSwinV2Block(UsualV2Block, TorchvisionSwinBlock):
    """The block of Swin v2."""

    def qkv_bias(self, block: AnyModule) -> Tensor | None:
        bias: Tensor | None = block.attn.qkv.bias
        if bias is None:
            return None
        third = bias.numel() // 3
        return bias * F.pad(bias.new_zeros(third), (third, third), value=1.0)  # keys have none, whatever is stored


@register
class TorchvisionSwin(SwinHost):
    """Stages stand in `model.features`, patch merging between them; tokens come as (batch, rows, columns, width).

    These models take images of any size, and a plan is for one: that of torchvision's weights, or `model.image_size`.
    """

    key = "torchvision-swin"
    family = "torchvision Swin (swin_t, swin_s, swin_b, swin_v2_t, swin_v2_s, swin_v2_b)"
    recipes = (TorchvisionSwinBlock(), TorchvisionSwinV2Block())

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        return any(base.__module__ == MODULE and base.__name__ == "SwinTransformer" for base in type(model).__mro__)

    def recipe(self, block: nn.Module) -> Recipe:
        return self.recipes[hasattr(block.attn, "logit_scale")]

    def stages(self) -> list[str]:
        return [f"features.{place}" for place in range(1, len(self.model.features), 2)]

    def first_grid(self) -> tuple[int, int]:
        _, height, width = self.input_size()
        rows, columns = self.model.features[0][0].stride
        return (height // rows, width // columns)

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
        first: AnyModule = inner_block(self.model.features[1][0])
        return hasattr(first.attn, "logit_scale")

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
        return {"architecture": name, "arguments": {**read_off, **(arguments or {})}, "data": self.data_config()}

    @classmethod
    def build(cls, description: dict[str, Any]) -> AnyModule:
        from torchvision.models import swin_transformer as swin

        check_fields(description, ("architecture", "arguments", "data"), "the description of the model")
        arguments = dict(description["arguments"])
        size = arguments.pop("image_size", None)
        if description["architecture"] == "SwinTransformerV2":
            arguments |= {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2}
        try:
            model: AnyModule = swin.SwinTransformer(**arguments)
        except (TypeError, ValueError, RuntimeError, AssertionError) as error:
            told = description["arguments"]
            raise PmvitError(f"torchvision cannot make a SwinTransformer with {told} ({error})") from None
        model.image_size = size
        model.pretrained_cfg = check_fields(description["data"], DATA_KEYS, "the model's data configuration")
        return model.eval()

    def data_config(self) -> dict[str, Any]:
        side, before = SIDES[self._is_v2()]
        found = {**DATA, "crop_pct": side / before, **getattr(self.model, "pretrained_cfg", {})}
        found["input_size"] = list(self.input_size())
        return {key: found[key] for key in DATA_KEYS}
