"""What the hosts of all of timm's models have in common: how one is described, and made again."""

from collections.abc import Sequence
from typing import Any, ClassVar

import timm
import torch
from timm.data.config import resolve_data_config
from torch import nn

from pmvit.errors import PmvitError
from pmvit.hosts.host import AnyModule, Outputs
from pmvit.hosts.making import MadeModel


class TimmModel(MadeModel):
    """Models that `timm.create_model` makes.

    Attributes:
        classes: Those of the models.
        path: Where timm's model is in a model that is built around one.
        always: Arguments of `timm.create_model` without which it makes no such model.
    """

    library = "timm"
    classes: tuple[type[nn.Module], ...]
    path: str = ""
    always: ClassVar[dict[str, Any]] = {}

    @property
    def encoder(self) -> AnyModule:
        """The model of timm."""
        return self.model.get_submodule(self.path)

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        return isinstance(model, cls.classes)

    def input_size(self) -> tuple[int, int, int]:
        embedding = self.encoder.patch_embed
        height, width = embedding.img_size
        return next(m.in_channels for m in embedding.modules() if isinstance(m, nn.Conv2d)), height, width

    def outputs(self) -> Outputs:
        count = self.model.num_classes or None
        return Outputs(gives_logits=count is not None, num_classes=count)

    def traits(self) -> dict[str, Any]:
        """The arguments of `timm.create_model` that can be read off the model."""
        model = self.encoder
        return {
            "num_classes": model.num_classes,
            "in_chans": self.input_size()[0],
            "img_size": list(model.patch_embed.img_size),
            "patch_size": one_or_all(model.patch_embed.patch_size),
            "global_pool": model.global_pool,
            "embed_dim": model.embed_dim,
        }

    def describe(self, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
        architecture = getattr(self.model, "pretrained_cfg", {}).get("architecture")
        if not architecture:
            raise PmvitError(
                f"expected a model made by timm.create_model, which can make it again; got a "
                f"{type(self.model).__name__} made by hand"
            )
        with torch.device("meta"):
            default = type(self)(timm.create_model(architecture, **self.always)).traits()
        read_off = {name: value for name, value in self.traits().items() if value != default[name]}
        arguments = {**read_off, **getattr(self.model, "built_with", {}), **self.always, **(arguments or {})}
        return self.checked({"architecture": architecture, "arguments": arguments, "data": self.data_config()})

    @classmethod
    def make(cls, description: dict[str, Any]) -> AnyModule:
        architecture, arguments = description["architecture"], description["arguments"]
        if not (isinstance(architecture, str) and timm.is_model(architecture)):
            raise PmvitError(f"expected one of timm's architectures, got {architecture!r}: is timm too old for it?")
        model: AnyModule = timm.create_model(architecture, pretrained=False, **arguments)
        model.built_with = arguments  # so that a loaded model can be saved again
        return model

    def preparation(self) -> dict[str, Any]:
        own = getattr(self.model, "pretrained_cfg", None) or getattr(self.encoder, "pretrained_cfg", {})
        found: dict[str, Any] = resolve_data_config(pretrained_cfg=own)
        return found


def one_or_all(values: Sequence[Any]) -> Any:
    """The one value that all are, or a list of them."""
    return values[0] if len(set(values)) == 1 else list(values)
