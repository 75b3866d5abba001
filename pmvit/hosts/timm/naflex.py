"""timm's NaFlexViT, called with images as one tensor: all of one size, as its other vision transformers have them."""

from typing import Any

from timm.models.naflexvit import NaFlexVit

from pmvit.errors import PmvitError
from pmvit.flow import Groups
from pmvit.hosts.host import TokenLayout, register
from pmvit.hosts.timm.model import ARGUMENTS, one_or_all
from pmvit.hosts.timm.vit import TimmViT
from pmvit.prune_merge import PruneMerge

NAFLEX_ARGUMENTS = (
    *("pos_embed_grid_size", "pos_embed_interp_mode", "pos_embed_ar_preserving", "pos_embed_use_grid_sample"),
    *("embed_proj_type", "patchify_channels_last", "rope_ref_feat_shape", "rope_mrope_section", "attn_gated"),
    *("scale_mlp_norm", "scale_attn_inner_norm"),
)


@register
class TimmNaFlex(TimmViT):
    """These models take images of any size; that of `pretrained_cfg` is the one that they are measured at."""

    key = "timm-naflex"
    family = "timm NaFlexViT, called with images of one size"
    accepted = ARGUMENTS | frozenset(NAFLEX_ARGUMENTS)
    classes = (NaFlexVit,)

    def input_size(self) -> tuple[int, ...]:
        model = self.model
        size = (getattr(model, "pretrained_cfg", None) or {}).get("input_size")
        if size is None:
            raise PmvitError(
                "expected a NaFlexVit with the size of its images, as pretrained_cfg['input_size'] = (3, 384, 384); "
                "got one without"
            )
        return int(model.in_chans), *(int(side) for side in size[1:])

    def set_size(self, height: int, width: int) -> None:
        """As `Resizable` has it: the model itself takes any."""
        self.model.pretrained_cfg["input_size"] = (int(self.model.in_chans), height, width)

    def layouts(self) -> list[TokenLayout]:
        model, (_, height, width) = self.model, self.input_size()
        grid = tuple(model.embeds.dynamic_feat_size((height, width)))
        layout = TokenLayout(grid, int(model.num_prefix_tokens), has_class_token=bool(model.has_class_token))
        return [layout] * len(self.block_names())

    @classmethod
    def arguments_at_centres(cls, wrapper: PruneMerge | Groups, arguments: dict[str, Any]) -> dict[str, Any]:
        if arguments.get("attn_mask") is not None:
            raise PmvitError(
                "expected images as one tensor, all of the size that the plan is for; got patches with a mask, "
                "where every image has a grid of its own"
            )
        return super().arguments_at_centres(wrapper, arguments)

    def traits(self) -> dict[str, Any]:
        model = self.model
        return {
            "num_classes": model.num_classes,
            "in_chans": model.in_chans,
            "patch_size": one_or_all(model.embeds.patch_size),
            "global_pool": model.global_pool,
            "embed_dim": model.embed_dim,
            "depth": len(model.blocks),
            "num_heads": model.blocks[0].attn.num_heads,
        }

    def describe(self, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
        architecture = str(getattr(self.model, "pretrained_cfg", {}).get("architecture"))
        if not architecture.startswith("naflexvit"):
            raise PmvitError(
                f"expected one of timm's naflexvit architectures to save; got {architecture} made with use_naflex=True"
            )
        return super().describe(arguments)
