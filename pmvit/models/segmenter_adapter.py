"""Adapter for Segmenter: its encoder is compressed, its decoder reads every token."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pmvit.errors import PmvitError
from pmvit.files import check_fields
from pmvit.models.adapter import TokenLayout, register
from pmvit.models.segmenter import Host, Segmenter
from pmvit.models.timm_vit import TimmViT

ARGUMENTS = ("encoder", "classes", "decoder", "norm_eps")
_ENCODERS = TimmViT()


@register
class SegmenterAdapter(TimmViT):
    """The blocks stand in `model.encoder.blocks`; beyond that an encoder is one of timm's vision transformers."""

    family = "Segmenter (linear or mask-transformer decoder on a timm VisionTransformer)"

    def matches(self, model: Host) -> bool:
        return isinstance(model, Segmenter)

    def layout(self, model: Host) -> TokenLayout:
        return _ENCODERS.layout(model.encoder)

    def block_names(self, model: Host) -> list[str]:
        return [f"encoder.{name}" for name in _ENCODERS.block_names(model.encoder)]

    def input_size(self, model: Host) -> tuple[int, int, int]:
        return _ENCODERS.input_size(model.encoder)

    def default_skip(self, model: Host) -> tuple[int, ...]:
        depth = len(model.encoder.blocks)
        return (0, 1, -2, -1) if depth > 4 else ()

    def num_classes(self, model: Host) -> int | None:
        return None

    def pixel_classes(self, model: Host) -> int | None:
        return int(model.classes)

    def gives_logits(self, model: Host) -> bool:
        return True

    def has_class_token(self, model: Host) -> bool:
        return _ENCODERS.has_class_token(model.encoder)

    def tokens_read(self, model: Host) -> int | None:
        return None

    @contextmanager
    def for_scoring(self, model: Host) -> Iterator[None]:
        with _ENCODERS.for_scoring(model.encoder):
            yield

    def describe(self, model: Host, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
        own = (*ARGUMENTS, "image_size")  # are read off the model
        others = {name: value for name, value in (arguments or {}).items() if name not in own}
        described = _ENCODERS.describe(model.encoder, others)
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
        encoder = _ENCODERS.build({**description, "arguments": arguments["encoder"]})
        try:
            return Segmenter(encoder, arguments["classes"], arguments["decoder"], arguments["norm_eps"])
        except TypeError as error:
            raise PmvitError(f"expected arguments that describe a Segmenter, got {arguments!r} ({error})") from None

    def data_config(self, model: Host) -> dict[str, Any]:
        return _ENCODERS.data_config(model.encoder)
