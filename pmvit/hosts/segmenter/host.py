"""Segmenter: its encoder is compressed, its decoder reads every token."""

from typing import Any

from torch import nn

from pmvit.errors import PmvitError
from pmvit.files import check_fields
from pmvit.hosts.host import AnyModule, Outputs, Reading, register
from pmvit.hosts.segmenter.model import Segmenter
from pmvit.hosts.timm.encoder import OnTimmViT
from pmvit.hosts.timm.vit import TimmViT

ARGUMENTS = ("encoder", "classes", "decoder", "norm_eps")


@register
class SegmenterHost(OnTimmViT):
    """The blocks stand in `model.encoder.blocks`; beyond that an encoder is one of timm's vision transformers."""

    key = "segmenter"
    family = "Segmenter (linear or mask-transformer decoder on a timm VisionTransformer)"
    path = "encoder"

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        return isinstance(model, Segmenter)

    def outputs(self) -> Outputs:
        return Outputs(pixel_classes=int(self.model.classes))

    def reading(self) -> Reading:
        names = self.block_names()
        return Reading([names], None, (0, 1, -2, -1) if len(names) > 4 else ())

    def describe(self, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
        own = (*ARGUMENTS, "image_size")  # are read off the model
        others = {name: value for name, value in (arguments or {}).items() if name not in own}
        described = self.encoder.describe(others)
        described["arguments"] = {
            "encoder": described["arguments"],
            "classes": self.model.classes,
            "decoder": self.model.decoder_kind,
            "norm_eps": self.model.norm_eps,
        }
        return described

    @classmethod
    def build(cls, description: dict[str, Any]) -> nn.Module:
        check_fields(description, ("architecture", "arguments", "data"), "the description of the model")
        arguments = check_fields(description["arguments"], ARGUMENTS, "the description of the Segmenter")
        encoder: AnyModule = TimmViT.build({**description, "arguments": arguments["encoder"]})
        try:
            return Segmenter(encoder, arguments["classes"], arguments["decoder"], arguments["norm_eps"])
        except TypeError as error:
            raise PmvitError(f"expected arguments that describe a Segmenter, got {arguments!r} ({error})") from None
