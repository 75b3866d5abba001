"""What the hosts of all of timm's models have in common: how one is described, and made again."""

import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import timm
import torch
from timm.data.config import resolve_data_config
from torch import Tensor, nn

from pmvit.errors import PmvitError
from pmvit.hosts.host import AnyModule, Outputs
from pmvit.hosts.making import MadeModel, one_line

# What timm's vision transformers and Swins are made of, of all that `timm.create_model` takes.
SIZES = ("img_size", "patch_size", "in_chans", "num_classes", "embed_dim", "depth", "depths", "num_heads", "mlp_ratio")
ARGUMENTS = frozenset(
    (
        *SIZES,
        *("features_only", "out_indices", "global_pool", "head_dim", "num_kv_heads", "reg_tokens", "num_reg_tokens"),
        *("qkv_bias", "qkv_fused", "qk_norm", "proj_bias", "scale_attn_norm", "scale_mlp_norm", "scale_attn_inner"),
        *("scale_mlp", "swiglu_mlp", "swiglu_align_to", "init_values", "attn_type", "attn_only_layer_scale"),
        *("class_token", "pos_embed", "no_embed_class", "use_abs_pos_emb", "use_rot_pos_emb", "use_rel_pos_bias"),
        *("use_shared_rel_pos_bias", "rel_pos_type", "rel_pos_dim", "shared_rel_pos", "rope_type", "rope_grid_offset"),
        *("rope_grid_indexing", "rope_temperature", "rope_rotate_half", "rope_shift_coords", "rope_jitter_coords"),
        *("rope_rescale_coords", "ref_feat_shape", "pre_norm", "final_norm", "fc_norm", "use_fc_norm"),
        *("use_post_norm", "use_pre_transformer_norm", "use_post_transformer_norm", "pool_include_prefix"),
        *("attn_pool_num_heads", "attn_pool_mlp_ratio", "dynamic_img_size", "dynamic_img_pad", "strict_img_size"),
        *("window_size", "always_partition", "pretrained_window_sizes", "drop_rate", "pos_drop_rate"),
        *("patch_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate", "weight_init", "fix_init"),
        *("head_init_scale", "norm_layer", "act_layer", "embed_norm_layer", "attn_layer"),
    )
)


class TimmModel(MadeModel):
    """Models that `timm.create_model` makes.

    Attributes:
        classes: Those of the models.
        path: Where timm's model is in a model that is built around one.
        always: Arguments of `timm.create_model` without which it makes no such model.
    """

    library = "timm"
    accepted = ARGUMENTS
    classes: tuple[type[nn.Module], ...]
    path: str = ""
    always: ClassVar[dict[str, Any]] = {}

    @property
    def encoder(self) -> AnyModule:
        """The model of timm."""
        return self.model.get_submodule(self.path)

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        return isinstance(model, cls.classes)

    def input_size(self) -> tuple[int, ...]:
        embedding = self.encoder.patch_embed
        height, width = embedding.img_size
        return next(m.in_channels for m in embedding.modules() if isinstance(m, nn.Conv2d)), height, width

    def outputs(self) -> Outputs:
        count = self.model.num_classes or None
        return Outputs(gives_logits=count is not None, num_classes=count)

    def traits(self) -> dict[str, Any]:
        """The arguments of `timm.create_model` that can be read off the model."""
        model = self.encoder
        return {
            "num_classes": model.num_classes,
            "in_chans": self.input_size()[0],
            "img_size": list(model.patch_embed.img_size),
            "patch_size": one_or_all(model.patch_embed.patch_size),
            "global_pool": model.global_pool,
            "embed_dim": model.embed_dim,
        }

    def describe(self, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
        architecture = getattr(self.model, "pretrained_cfg", {}).get("architecture")
        if not architecture:
            raise PmvitError(
                f"expected a model made by timm.create_model, which can make it again; got a "
                f"{type(self.model).__name__} made by hand"
            )
        with torch.device("meta"):
            default = type(self)(timm.create_model(architecture, **self.always)).traits()
        read_off = {name: value for name, value in self.traits().items() if value != default[name]}
        arguments = {**read_off, **getattr(self.model, "built_with", {}), **self.always, **(arguments or {})}
        return self.checked({"architecture": architecture, "arguments": arguments, "data": self.data_config()})

    @classmethod
    def make(cls, description: dict[str, Any]) -> AnyModule:
        architecture, arguments = description["architecture"], description["arguments"]
        if not (isinstance(architecture, str) and timm.is_model(architecture)):
            raise PmvitError(f"expected one of timm's architectures, got {architecture!r}: is timm too old for it?")
        model: AnyModule = timm.create_model(architecture, pretrained=False, **arguments)
        model.built_with = arguments  # so that a loaded model can be saved again
        return model

    def preparation(self) -> dict[str, Any]:
        own = getattr(self.model, "pretrained_cfg", None) or getattr(self.encoder, "pretrained_cfg", {})
        found: dict[str, Any] = resolve_data_config(pretrained_cfg=own)
        return found


def resize_weights(encoder: AnyModule, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of a model for images of another size, made to fit as timm does it: position embeddings are resized."""
    filtering = getattr(sys.modules[type(encoder).__module__], "checkpoint_filter_fn", None)
    own = encoder.state_dict()
    if filtering is None or all(tensors[name].shape == own[name].shape for name in own if name in tensors):
        return tensors
    with one_line("timm could not resize the position embeddings of these weights"):
        resized: dict[str, Tensor] = filtering(tensors, encoder)
    return resized


def one_or_all(values: Sequence[Any]) -> Any:
    """The one value that all are, or a list of them."""
    return values[0] if len(set(values)) == 1 else list(values)
