"""timm's plain vision transformers: ViT, DeiT, BEiT, EVA and those built on them; feature extractors on these."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch.fx
from timm.models import beit, eva, vision_transformer, vision_transformer_relpos
from timm.models._features import FeatureGetterNet, feature_take_indices
from torch import Tensor, nn

from pmvit.adaptive import AdaptiveBlock
from pmvit.errors import PmvitError
from pmvit.hosts.groups import OfGroups, add_log_sizes, bias_at_centres
from pmvit.hosts.host import AnyModule, HostChange, Outputs, PartNames, Reading, TokenLayout, for_one_size, register
from pmvit.hosts.making import one_line
from pmvit.hosts.modes import changed
from pmvit.hosts.parts import PlainParts
from pmvit.hosts.timm.model import TimmModel
from pmvit.hosts.timm.parts import PLAIN, parts_of
from pmvit.prune_merge import PruneMerge

# A traced model does not know yet whether it will be given a mask.
torch.fx.wrap("bias_at_centres")
torch.fx.wrap("add_log_sizes")


@register
class TimmViT(TimmModel):
    """All blocks of these models stand in `model.blocks` and take and return tokens of shape (batch, N, D)."""

    key = "timm-vit"
    family = "timm plain ViT (VisionTransformer, DeiT, CLIP and SigLIP towers, hybrids, BEiT, EVA, DINOv3, ViT-RelPos)"
    takes_attention_bias = True
    classes: tuple[type[nn.Module], ...] = (
        vision_transformer.VisionTransformer,
        vision_transformer_relpos.VisionTransformerRelPos,
        beit.Beit,
        eva.Eva,
    )
    rotary_argument = "rope"
    bias_arguments = ("attn_mask", "shared_rel_pos", "shared_rel_pos_bias")

    def blocks_read(self) -> list[int]:
        """The blocks after which tokens are read."""
        return [len(self.encoder.blocks) - 1]

    def block_names(self) -> list[str]:
        count = max(self.blocks_read()) + 1  # nothing depends on those that follow
        return [f"{self.path}.blocks.{index}".removeprefix(".") for index in range(count)]

    def layouts(self) -> list[TokenLayout]:
        model = self.encoder
        height, width = model.patch_embed.grid_size
        has_class_token = getattr(model, "cls_token", None) is not None
        layout = TokenLayout((int(height), int(width)), int(model.num_prefix_tokens), has_class_token=has_class_token)
        return [layout] * len(self.block_names())

    def set_size(self, height: int, width: int) -> None:
        """As `Resizable` has it."""
        model = self.encoder
        if not hasattr(model, "set_input_size"):
            raise for_one_size(model)
        patch = model.patch_embed.feat_ratio(as_scalar=False)
        if any(side % part for side, part in zip((height, width), patch, strict=True)):
            raise PmvitError(
                f"img_size: expected multiples of the patches, {patch[0]} x {patch[1]}; got {height} x {width}"
            )
        with one_line(f"timm could not bring a {type(model).__name__} to images of {height} x {width}"):
            model.set_input_size(img_size=(height, width))
        if "img_size" in getattr(model, "built_with", {}):
            model.built_with = {**model.built_with, "img_size": [height, width]}

    def reading(self) -> Reading:
        model, names = self.encoder, self.block_names()
        ends = sorted({index + 1 for index in self.blocks_read()})
        spans = [names[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        if self.path:  # what the first two blocks lose, every map that is read later lacks
            return Reading(spans, None, (0, 1) if len(model.blocks) > 4 else ())
        pools = model.global_pool != "token" or getattr(model, "attn_pool", None) is not None
        return Reading(spans, None if pools else int(model.num_prefix_tokens))

    def fit(self, wrapper: PruneMerge | AdaptiveBlock, layout: TokenLayout) -> list[HostChange]:
        attention: AnyModule = getattr(wrapper.block, "attn", None)
        if getattr(attention, "rel_pos", None) is not None:
            return [HostChange.make(attention, "rel_pos", BiasAtCentres(attention.rel_pos, wrapper))]
        if getattr(attention, "relative_position_bias_table", None) is not None:
            table = TableAtCentres(attention._get_rel_pos_bias, wrapper)
            return [HostChange.make(attention, "_get_rel_pos_bias", table.get_bias)]
        return []

    def plain_parts(self, block: nn.Module, arguments: dict[str, Any]) -> PlainParts | None:
        return parts_of(block, arguments)

    def part_names(self, block: nn.Module) -> PartNames:
        return PartNames(
            mlp=("norm2", "mlp") if type(block) in PLAIN else None,
            without_tokens=("attn.rel_pos.mlp",),  # the network behind ViT-RelPos' bias, where a block has one
        )

    def observed(self, counting: bool = False) -> AbstractContextManager[None]:
        fused = [(module, "fused_attn", True) for module in self.encoder.modules() if hasattr(module, "fused_attn")]
        return changed([*fused, (self.encoder, "grad_checkpointing", False)])

    def traits(self) -> dict[str, Any]:
        blocks = self.encoder.blocks
        heads = getattr(getattr(blocks[0], "attn", blocks[0]), "num_heads", None)
        return {**super().traits(), "depth": len(blocks), "num_heads": heads}


@register
class TimmFeatures(TimmViT):
    """`features_only=True`: the blocks stand in `model.model.blocks`, and a list of feature maps comes out."""

    key = "timm-features"
    family = "timm feature extractor (features_only=True on a plain ViT)"
    path = "model"
    always: ClassVar[dict[str, Any]] = {"features_only": True}

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        return isinstance(model, FeatureGetterNet) and isinstance(model.model, cls.classes)

    def blocks_read(self) -> list[int]:
        taken, _ = feature_take_indices(len(self.encoder.blocks), self.model.out_indices)
        return [int(index) for index in taken]

    def outputs(self) -> Outputs:
        return Outputs(gives_logits=False, returns_tensor=False)

    def traits(self) -> dict[str, Any]:
        return {**super().traits(), "out_indices": self.blocks_read()}


class TableAtCentres(OfGroups):
    """BEiT's relative position bias of a block, between the group centres only; sizes are counted elsewhere."""

    def __init__(self, full: Callable[[], Tensor], wrapper: PruneMerge | AdaptiveBlock) -> None:
        super().__init__(wrapper)
        self.full = full

    def get_bias(self) -> Tensor:
        """The bias as timm's attention adds it: (batch or 1, heads, groups, groups)."""
        bias = self.full()
        centres, _ = self.groups(bias)
        return bias if centres is None else bias_at_centres(bias, centres.to(bias.device))  # it is no submodule


class BiasAtCentres(OfGroups):
    """The relative position bias of a block, between the group centres only."""

    def __init__(self, full: AnyModule, wrapper: PruneMerge | AdaptiveBlock) -> None:
        super().__init__(wrapper)
        self.full = full

    def get_bias(self) -> Tensor:
        """The bias as timm's attention adds it: (batch or 1, heads, groups, groups)."""
        bias: Tensor = self.full.get_bias()
        centres, log_sizes = self.groups(bias)
        bias = bias if centres is None else bias_at_centres(bias, centres)
        return bias if log_sizes is None else add_log_sizes(bias, log_sizes)

    def forward(self, attention: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        """What timm calls where attention is not fused."""
        return attention + self.get_bias()


def select_weights(model: AnyModule, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of a classifier's weights that a feature extractor has, under its names."""
    named = {f"{TimmFeatures.path}.{name}": value for name, value in tensors.items()}
    return {name: named[name] for name in model.state_dict() if name in named}
