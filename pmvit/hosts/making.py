"""Models as JSON data and made again of it, and how their images are prepared: what is the same for every library."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pmvit.errors import PmvitError
from pmvit.files import check_fields
from pmvit.hosts.host import AnyModule, Host

DATA_KEYS = ("input_size", "interpolation", "mean", "std", "crop_pct", "crop_mode")  # of `Host.data_config`
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean and standard deviation of colours
FORBIDDEN_ARGUMENTS = {"pretrained", "pretrained_cfg", "checkpoint_path", "cache_dir"}  # they read other files
FAILURES = (AssertionError, AttributeError, ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError)


@contextmanager
def one_line(what: str, advice: str = "") -> Iterator[None]:
    """Say in one line what a library could not do, and why."""
    try:
        yield
    except PmvitError:
        raise
    except FAILURES as error:
        reason = next(iter(str(error).strip().splitlines()), repr(error))
        raise PmvitError(f"{what} ({reason}){advice}") from None


def import_library(name: str, extra: str) -> Any:
    """A library that not everybody has, imported; `PmvitError` says which extra of pmvit brings it."""
    with one_line(
        f"expected the package {name} for this model; it cannot be imported", f": pip install 'pmvit[{extra}]'"
    ):
        return import_module(name)


def folder_config(folder: Path) -> dict[str, Any]:
    """What a library that saved a model in a folder wrote of it; nothing if there is none."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


class MadeModel(Host, ABC):
    """A host whose models a library makes of the name of an architecture and arguments.

    Attributes:
        library: Its name.
        described: The fields of a description.
        forbidden: Arguments that have the library run or read other files.
    """

    library: str
    described: tuple[str, ...] = ("architecture", "arguments", "data")
    forbidden: set[str] = FORBIDDEN_ARGUMENTS

    @classmethod
    @abstractmethod
    def make(cls, description: dict[str, Any]) -> AnyModule:
        """The model of a description whose arguments are harmless, with any weights."""

    @abstractmethod
    def preparation(self) -> dict[str, Any]:
        """`DATA_KEYS` without the size of the images."""

    @classmethod
    def checked_make(cls, description: dict[str, Any]) -> AnyModule:
        """`make`, or `PmvitError` in one line."""
        architecture, arguments = description["architecture"], description["arguments"]
        if not isinstance(arguments, dict) or cls.forbidden & set(arguments):
            raise PmvitError(f"expected arguments that describe the architecture, got {arguments!r}")
        with one_line(f"{cls.library} cannot make {architecture} with {arguments}"):
            return cls.make(description)

    @classmethod
    def build(cls, description: dict[str, Any]) -> AnyModule:
        check_fields(description, cls.described, "the description of the model")
        data = check_fields(description["data"], DATA_KEYS, "the model's data configuration")
        model = cls.checked_make(description)
        if getattr(model, "pretrained_cfg", None) is None:
            model.pretrained_cfg = {}
        model.pretrained_cfg.update(data)
        return model.eval()

    def checked(self, description: dict[str, Any]) -> dict[str, Any]:
        """The description, or `PmvitError` if a model of other shapes is made of it."""
        with torch.device("meta"):
            expected, got = (_shapes(model) for model in (self.model, self.build(description)))
        if expected != got:
            raise PmvitError(
                f"{self.library}'s {description['architecture']} with {description['arguments']} does not make this "
                f"model again (first difference: {min(expected ^ got)[0]}): pass `arguments=` with what else it was "
                "created with"
            )
        return description

    def data_config(self) -> dict[str, Any]:
        size = self.input_size()
        found = {**self.preparation(), "input_size": size}
        for key in ("mean", "std"):
            if len(found[key]) != size[0]:  # made for other channels: their mean serves for each
                found[key] = (sum(found[key]) / len(found[key]),) * size[0]
        return {key: list(v) if isinstance(v := found[key], tuple) else v for key in DATA_KEYS}


def _shapes(model: nn.Module) -> set[tuple[str, tuple[int, ...]]]:
    """The name and shape of every tensor in a model's state."""
    return {(name, tuple(value.shape)) for name, value in model.state_dict().items()}
