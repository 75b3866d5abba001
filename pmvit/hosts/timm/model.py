"""What the hosts of all of timm's models have in common: how one is described, and made again."""

from abc import ABC, abstractmethod
from typing import Any

import timm
import torch
from timm.data.config import resolve_data_config
from torch import nn

from pmvit.errors import PmvitError
from pmvit.files import check_fields
from pmvit.hosts.host import DATA_KEYS, AnyModule, Host, Outputs

FORBIDDEN_ARGUMENTS = {"pretrained", "pretrained_cfg", "checkpoint_path", "cache_dir"}  # they read other files


class TimmModel(Host, ABC):
    """Models that `timm.create_model` makes."""

    classes: tuple[type[nn.Module], ...]

    @abstractmethod
    def traits(self) -> dict[str, Any]:
        """The arguments of `timm.create_model` that can be read off the model."""

    @classmethod
    def plain(cls, architecture: str) -> nn.Module:
        """What timm makes of the name of an architecture alone."""
        model: nn.Module = timm.create_model(architecture)
        return model

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        return isinstance(model, cls.classes)

    def input_size(self) -> tuple[int, int, int]:
        height, width = self.model.patch_embed.img_size
        return input_channels(self.model), height, width

    def outputs(self) -> Outputs:
        count = self.model.num_classes or None
        return Outputs(gives_logits=count is not None, num_classes=count)

    def describe(self, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
        architecture = getattr(self.model, "pretrained_cfg", {}).get("architecture")
        if not architecture:
            raise PmvitError(
                f"expected a model made by timm.create_model, which can make it again; got a "
                f"{type(self.model).__name__} made by hand"
            )
        with torch.device("meta"):
            default = type(self)(self.plain(architecture)).traits()
        read_off = {name: value for name, value in self.traits().items() if value != default[name]}
        arguments = {**read_off, **getattr(self.model, "built_with", {}), **(arguments or {})}
        description = {"architecture": architecture, "arguments": arguments, "data": self.data_config()}
        with torch.device("meta"):
            rebuilt = self.build(description)
        expected, got = shapes_of(self.model), shapes_of(rebuilt)
        if expected != got:
            differing = sorted(expected.items() ^ got.items())
            raise PmvitError(
                f"timm.create_model({architecture!r}, **{arguments}) does not make this model again (first difference: "
                f"{differing[0][0]}): pass `arguments=` with what else it was created with"
            )
        return description

    @classmethod
    def build(cls, description: dict[str, Any]) -> nn.Module:
        check_fields(description, ("architecture", "arguments", "data"), "the description of the model")
        architecture, arguments = description["architecture"], description["arguments"]
        if not (isinstance(architecture, str) and timm.is_model(architecture)):
            raise PmvitError(f"expected one of timm's architectures, got {architecture!r}: is timm too old for it?")
        if not isinstance(arguments, dict) or FORBIDDEN_ARGUMENTS & set(arguments):
            raise PmvitError(f"expected arguments that describe the architecture, got {arguments!r}")
        try:
            model: AnyModule = timm.create_model(architecture, pretrained=False, **arguments)
            model.built_with = arguments  # so that a loaded model can be saved again
            model.pretrained_cfg.update(check_fields(description["data"], DATA_KEYS, "the model's data configuration"))
        except (TypeError, ValueError, RuntimeError, AssertionError) as error:
            raise PmvitError(f"timm cannot make {architecture} with {arguments} ({error})") from None
        result: nn.Module = model
        return result

    def data_config(self) -> dict[str, Any]:
        config = resolve_data_config(pretrained_cfg=getattr(self.model, "pretrained_cfg", {}))
        config["input_size"] = self.input_size()
        channels = config["input_size"][0]
        for key in ("mean", "std"):
            if len(config[key]) != channels:  # made for other channels: their mean serves for each
                config[key] = (sum(config[key]) / len(config[key]),) * channels
        return {key: list(v) if isinstance(v := config[key], tuple) else v for key in DATA_KEYS}


def input_channels(model: AnyModule) -> int:
    return next(m.in_channels for m in model.patch_embed.modules() if isinstance(m, nn.Conv2d))


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor in a model's state, by name."""
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}
