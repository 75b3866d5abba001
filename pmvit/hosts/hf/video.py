"""The video transformers of Hugging Face transformers whose blocks are plain: VideoMAE and V-JEPA 2.

Their patches are tubes of a few frames, in a grid of time, rows and columns, and there are no other tokens. Blocks take
no attention bias, so that their attention is written out where it has to count the members of groups.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pmvit.adaptive import AdaptiveBlock
from pmvit.errors import PmvitError
from pmvit.flow import Groups
from pmvit.hosts.groups import OfGroups
from pmvit.hosts.hf.hooks import outside_inference_mode
from pmvit.hosts.hf.tower import VIDEOS
from pmvit.hosts.hf.vit import HuggingFaceViT
from pmvit.hosts.host import HostChange, PartNames, TokenLayout, register
from pmvit.hosts.parts import AnyModule, PlainMlp, PlainParts, Rotary, plain_parts
from pmvit.merged_mlp import unwrapped
from pmvit.prune_merge import PruneMerge

MOST_POSITIONS = 2**25  # numbers; 64 frames of 224 x 224 pixels in the largest VideoMAE have some 8 million


@register
class HuggingFaceVideo(HuggingFaceViT):
    """VideoMAE adds positions to the patches; V-JEPA 2 turns queries and keys by time, row and column.

    V-JEPA 2's predictor reads all tokens of the encoder, as its pooler does. It runs where the model is called, and not
    where pmvit calls it: what is measured, counted and exported of a model without a head is the encoder's output.
    """

    key = "hf-video"
    family = "Hugging Face video transformers (VideoMAE, V-JEPA 2)"
    rotary_argument = ""
    bias_arguments = ()
    families = VIDEOS

    def input_size(self) -> tuple[int, ...]:
        """Frames, channels, height and width."""
        config, projection = self.tower.host.config, self.tower.projection
        frames = config.frames_per_clip if hasattr(config, "frames_per_clip") else config.num_frames
        size = config.crop_size if hasattr(config, "crop_size") else config.image_size
        height, width = _pair(size)
        return int(frames), projection.in_channels, int(height), int(width)

    @classmethod
    def make(cls, description: dict[str, Any]) -> AnyModule:
        config = description["config"]
        if isinstance(config, dict) and config.get("model_type") == "videomae":
            check_positions(config)
        return super().make(description)

    def grid(self) -> tuple[int, ...]:
        if type(self.model).__name__ == "VideoMAEForPreTraining":
            raise PmvitError(
                "expected a model that sees all patches, got a VideoMAEForPreTraining that hides most of them: load "
                "its weights as a VideoMAEModel"
            )
        frames, _, *sides = self.input_size()
        time, *patch = self.tower.projection.stride
        tubes = frames // time if frames >= time else frames  # V-JEPA 2 repeats the frames of a clip that is too short
        return tubes, *(side // length for side, length in zip(sides, patch, strict=True))

    def call(self, images: Tensor) -> Any:
        if not hasattr(self.model, "predictor"):
            return super().call(images)
        with outside_inference_mode():
            return self.model(images, skip_predictor=True)

    def fit(self, wrapper: PruneMerge | AdaptiveBlock, layout: TokenLayout) -> list[HostChange]:
        if isinstance(wrapper, PruneMerge) and wrapper.log_sizes is None:
            return []
        block: AnyModule = wrapper.block
        holder = block if hasattr(block, "mlp") else block.attention  # VideoMAE has its projection beside it
        return [HostChange.make(holder, "attention", CountingAttention(holder.attention, wrapper))]

    @classmethod
    def arguments_at_centres(cls, wrapper: PruneMerge | Groups, arguments: dict[str, Any]) -> dict[str, Any]:
        if "position_mask" not in wrapper.argument_names:
            return arguments
        centres, places = wrapper.patch_centres, arguments.get("position_mask")
        centres = centres if centres.dim() == 2 else centres[None]
        if places is not None:
            centres = places.gather(1, centres.expand(len(places), -1))
        return {**arguments, "position_mask": centres}

    def part_names(self, block: nn.Module) -> PartNames:
        if hasattr(block, "mlp"):
            return super().part_names(block)
        return PartNames(("layernorm_after", "intermediate", "output.dense"))

    def plain_parts(self, block: AnyModule, arguments: dict[str, Any]) -> PlainParts | None:
        attention = block.attention if hasattr(block, "mlp") else block.attention.attention
        counting = attention if isinstance(attention, CountingAttention) else None
        attention = attention if counting is None else counting.attention
        layers = (attention.query, attention.key, attention.value)
        if not all(type(layer) is nn.Linear for layer in layers):
            return None  # somebody else wrapped them
        bias = None if counting is None else counting.bias_of_sizes(attention.query.weight)
        if type(block).__name__ == "VJEPA2Layer":
            rotary = rotary_of(attention, self.layout.num_tokens, arguments.get("position_mask"))
            mlp_layers = ("fc1", "activation", "fc2")
            return plain_parts(block, attention, layers, ("norm1", "norm2"), mlp_layers, rotary, bias)
        if type(block).__name__ != "VideoMAELayer":
            return None
        inside = block.intermediate
        return PlainParts(
            norm1=block.layernorm_before,
            qkv=layers,
            heads=(attention.num_attention_heads, attention.attention_head_size),
            scale=float(attention.scaling),
            projection=block.attention.output.dense,
            norm2=unwrapped(block.layernorm_after),
            mlp=PlainMlp(inside.dense, inside.intermediate_act_fn, unwrapped(block.output.dense)),
            bias=bias,
        )


def check_positions(config: dict[str, Any]) -> None:
    """Raise `PmvitError` if VideoMAE would compute too large a table of positions, of which nothing is in a file."""
    video = (config.get("num_frames"), *_pair(config.get("image_size")))
    tube = (config.get("tubelet_size"), *_pair(config.get("patch_size")))
    sides = (*video, *tube, config.get("hidden_size"))
    if not all(isinstance(side, int) and side > 0 for side in sides):
        raise PmvitError(f"expected a VideoMAE with whole numbers of frames, pixels and patches; got {sides}")
    count = math.prod(side // part for side, part in zip(video, tube, strict=True)) * config["hidden_size"]
    if count > MOST_POSITIONS:
        raise PmvitError(f"expected a VideoMAE with up to {MOST_POSITIONS:,} numbers for positions; got {count:,}")


def _pair(size: Any) -> tuple[Any, Any]:
    """Height and width, where one number may stand for both."""
    return (size[0], size[1]) if isinstance(size, (tuple, list)) and len(size) == 2 else (size, size)


class CountingAttention(OfGroups):
    """Attention between groups, which counts their members: the host's, with a bias on its scores."""

    def __init__(self, attention: AnyModule, wrapper: PruneMerge | AdaptiveBlock) -> None:
        super().__init__(wrapper)
        self.attention = attention

    def forward(self, hidden_states: Tensor, position_mask: Tensor | None = None) -> tuple[Tensor, None]:
        attention = self.attention
        query, key, value = (
            layer(hidden_states).unflatten(-1, (attention.num_attention_heads, -1)).transpose(1, 2)
            for layer in (attention.query, attention.key, attention.value)
        )
        if hasattr(attention, "apply_rotary_embeddings"):
            places = attention.get_position_ids(hidden_states, masks=position_mask)
            query, key = (attention.apply_rotary_embeddings(each, places) for each in (query, key))
        attended = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=self.bias_of_sizes(hidden_states),
            dropout_p=attention.dropout_prob if self.training else 0.0,
            scale=attention.scaling,
        )
        joined = attended.transpose(1, 2).flatten(2)
        return (attention.proj(joined) if hasattr(attention, "proj") else joined), None


def rotary_of(attention: AnyModule, num_tokens: int, position_mask: Tensor | None) -> Rotary:
    """How V-JEPA 2 turns the queries and keys of its tokens: a third of each head by every axis, what is left by none.

    Angles repeat after half of a third, although numbers turn in pairs: so its weights were trained.
    """
    weight, angles = attention.query.weight, []
    tokens = torch.arange(num_tokens, device=weight.device)[None] if position_mask is None else position_mask
    sizes = (attention.d_dim, attention.h_dim, attention.w_dim)
    for places, size in zip(attention.get_position_ids(tokens, masks=tokens), sizes, strict=True):
        frequencies = 1.0 / 10000 ** (torch.arange(size // 2, dtype=weight.dtype, device=weight.device) / (size / 2.0))
        angles.append((places[0, 0, :, None] * frequencies).repeat(1, 2))
    turned = F.pad(torch.cat(angles, dim=-1), (0, attention.attention_head_size - sum(sizes)))
    return Rotary(turned.cos(), turned.sin(), interleaved=True)
