"""The plain vision transformers of Hugging Face transformers, and for every model that is built on one.

transformers is imported by nobody here: whoever has one of its models has imported it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from pmvit.errors import PmvitError
from pmvit.hosts.hf.hooks import (
    BiasAtCentres,
    after_block,
    before_block,
    check_takes_bias,
    freeze_masks,
    in_order,
    in_sdpa,
    num_suffix,
    outside_inference_mode,
    reordered,
    without_masking,
)
from pmvit.hosts.hf.model import HuggingFaceModel
from pmvit.hosts.hf.parts import parts_of
from pmvit.hosts.hf.tower import READ_PREFIX, Tower, find_tower, reads_between
from pmvit.hosts.host import (
    AnyModule,
    HostChange,
    PartNames,
    Reading,
    TokenLayout,
    add_log_sizes,
    bias_at_centres,
    register,
    select_tokens,
)
from pmvit.hosts.parts import PlainParts
from pmvit.prune_merge import PruneMerge

MLP_NORMS = ("layernorm_after", "norm2", "layer_norm2")  # what normalises tokens before the MLP


@register
class HuggingFaceViT(HuggingFaceModel):
    """The blocks stand below the model that holds the patch embedding; see `tower` for where that is."""

    key = "hf-vit"
    family = "Hugging Face ViT (ViT, DeiT, BEiT, DINOv2, DINOv3, CLIP, SigLIP, MAE, YOLOS and what is built on them)"
    takes_attention_bias = True

    @classmethod
    def find_tower(cls, model: AnyModule) -> Tower | None:
        return find_tower(model)

    def call(self, images: Tensor) -> Any:
        with outside_inference_mode():
            if hasattr(self.model, "get_image_features"):
                return self.model.get_image_features(pixel_values=images)
            return self.model(images, **in_order(self.tower, images))

    def block_names(self) -> list[str]:
        names = self.tower.blocks
        if not names:
            raise PmvitError(
                f"expected a model with blocks before its queries come in; all {self.model.config.num_hidden_layers} "
                f"of this {type(self.model).__name__} are its decoder (config.num_blocks): there is nothing to compress"
            )
        return names

    def layouts(self) -> list[TokenLayout]:
        tower = self.tower
        if getattr(tower.config, "mask_ratio", 0):
            raise PmvitError(
                f"expected a model that sees all patches, got a {type(self.model).__name__} that hides "
                f"{tower.config.mask_ratio:.0%} of them: set config.mask_ratio = 0, or load its weights as a ViTModel"
            )
        sides = zip(self.input_size()[1:], tower.patch_size, strict=True)
        height, width = (side // patch for side, patch in sides)
        layout = TokenLayout(
            (height, width),
            tower.num_prefix,
            has_class_token=tower.has_class_token,
            num_suffix=num_suffix(self.model),
        )
        return [layout] * len(self.block_names())

    def reading(self) -> Reading:
        names = self.block_names()
        num_read = self.tower.num_prefix if type(self.model).__name__ in READ_PREFIX else None
        return Reading([[name] for name in names] if reads_between(self.model) else [names], num_read)

    def plain_parts(self, block: nn.Module, arguments: dict[str, Any]) -> PlainParts | None:
        # What reads tokens between the blocks finds them where transformers' own blocks record them.
        return None if reads_between(self.model) else parts_of(block, arguments, self.tower.num_prefix)

    def part_names(self, block: nn.Module) -> PartNames:
        children = dict(block.named_children())
        return PartNames(next(((norm, "mlp") for norm in MLP_NORMS if norm in children and "mlp" in children), None))

    def prepare(self) -> list[HostChange]:
        embeddings = self.tower.embeddings
        if not hasattr(embeddings, "random_masking"):
            return []
        change = HostChange(embeddings, "random_masking", embeddings.random_masking)
        embeddings.random_masking = without_masking  # MAE shuffles what it does not hide
        return [change]

    def freeze_control_flow(self) -> None:
        freeze_masks(self.model)

    def answer_like(self, module: nn.Module, block: nn.Module) -> None:
        suffix = num_suffix(block)
        if suffix:
            module.register_forward_pre_hook(partial(before_block, suffix))
        module.register_forward_hook(partial(after_block, suffix))

    def fit(self, wrapper: PruneMerge, layout: TokenLayout) -> list[HostChange]:
        changes = []
        for module in wrapper.block.modules():
            full: AnyModule = getattr(module, "relative_position_bias", None)
            if isinstance(full, nn.Module):
                changes.append(HostChange(module, "relative_position_bias", full))
                module.relative_position_bias = BiasAtCentres(full, wrapper)
        return changes

    @classmethod
    def arguments_at_centres(cls, wrapper: PruneMerge, arguments: dict[str, Any]) -> dict[str, Any]:
        reduced = dict(arguments)
        if reduced.get("position_embeddings") is not None:  # rotary: cosine and sine of each patch
            rotary = reduced["position_embeddings"]
            reduced["position_embeddings"] = tuple(select_tokens(part, wrapper.patch_centres, -2) for part in rotary)
        for name in ("attention_mask", "relative_position_bias"):
            if (bias := reduced.get(name)) is not None:
                is_row = bias.dim() == 2  # of padding, as flash attention has it
                reduced[name] = (
                    select_tokens(bias, wrapper.centres, 1) if is_row else bias_at_centres(bias, wrapper.centres)
                )
        if wrapper.log_sizes is not None:
            known = ("attention_mask", "relative_position_bias")
            name = next((name for name in known if name in wrapper.argument_names), "position_bias")
            check_takes_bias(wrapper.block, name)
            reduced[name] = add_log_sizes(reduced.get(name), wrapper.log_sizes)
        return reduced

    @contextmanager
    def observed(self, counting: bool = False) -> Iterator[None]:
        blocks = [self.model.get_submodule(name) for name in self.block_names()]
        with reordered([block for block in blocks if not isinstance(block, PruneMerge)]), in_sdpa(self.model):
            yield
