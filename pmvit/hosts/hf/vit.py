"""The plain vision transformers of Hugging Face transformers, and every model that is built on one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from pmvit.adaptive import AdaptiveBlock
from pmvit.errors import PmvitError
from pmvit.flow import Groups
from pmvit.hosts.hf.hooks import (
    BiasAtCentres,
    BiasedAttention,
    answer_like_host,
    check_takes_bias,
    in_sdpa,
    num_suffix,
    reordered,
    takes_tokens_alone,
    without_masking,
)
from pmvit.hosts.hf.model import HuggingFaceModel
from pmvit.hosts.hf.tower import READ_PREFIX, VITS, num_read, reads_between
from pmvit.hosts.host import HostChange, PartNames, Reading, TokenLayout, register
from pmvit.hosts.parts import AnyModule, PlainParts, joined_bias, plain_parts, rotary_of_patches
from pmvit.merged_mlp import unwrapped
from pmvit.prune_merge import PruneMerge
from pmvit.wrapping import WrappedBlock

# What a block calls its attention, what normalises before that, and what normalises before the MLP.
NAMES = (
    ("attention", "layernorm_before", "layernorm_after"),
    ("attention", "norm1", "norm2"),
    ("self_attn", "layer_norm1", "layer_norm2"),
)
# Blocks that normalise, attend, add; normalise, MLP, add.
PLAIN = {
    *("ViTLayer", "ViTMSNLayer", "ViTMAELayer", "IJepaLayer", "DeiTLayer", "BeitLayer", "PixioLayer"),
    *("Dinov2Layer", "Dinov2WithRegistersLayer", "DINOv3ViTLayer", "EomtLayer", "EomtDinov3Layer"),
    *("CLIPEncoderLayer", "MetaClip2EncoderLayer", "SiglipEncoderLayer", "ASTLayer"),
}
MLPS = (("fc1", "activation_fn", "fc2"), ("up_proj", "act_fn", "down_proj"))


@register
class HuggingFaceViT(HuggingFaceModel):
    """The blocks stand below the model that holds the patch embedding; see `tower` for where that is."""

    key = "hf-vit"
    family = "Hugging Face ViT (ViT, DeiT, BEiT, DINOv2, DINOv3, CLIP, SigLIP, MAE, YOLOS and what is built on them)"
    takes_attention_bias = True
    rotary_argument = "position_embeddings"
    bias_arguments: tuple[str, ...] = ("attention_mask", "relative_position_bias", "position_bias")
    families = VITS

    def block_names(self) -> list[str]:
        names = self.tower.blocks[: num_read(self.model, self.tower)]
        if not names:
            raise PmvitError(
                f"expected a model with blocks before its queries come in; all {self.model.config.num_hidden_layers} "
                f"of this {type(self.model).__name__} are its decoder (config.num_blocks): there is nothing to compress"
            )
        return names

    def layouts(self) -> list[TokenLayout]:
        tower = self.tower
        if hidden := getattr(tower.host.config, "mask_ratio", 0):
            raise PmvitError(
                f"expected a model that sees all patches, got a {type(self.model).__name__} that hides {hidden:.0%} of "
                "them: set config.mask_ratio = 0, or load its weights as a ViTModel"
            )
        layout = TokenLayout(self.grid(), tower.num_prefix, None, tower.has_class_token, num_suffix(self.model))
        return [layout] * len(self.block_names())

    def grid(self) -> tuple[int, ...]:
        """How many patches there are along each axis."""
        sides = zip(self.input_size()[1:], self.tower.projection.stride, strict=True)
        return tuple(side // patch for side, patch in sides)

    def reading(self) -> Reading:
        names = self.block_names()
        count = self.tower.num_prefix if type(self.model).__name__ in READ_PREFIX else None
        return Reading([[name] for name in names] if reads_between(self.model) else [names], count)

    def plain_parts(self, block: nn.Module, arguments: dict[str, Any]) -> PlainParts | None:
        # What reads tokens between the blocks finds them where transformers' own blocks record them.
        return None if reads_between(self.model) else parts_of(block, arguments, self.tower.num_prefix)

    def part_names(self, block: nn.Module) -> PartNames:
        children = dict(block.named_children())
        norm = next((norm for _, _, norm in NAMES if norm in children), None)
        return PartNames(None if norm is None or "mlp" not in children else (norm, "mlp"))

    def prepare(self) -> list[HostChange]:
        embeddings = self.tower.embeddings
        if not hasattr(embeddings, "random_masking"):
            return []
        return [HostChange.make(embeddings, "random_masking", without_masking)]  # MAE shuffles what it does not hide

    def freeze_control_flow(self) -> None:
        probabilities = getattr(self.model, "attn_mask_probs", None)
        if isinstance(probabilities, Tensor):  # which blocks of EoMT mask attention
            del self.model.attn_mask_probs
            self.model.attn_mask_probs = probabilities.tolist()

    def answer_like(self, module: nn.Module, block: nn.Module) -> None:
        answer_like_host(module, num_suffix(block))

    def fit(self, wrapper: PruneMerge | AdaptiveBlock, layout: TokenLayout) -> list[HostChange]:
        changes = []
        if takes_tokens_alone(wrapper.block):
            attention: AnyModule = wrapper.block.attention
            biased = BiasedAttention(attention.forward, wrapper)
            changes.append(HostChange.make(attention, "forward", biased.forward))
        for module in wrapper.block.modules():
            full = getattr(module, "relative_position_bias", None)
            if isinstance(full, nn.Module):
                reduced = BiasAtCentres(full, wrapper)
                changes.append(HostChange.make(module, "relative_position_bias", reduced))
        return changes

    @classmethod
    def arguments_at_centres(cls, wrapper: PruneMerge | Groups, arguments: dict[str, Any]) -> dict[str, Any]:
        if wrapper.log_sizes is not None:
            check_takes_bias(wrapper.block, cls._bias_argument(wrapper))
            if takes_tokens_alone(wrapper.block):  # see `fit`
                return arguments
        mask = arguments.get("attention_mask")
        if mask is None or mask.dim() != 2:
            return super().arguments_at_centres(wrapper, arguments)
        others = {name: value for name, value in arguments.items() if name != "attention_mask"}
        of_padding = mask.gather(1, wrapper.centres.expand(len(mask), -1))  # a row, as flash attention has it
        return {**super().arguments_at_centres(wrapper, others), "attention_mask": of_padding}

    @contextmanager
    def observed(self, counting: bool = False) -> Iterator[None]:
        blocks = [self.model.get_submodule(name) for name in self.block_names()]
        with reordered([block for block in blocks if not isinstance(block, WrappedBlock)]), in_sdpa(self.model):
            yield


def parts_of(block: AnyModule, arguments: dict[str, Any], num_prefix: int) -> PlainParts | None:
    """What a block is made of that is called with these arguments; `None` if it is another kind of block."""
    names = next((names for names in NAMES if all(hasattr(block, name) for name in names)), None)
    is_own = type(block).__name__ in PLAIN and type(block).__module__.startswith("transformers.")
    if names is None or not is_own:
        return None
    attention, mlp = getattr(block, names[0]), unwrapped(block.mlp)
    output = "o_proj" if hasattr(attention, "o_proj") else "out_proj"
    layers: list[AnyModule] = [getattr(attention, name, None) for name in ("q_proj", "k_proj", "v_proj", output)]
    if not all(type(layer) is nn.Linear for layer in layers):
        return None  # another version of transformers, or layers that somebody else wrapped
    is_gated, rotary = hasattr(mlp, "gate_proj"), arguments.get("position_embeddings")
    return plain_parts(
        block,
        attention,
        tuple(layers[:3]),
        norms=names[1:],
        mlp_layers=next((names for names in MLPS if hasattr(mlp, names[0]) and not is_gated), None),
        rotary=None if rotary is None else rotary_of_patches(rotary[0], rotary[1], num_prefix, interleaved=False),
        bias=_bias(block, arguments),
    )


def _bias(block: AnyModule, arguments: dict[str, Any]) -> Tensor | None:
    own = None
    if getattr(block, "relative_position_bias", None) is not None:
        height, width = (side // block.patch_size for side in arguments["resolution"])
        interpolates = bool(arguments.get("interpolate_pos_encoding"))
        own = block.relative_position_bias((height, width), interpolates, dim_size=height * width + 1)
    return joined_bias(own, arguments.get("attention_mask"))
