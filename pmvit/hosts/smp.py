"""DPT of segmentation_models_pytorch on one of timm's plain vision transformers.

The package is imported only where a model has to be made: whoever has one of its models has imported it.
"""

import json
import sys
from pathlib import Path
from typing import Any

import timm
from torch import Tensor, nn

from pmvit.errors import PmvitError
from pmvit.hosts.host import AnyModule, Outputs, register
from pmvit.hosts.making import folder_config, import_library
from pmvit.hosts.timm.vit import TimmViT

PACKAGE = "segmentation_models_pytorch"
OWN_ARGUMENTS = (
    *("encoder_name", "encoder_depth", "encoder_weights", "encoder_output_indices"),
    *("decoder_readout", "decoder_intermediate_channels", "decoder_fusion_channels"),
    *("in_channels", "classes", "activation", "aux_params"),
)
WITH_LOGITS = (nn.Identity, nn.LogSoftmax)  # what may end a head whose numbers are to be logits


@register
class SmpDpt(TimmViT):
    """The blocks stand in `model.encoder.model.blocks`; the decoder reads tokens after some of them."""

    key = "smp-dpt"
    family = "segmentation_models_pytorch DPT (on a timm plain ViT)"
    library = PACKAGE
    accepted = TimmViT.accepted.union(OWN_ARGUMENTS)
    path = "encoder.model"

    @classmethod
    def matches(cls, model: AnyModule) -> bool:
        dpt = getattr(sys.modules.get(PACKAGE), "DPT", None)
        return dpt is not None and isinstance(model, dpt) and isinstance(model.encoder.model, cls.classes)

    def call(self, images: Tensor) -> Any:
        output = self.model(images)
        return output[0] if isinstance(output, tuple) else output  # an auxiliary classifier puts out a second one

    def blocks_read(self) -> list[int]:
        depth = len(self.encoder.blocks)
        return [int(index) % depth for index in self.model.encoder._output_indices]

    def outputs(self) -> Outputs:
        gives_logits = isinstance(self.model.segmentation_head.activation.activation, WITH_LOGITS)
        channels = int(self.model.segmentation_head.head[-1].out_channels)
        classes = max(channels, 2) if gives_logits else None  # one channel tells two classes apart
        return Outputs(gives_logits, pixel_classes=classes, returns_tensor=False)

    def set_size(self, height: int, width: int) -> None:
        super().set_size(height, width)
        self.model.config["img_size"] = [height, width]

    def describe(self, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
        config = {**self.model.config, **(arguments or {}), "encoder_weights": None}
        if not _is_known(config["encoder_name"]):  # it came from a hub: its architecture is one of timm's
            config["encoder_name"] = f"tu-{self.encoder.pretrained_cfg.get('architecture')}"
        described = json.loads(json.dumps(config))
        return self.checked({"architecture": "DPT", "arguments": described, "data": self.data_config()})

    @classmethod
    def make(cls, description: dict[str, Any]) -> AnyModule:
        if description["architecture"] != "DPT":
            raise PmvitError(f"expected a DPT of {PACKAGE}, got {description['architecture']}: it has no tokens")
        arguments = {**description["arguments"], "encoder_weights": None}
        smp = import_library(PACKAGE, "smp")
        if not _is_known(arguments.get("encoder_name")):
            raise PmvitError(
                f"expected tu- and one of timm's architectures as encoder, got {arguments.get('encoder_name')!r}: "
                "is timm too old for it?"
            )
        model: AnyModule = smp.DPT(**arguments)
        model.pretrained_cfg = model.encoder.model.pretrained_cfg  # how images are prepared, as timm's own models do
        return model


def _is_known(encoder_name: Any) -> bool:
    """Whether the name of an encoder is that of one of timm's architectures, for which no network is needed."""
    is_timm = isinstance(encoder_name, str) and encoder_name.startswith("tu-")
    return is_timm and bool(timm.is_model(encoder_name.removeprefix("tu-")))


def is_folder(path: Path) -> bool:
    """Whether a folder holds a model that `save_pretrained` of segmentation_models_pytorch wrote."""
    return "_model_class" in folder_config(path)


def from_folder(path: Path) -> AnyModule:
    """The model that `save_pretrained` wrote, without its weights; `PmvitError` if it is none that pmvit knows."""
    config = folder_config(path)
    arguments = {name: value for name, value in config.items() if not name.startswith("_")}
    return SmpDpt.checked_make({"architecture": config["_model_class"], "arguments": arguments}).eval()
