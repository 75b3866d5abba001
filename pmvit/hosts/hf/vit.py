"""Adapter for the plain vision transformers of Hugging Face transformers, and for every model that is built on one.

transformers is imported by nobody here: whoever has one of its models has imported it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from pmvit.errors import PmvitError
from pmvit.hosts.hf.hooks import (
    NarrowBias,
    after_block,
    before_block,
    check_takes_bias,
    in_order,
    in_sdpa,
    num_suffix,
    outside_inference_mode,
    reordered,
    settle_masks,
    without_masking,
)
from pmvit.hosts.hf.model import HuggingFaceModel
from pmvit.hosts.hf.tower import READ_PREFIX, Tower, find_tower, reads_between
from pmvit.hosts.host import (
    HostChange,
    TokenLayout,
    add_log_sizes,
    narrow_bias,
    register,
    select_tokens,
)
from pmvit.prune_merge import PruneMerge

MLP_NORMS = ("layernorm_after", "norm2", "layer_norm2")  # what normalises tokens before the MLP

Host = Any  # the models of transformers: nn.Modules whose attributes have no types


@register
class HuggingFaceViT(HuggingFaceModel):
    """The blocks stand below the model that holds the patch embedding; see `tower` for where that is."""

    family = "Hugging Face ViT (ViT, DeiT, BEiT, DINOv2, DINOv3, CLIP, SigLIP, MAE, YOLOS and what is built on them)"
    takes_attention_bias = True

    def find_tower(self, model: Host) -> Tower | None:
        return find_tower(model)

    def call(self, model: Host, images: Tensor) -> Any:
        with outside_inference_mode():
            if hasattr(model, "get_image_features"):
                return model.get_image_features(pixel_values=images)
            return model(images, **in_order(self.tower(model), images))

    def layout(self, model: Host) -> TokenLayout:
        tower = self.tower(model)
        if getattr(tower.config, "mask_ratio", 0):
            raise PmvitError(
                f"expected a model that sees all patches, got a {type(model).__name__} that hides "
                f"{tower.config.mask_ratio:.0%} of them: set config.mask_ratio = 0, or load its weights as a ViTModel"
            )
        sides = zip(self.input_size(model)[1:], tower.patch_size, strict=True)
        height, width = (side // patch for side, patch in sides)
        return TokenLayout((height, width), tower.num_prefix)

    def block_names(self, model: Host) -> list[str]:
        names = self.tower(model).blocks
        if not names:
            raise PmvitError(
                f"expected a model with blocks before its queries come in; all {model.config.num_hidden_layers} of "
                f"this {type(model).__name__} are its decoder (config.num_blocks): there is nothing to compress"
            )
        return names

    def num_suffix(self, model: Host) -> int:
        return num_suffix(model)

    def has_class_token(self, model: Host) -> bool:
        return self.tower(model).has_class_token

    def tokens_read(self, model: Host) -> int | None:
        return self.tower(model).num_prefix if type(model).__name__ in READ_PREFIX else None

    def runs(self, model: Host) -> list[list[str]]:
        names = self.block_names(model)
        return [[name] for name in names] if reads_between(model) else [names]

    def mlp_parts(self, block: nn.Module) -> tuple[str, str] | None:
        children = dict(block.named_children())
        return next(((norm, "mlp") for norm in MLP_NORMS if norm in children and "mlp" in children), None)

    def prepare(self, model: Host) -> list[HostChange]:
        embeddings = self.tower(model).embeddings
        if not hasattr(embeddings, "random_masking"):
            return []
        change = HostChange(embeddings, "random_masking", embeddings.random_masking)
        embeddings.random_masking = without_masking  # MAE shuffles what it does not hide
        return [change]

    def settle(self, model: Host) -> None:
        settle_masks(model)

    def stand_in(self, module: nn.Module, block: nn.Module) -> None:
        suffix = num_suffix(block)
        if suffix:
            module.register_forward_pre_hook(partial(before_block, suffix))
        module.register_forward_hook(partial(after_block, suffix))

    def narrow(self, wrapper: PruneMerge) -> list[HostChange]:
        changes = []
        for module in wrapper.block.modules():
            full: Host = getattr(module, "relative_position_bias", None)
            if isinstance(full, nn.Module):
                changes.append(HostChange(module, "relative_position_bias", full))
                module.relative_position_bias = NarrowBias(full, wrapper)
        return changes

    def narrow_arguments(self, wrapper: PruneMerge, arguments: dict[str, Any]) -> dict[str, Any]:
        narrowed = dict(arguments)
        if narrowed.get("position_embeddings") is not None:  # rotary: cosine and sine of each patch
            rotary = narrowed["position_embeddings"]
            narrowed["position_embeddings"] = tuple(select_tokens(part, wrapper.patch_centres, -2) for part in rotary)
        for name in ("attention_mask", "relative_position_bias"):
            if (bias := narrowed.get(name)) is not None:
                is_row = bias.dim() == 2  # of padding, as flash attention has it
                narrowed[name] = (
                    select_tokens(bias, wrapper.centres, 1) if is_row else narrow_bias(bias, wrapper.centres)
                )
        if wrapper.log_sizes is not None:
            known = ("attention_mask", "relative_position_bias")
            name = next((name for name in known if name in wrapper.argument_names), "position_bias")
            check_takes_bias(wrapper.block, name)
            narrowed[name] = add_log_sizes(narrowed.get(name), wrapper.log_sizes)
        return narrowed

    @contextmanager
    def for_scoring(self, model: Host) -> Iterator[None]:
        blocks = [model.get_submodule(name) for name in self.block_names(model)]
        with reordered([block for block in blocks if not isinstance(block, PruneMerge)]), in_sdpa(model):
            yield
