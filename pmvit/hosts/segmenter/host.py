"""Adapter for Segmenter: its encoder is compressed, its decoder reads every token."""

from typing import Any

from pmvit.errors import PmvitError
from pmvit.files import check_fields
from pmvit.hosts.host import register
from pmvit.hosts.segmenter.model import Host, Segmenter
from pmvit.hosts.timm.encoder import ENCODERS, OnTimmViT

ARGUMENTS = ("encoder", "classes", "decoder", "norm_eps")


@register
class SegmenterAdapter(OnTimmViT):
    """The blocks stand in `model.encoder.blocks`; beyond that an encoder is one of timm's vision transformers."""

    family = "Segmenter (linear or mask-transformer decoder on a timm VisionTransformer)"
    path = "encoder"

    def matches(self, model: Host) -> bool:
        return isinstance(model, Segmenter)

    def default_skip(self, model: Host) -> tuple[int, ...]:
        depth = len(model.encoder.blocks)
        return (0, 1, -2, -1) if depth > 4 else ()

    def pixel_classes(self, model: Host) -> int | None:
        return int(model.classes)

    def gives_logits(self, model: Host) -> bool:
        return True

    def describe(self, model: Host, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
        own = (*ARGUMENTS, "image_size")  # are read off the model
        others = {name: value for name, value in (arguments or {}).items() if name not in own}
        described = ENCODERS.describe(model.encoder, others)
        described["arguments"] = {
            "encoder": described["arguments"],
            "classes": model.classes,
            "decoder": model.decoder_kind,
            "norm_eps": model.norm_eps,
        }
        return described

    def build(self, description: dict[str, Any]) -> Host:
        check_fields(description, ("architecture", "arguments", "data"), "the description of the model")
        arguments = check_fields(description["arguments"], ARGUMENTS, "the description of the Segmenter")
        encoder = ENCODERS.build({**description, "arguments": arguments["encoder"]})
        try:
            return Segmenter(encoder, arguments["classes"], arguments["decoder"], arguments["norm_eps"])
        except TypeError as error:
            raise PmvitError(f"expected arguments that describe a Segmenter, got {arguments!r} ({error})") from None
