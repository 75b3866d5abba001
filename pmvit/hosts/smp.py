"""DPT of segmentation_models_pytorch on one of timm's plain vision transformers.

The package is imported only where a model has to be made: whoever has one of its models has imported it.
"""

import json
import sys
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from pmvit.errors import PmvitError
from pmvit.files import check_fields
from pmvit.hosts.host import DATA_KEYS, AnyModule, Outputs, register
from pmvit.hosts.timm.encoder import OnTimmViT
from pmvit.hosts.timm.model import FORBIDDEN_ARGUMENTS, shapes_of

PACKAGE = "segmentation_models_pytorch"
WITH_LOGITS = (nn.Identity, nn.LogSoftmax)  # what may end a head whose numbers are to be logits


@register
class SmpDpt(OnTimmViT):
    """The blocks stand in `model.encoder.model.blocks`; the decoder reads tokens after some of them."""

    key = "smp-dpt"
    family = "segmentation_models_pytorch DPT (on a timm plain ViT)"
    path = "encoder.model"

    @classmethod
    def matches(cls, model: AnyModule) -> bool:
        dpt = getattr(sys.modules.get(PACKAGE), "DPT", None)
        return dpt is not None and isinstance(model, dpt) and isinstance(model.encoder.model, cls.classes)

    def call(self, images: Tensor) -> Any:
        output = self.model(images)
        return output[0] if isinstance(output, tuple) else output  # an auxiliary classifier puts out a second one

    def blocks_read(self) -> list[int]:
        depth = len(self.encoder.model.blocks)
        return [int(index) % depth for index in self.model.encoder._output_indices]

    def outputs(self) -> Outputs:
        gives_logits = isinstance(self.model.segmentation_head.activation.activation, WITH_LOGITS)
        channels = int(self.model.segmentation_head.head[-1].out_channels)
        classes = max(channels, 2) if gives_logits else None  # one channel tells two classes apart
        return Outputs(gives_logits, pixel_classes=classes, returns_tensor=False)

    def describe(self, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
        config = {**self.model.config, **(arguments or {}), "encoder_weights": None}
        encoder = self.encoder.model
        if not _is_known(config["encoder_name"]):  # it came from a hub: its architecture is one of timm's
            config["encoder_name"] = f"tu-{encoder.pretrained_cfg.get('architecture')}"
        description = {"architecture": "DPT", "arguments": json.loads(json.dumps(config))}
        description["data"] = self.data_config()
        with torch.device("meta"):
            expected, got = shapes_of(self.model), shapes_of(self.build(description))
        if expected != got:
            raise PmvitError(
                f"segmentation_models_pytorch.DPT(**{config}) does not make this model again (first difference: "
                f"{min(expected.items() ^ got.items())[0]}): pass `arguments=` with what else it was created with"
            )
        return description

    @classmethod
    def build(cls, description: dict[str, Any]) -> AnyModule:
        check_fields(description, ("architecture", "arguments", "data"), "the description of the model")
        arguments = description["arguments"]
        if description["architecture"] != "DPT":
            raise PmvitError(f"expected a DPT of {PACKAGE}, got {description['architecture']!r}")
        model = _make(arguments)
        model.pretrained_cfg.update(check_fields(description["data"], DATA_KEYS, "the model's data configuration"))
        return model

    def data_config(self) -> dict[str, Any]:
        return self.encoder.data_config()


def _is_known(encoder_name: Any) -> bool:
    """Whether the name of an encoder is that of one of timm's architectures, for which no network is needed."""
    is_timm = isinstance(encoder_name, str) and encoder_name.startswith("tu-")
    return is_timm and bool(timm.is_model(encoder_name.removeprefix("tu-")))


def _make(arguments: dict[str, Any]) -> AnyModule:
    """A DPT without its weights."""
    if not isinstance(arguments, dict) or FORBIDDEN_ARGUMENTS & set(arguments):
        raise PmvitError(f"expected arguments that describe the architecture, got {arguments!r}")
    try:
        import segmentation_models_pytorch as smp
    except ImportError as error:
        raise PmvitError(
            f"expected the package {PACKAGE} for this model; it cannot be imported ({error}): pip install 'pmvit[smp]'"
        ) from None
    if not _is_known(arguments.get("encoder_name")):
        raise PmvitError(
            f"expected tu- and one of timm's architectures as encoder, got {arguments.get('encoder_name')!r}: "
            "is timm too old for it?"
        )
    try:
        model: AnyModule = smp.DPT(**{**arguments, "encoder_weights": None})
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        raise PmvitError(f"{PACKAGE} cannot make a DPT with {arguments} ({error})") from None
    model.pretrained_cfg = model.encoder.model.pretrained_cfg  # how images are prepared, as timm's own models have it
    return model


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def is_folder(path: Path) -> bool:
    """Whether a folder holds a model that `save_pretrained` of segmentation_models_pytorch wrote."""
    return "_model_class" in _config(path)


def from_folder(path: Path) -> AnyModule:
    """The model that `save_pretrained` wrote, without its weights.

    Raises:
        PmvitError: If it is none that pmvit knows.
    """
    config = _config(path)
    if config["_model_class"] != "DPT":
        raise PmvitError(f"{path}: expected a DPT of {PACKAGE}, got {config['_model_class']}: it has no tokens")
    return _make({name: value for name, value in config.items() if not name.startswith("_")}).eval()
