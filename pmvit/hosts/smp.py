"""Adapter for DPT of segmentation_models_pytorch on one of timm's plain vision transformers.

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
from pmvit.hosts.host import DATA_KEYS, register
from pmvit.hosts.timm.encoder import ENCODERS, OnTimmViT
from pmvit.hosts.timm.model import FORBIDDEN_ARGUMENTS, shapes_of

Host = Any  # the models of segmentation_models_pytorch: nn.Modules whose attributes have no types
PACKAGE = "segmentation_models_pytorch"
WITH_LOGITS = (nn.Identity, nn.LogSoftmax)  # what may end a head whose numbers are to be logits


@register
class SmpDpt(OnTimmViT):
    """The blocks stand in `model.encoder.model.blocks`; the decoder reads tokens after some of them."""

    family = "segmentation_models_pytorch DPT (on a timm plain ViT)"
    path = "encoder.model"
    returns_tensor = False

    def matches(self, model: Host) -> bool:
        dpt = getattr(sys.modules.get(PACKAGE), "DPT", None)
        return dpt is not None and isinstance(model, dpt) and isinstance(model.encoder.model, self.classes)

    def call(self, model: Host, images: Tensor) -> Any:
        output = model(images)
        return output[0] if isinstance(output, tuple) else output  # an auxiliary classifier puts out a second one

    def blocks_read(self, model: Host) -> list[int]:
        depth = len(model.encoder.model.blocks)
        return [int(index) % depth for index in model.encoder._output_indices]

    def gives_logits(self, model: Host) -> bool:
        return isinstance(model.segmentation_head.activation.activation, WITH_LOGITS)

    def pixel_classes(self, model: Host) -> int | None:
        channels = int(model.segmentation_head.head[-1].out_channels)
        return max(channels, 2) if self.gives_logits(model) else None  # one channel tells two classes apart

    def describe(self, model: Host, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
        config = {**model.config, **(arguments or {}), "encoder_weights": None}
        encoder = self.encoder(model)
        if not _is_known(config["encoder_name"]):  # it came from a hub: its architecture is one of timm's
            config["encoder_name"] = f"tu-{encoder.pretrained_cfg.get('architecture')}"
        description = {"architecture": "DPT", "arguments": json.loads(json.dumps(config))}
        description["data"] = self.data_config(model)
        with torch.device("meta"):
            expected, got = shapes_of(model), shapes_of(self.build(description))
        if expected != got:
            raise PmvitError(
                f"segmentation_models_pytorch.DPT(**{config}) does not make this model again (first difference: "
                f"{min(expected.items() ^ got.items())[0]}): pass `arguments=` with what else it was created with"
            )
        return description

    def build(self, description: dict[str, Any]) -> Host:
        check_fields(description, ("architecture", "arguments", "data"), "the description of the model")
        arguments = description["arguments"]
        if description["architecture"] != "DPT":
            raise PmvitError(f"expected a DPT of {PACKAGE}, got {description['architecture']!r}")
        if not isinstance(arguments, dict) or FORBIDDEN_ARGUMENTS & set(arguments):
            raise PmvitError(f"expected arguments that describe the architecture, got {arguments!r}")
        model = _make(arguments)
        model.pretrained_cfg.update(check_fields(description["data"], DATA_KEYS, "the model's data configuration"))
        return model

    def data_config(self, model: Host) -> dict[str, Any]:
        return ENCODERS.data_config(self.encoder(model))


def _is_known(encoder_name: Any) -> bool:
    """Whether the name of an encoder is that of one of timm's architectures, for which no network is needed."""
    is_timm = isinstance(encoder_name, str) and encoder_name.startswith("tu-")
    return is_timm and bool(timm.is_model(encoder_name.removeprefix("tu-")))


def _make(arguments: dict[str, Any]) -> Host:
    """A DPT without its weights."""
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
        model: Host = smp.DPT(**{**arguments, "encoder_weights": None})
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


def from_folder(path: Path) -> Host:
    """The model that `save_pretrained` wrote, without its weights.

    Raises:
        PmvitError: If it is none that pmvit knows.
    """
    config = _config(path)
    if config["_model_class"] != "DPT":
        raise PmvitError(f"{path}: expected a DPT of {PACKAGE}, got {config['_model_class']}: it has no tokens")
    return _make({name: value for name, value in config.items() if not name.startswith("_")}).eval()
