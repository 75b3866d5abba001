"""Segmenter: a vision transformer of timm that labels every pixel, by a linear or a mask-transformer decoder.

Modules and parameters are named as in the published checkpoints.
"""

from collections import OrderedDict
from contextlib import nullcontext
from typing import Any, Literal, get_args

import timm
import torch
import torch.nn.functional as F
from timm.layers import trunc_normal_
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from pmvit.errors import PmvitError
from pmvit.files import check_fields
from pmvit.hosts.host import AnyModule, Outputs, Reading, register
from pmvit.hosts.making import fetching, one_line
from pmvit.hosts.timm.vit import TimmViT

DecoderKind = Literal["mask", "linear"]
MASK_LAYERS = 2
ARGUMENTS = ("encoder", "classes", "decoder", "norm_eps")  # of `Segmenter`, in descriptions


class MaskTransformer(nn.Module):
    """Patch tokens and one embedding a class attend to each other; their cosines are the masks of the classes."""

    def __init__(self, width: int, classes: int, heads: int, layers: int = MASK_LAYERS) -> None:
        super().__init__()
        self.proj_dec = nn.Linear(width, width)
        self.cls_emb = nn.Parameter(torch.zeros(1, classes, width))
        self.blocks = nn.ModuleList(Block(width, heads, qkv_bias=True, norm_layer=nn.LayerNorm) for _ in range(layers))
        self.decoder_norm = nn.LayerNorm(width)
        self.proj_patch = nn.Parameter(torch.randn(width, width) * width**-0.5)
        self.proj_classes = nn.Parameter(torch.randn(width, width) * width**-0.5)
        self.mask_norm = nn.LayerNorm(classes)
        _initialise(self)
        trunc_normal_(self.cls_emb, std=0.02)

    def forward(self, patches: Tensor) -> Tensor:
        """Scores of shape (batch, patches, classes) from tokens of shape (batch, patches, width)."""
        count = patches.shape[1]
        classes = self.cls_emb.expand(patches.shape[0], -1, -1)  # len() would fix the batch of an export
        tokens = torch.cat([self.proj_dec(patches), classes], dim=1)
        for block in self.blocks:
            tokens = block(tokens)
        tokens = self.decoder_norm(tokens)
        patches = F.normalize(tokens[:, :count] @ self.proj_patch, dim=-1)
        classes = F.normalize(tokens[:, count:] @ self.proj_classes, dim=-1)
        scores: Tensor = self.mask_norm(patches @ classes.transpose(1, 2))
        return scores


def _initialise(decoder: nn.Module) -> None:
    for module in decoder.modules():
        if isinstance(module, nn.Linear):
            trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)


class Segmenter(nn.Module):
    """Images of shape (batch, channels, height, width) to scores of shape (batch, classes, height, width).

    Any height and width will do unless a fixed plan compressed the encoder: its position embedding is resized, and an
    image that does not divide into patches is padded. `pmvit.evaluation.sliding` runs it on windows of its own size.
    """

    def __init__(
        self, encoder: VisionTransformer, classes: int, decoder: DecoderKind = "mask", norm_eps: float | None = None
    ) -> None:
        """Put a decoder on an encoder.

        Args:
            encoder: Made with `dynamic_img_size=True`, without a head.
            classes: Of a pixel.
            decoder: `mask` for the mask transformer, `linear` for a linear layer.
            norm_eps: Of the layer norms in the encoder, if other than timm's; the published models have 1e-5.
        """
        super().__init__()
        if not isinstance(encoder, VisionTransformer):
            raise PmvitError(
                f"expected one of timm's plain vision transformers (VisionTransformer) as encoder; got a "
                f"{type(encoder).__name__}"
            )
        if decoder not in get_args(DecoderKind):
            raise PmvitError(f"decoder: expected {' or '.join(get_args(DecoderKind))}, got {decoder!r}")
        if classes < 2:
            raise PmvitError(f"classes: expected 2 or more, got {classes}")
        host: AnyModule = encoder
        if norm_eps is not None:
            for module in host.modules():
                if isinstance(module, nn.LayerNorm):
                    module.eps = norm_eps
        self.encoder = host
        self.classes = classes
        self.decoder_kind = decoder
        self.norm_eps = norm_eps
        self.decoder: nn.Module
        if decoder == "mask":
            self.decoder = MaskTransformer(host.embed_dim, classes, host.blocks[0].attn.num_heads)
        else:  # each patch token becomes the scores of its classes by itself
            self.decoder = nn.Sequential(OrderedDict(head=nn.Linear(host.embed_dim, classes)))
            _initialise(self.decoder)

    @property
    def pretrained_cfg(self) -> dict[str, Any]:
        """timm's configuration of the encoder: how images are prepared."""
        config: dict[str, Any] = self.encoder.pretrained_cfg
        return config

    @property
    def patch_size(self) -> tuple[int, int]:
        """Height and width of a patch, in pixels."""
        height, width = self.encoder.patch_embed.feat_ratio(as_scalar=False)
        return int(height), int(width)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Have the encoder's activations computed again in the backward pass instead of kept."""
        self.encoder.set_grad_checkpointing(enable)

    def no_weight_decay(self) -> set[str]:
        """Parameters that are embeddings."""
        return {f"encoder.{name}" for name in self.encoder.no_weight_decay()} | {"decoder.cls_emb"}

    def forward(self, images: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        patch_height, patch_width = self.patch_size
        below, beside = -height % patch_height, -width % patch_width
        if below or beside:
            images = F.pad(images, (0, beside, 0, below))
        grid = (height + below) // patch_height, (width + beside) // patch_width
        tokens = self.encoder.forward_features(images)[:, self.encoder.num_prefix_tokens :]
        scores = self.decoder(tokens).transpose(1, 2).unflatten(2, grid)
        scores = F.interpolate(scores, size=(height + below, width + beside), mode="bilinear")
        return scores[..., :height, :width] if below or beside else scores


def create_segmenter(
    encoder: str = "vit_tiny_patch16_224",
    *,
    classes: int = 150,
    image_size: int | tuple[int, int] | None = None,
    decoder: DecoderKind = "mask",
    pretrained: bool = False,
    norm_eps: float | None = None,
    **arguments: Any,
) -> Segmenter:
    """Make a Segmenter in evaluation mode.

    Args:
        encoder: The name of one of timm's plain vision transformers.
        classes: Of a pixel.
        image_size: Side of the square images it is made for, or their height and width: those of its windows.
            If not given, that of the images the encoder was made for.
        decoder: `mask` or `linear`.
        pretrained: Let timm fetch weights for the encoder; the decoder has random ones in any case.
        norm_eps: Of the layer norms in the encoder, if other than timm's.
        arguments: More for `timm.create_model`.
    """
    if image_size is not None:
        sides = [image_size, image_size] if isinstance(image_size, int) else [int(side) for side in image_size]
        arguments = {"img_size": sides, **arguments}
    arguments = {
        "num_classes": 0,
        "global_pool": "token" if "distilled" in encoder else "",  # what those with two heads insist on
        "dynamic_img_size": True,
        **arguments,
    }
    with (
        one_line(
            f"timm could not make the encoder {encoder!r} with {arguments}",
            ": is it a plain vision transformer? If the download failed, pass the weights as a file (--weights)",
        ),
        fetching(encoder) if pretrained else nullcontext(),
    ):
        made: AnyModule = timm.create_model(encoder, pretrained=pretrained, **arguments)
    made.built_with = arguments
    model = Segmenter(made, classes, decoder, norm_eps).eval()
    size, patch = made.patch_embed.img_size, model.patch_size
    if any(side % part for side, part in zip(size, patch, strict=True)):
        raise PmvitError(
            f"image_size: expected multiples of the patches of {encoder}, {patch[0]} x {patch[1]}; got "
            f"{size[0]} x {size[1]}"
        )
    return model


@register
class SegmenterHost(TimmViT):
    """The blocks stand in `model.encoder.blocks`; beyond that an encoder is one of timm's vision transformers."""

    key = "segmenter"
    family = "Segmenter (linear or mask-transformer decoder on a timm VisionTransformer)"
    accepted = frozenset(ARGUMENTS)
    path = "encoder"

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        return isinstance(model, Segmenter)

    def outputs(self) -> Outputs:
        return Outputs(pixel_classes=int(self.model.classes))

    def reading(self) -> Reading:
        names = self.block_names()
        return Reading([names], None, scored_skip=(0, 1, -2, -1) if len(names) > 4 else ())

    def describe(self, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
        own = (*ARGUMENTS, "image_size")  # are read off the model
        others = {name: value for name, value in (arguments or {}).items() if name not in own}
        described = TimmViT(self.encoder).describe(others)
        values = (described["arguments"], self.model.classes, self.model.decoder_kind, self.model.norm_eps)
        return {**described, "arguments": dict(zip(ARGUMENTS, values, strict=True))}

    @classmethod
    def make(cls, description: dict[str, Any]) -> AnyModule:
        arguments = check_fields(description["arguments"], ARGUMENTS, "the description of the Segmenter")
        encoder: AnyModule = TimmViT.build({**description, "arguments": arguments["encoder"]})
        return Segmenter(encoder, arguments["classes"], arguments["decoder"], arguments["norm_eps"])
