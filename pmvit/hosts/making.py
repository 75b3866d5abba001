"""Models as JSON data and made again of it, and how their images are prepared: what is the same for every library."""

import json
import socket
import textwrap
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.error import URLError

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from pmvit.errors import PmvitError, first_line
from pmvit.files import check_fields, read_text
from pmvit.hosts.heads import describe_head, make_head
from pmvit.hosts.host import AnyModule, Host, host_of

DATA_KEYS = ("input_size", "interpolation", "mean", "std", "crop_pct", "crop_mode")  # of `Host.data_config`
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean and standard deviation of colours
INTERPOLATIONS = ("bilinear", "bicubic", "nearest", "lanczos", "box", "hamming", "random")
CROP_MODES = ("center", "squash", "border")
MOST = 2**20  # the largest number in a description: a text model's vocabulary has nearly as many entries
MOST_PIXELS = 10_000  # a side of an image, before it is cropped
AS_FILE = "pass them as a file (--weights)"
PATIENCE = 5.0  # seconds, until a server that says nothing is not there


@contextmanager
def one_line(what: str, advice: str = "") -> Iterator[None]:
    """Say in one line what a library could not do, and why; libraries raise errors of any kind."""
    try:
        yield
    except PmvitError:
        raise
    except Exception as error:
        raise PmvitError(f"{what} ({first_line(error)}){advice}") from None


@contextmanager
def fetching(what: str, instead: str = AS_FILE) -> Iterator[None]:
    """Let a library look for weights, on this machine alone if the hub does not answer: it would try for a minute.

    Raises:
        PmvitError: If they are not here and cannot be fetched; `instead` says what to do.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]  # as its documentation has it

    before, is_online = (constants.HF_HUB_OFFLINE, socket.getdefaulttimeout()), True
    try:
        get_session().head(constants.ENDPOINT, timeout=PATIENCE)
    except Exception:  # of whatever library it asks with
        is_online = False
    try:
        constants.HF_HUB_OFFLINE = before[0] or not is_online
        socket.setdefaulttimeout(PATIENCE)
        yield
    except OSError as error:
        if is_online and not isinstance(error, (URLError, TimeoutError)):
            raise
        silent = "HF_HUB_OFFLINE is set" if before[0] else f"{constants.ENDPOINT} does not answer"
        reason = str(error) if is_online else silent
        raise PmvitError(
            f"{what}: its weights are not on this machine and cannot be fetched ({reason}): {instead}"
        ) from None
    finally:
        constants.HF_HUB_OFFLINE = before[0]
        socket.setdefaulttimeout(before[1])


def check_known(make: Callable[[], nn.Module]) -> None:
    """Raise `PmvitError` if no host knows what is made, for which it need not be given memory, or weights."""
    try:
        with torch.device("meta"):
            made = make()
    except RuntimeError:  # some look at values while they are made
        made = make()
    host_of(made).block_names()


def import_library(name: str, extra: str) -> Any:
    """A library that not everybody has, imported; `PmvitError` says which extra of pmvit brings it."""
    with one_line(
        f"expected the package {name} for this model; it cannot be imported", f": pip install 'pmvit[{extra}]'"
    ):
        return import_module(name)


def folder_config(folder: Path) -> dict[str, Any]:
    """What a library that saved a model in a folder wrote of it; nothing if there is none."""
    try:
        config = json.loads(read_text(folder / "config.json", "a configuration"))
    except (PmvitError, ValueError, RecursionError):  # whoever reads it for what it is will say what is wrong
        return {}
    return config if isinstance(config, dict) else {}


@contextmanager
def at_most(parameters: int, where: str) -> Iterator[None]:
    """Stop with `PmvitError` what makes a model as soon as that has more parameters than it may have."""
    thread, made = threading.get_ident(), 0

    def count(*_: Any) -> None:
        nonlocal made
        made += threading.get_ident() == thread
        if made > parameters:
            raise PmvitError(f"{where}: expected a model of at most {parameters:,} parameter tensors; it has more")

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def check_numbers(data: Any, where: str) -> None:
    """Raise `PmvitError` if JSON data holds a number that is no size of a model: a library would count up to it."""
    if isinstance(data, (dict, list, tuple)):
        for value in data.values() if isinstance(data, dict) else data:
            check_numbers(value, where)
    elif isinstance(data, (int, float)) and not abs(data) <= MOST:
        raise PmvitError(f"{where}: expected numbers up to {MOST:,}, got {str(data)[:40]}")


def check_data(data: Any) -> dict[str, Any]:
    """Return `data` if it says how images are prepared and these stay within bounds; raise `PmvitError` if not."""
    where = "the model's data configuration"
    check_fields(data, DATA_KEYS, where)
    check_numbers(data, where)
    size, crop = data["input_size"], data["crop_pct"]
    if not any(_are_numbers(size, count, int) for count in (2, 3, 4)) or min(size) < 1:
        raise PmvitError(
            f"{where}: input_size: expected channels, height and width, or the shape of a video or a spectrogram; got "
            f"{size!r}"
        )
    if not _are_numbers([crop], 1) or crop <= 0 or max(size[-2:]) / crop > MOST_PIXELS:
        raise PmvitError(
            f"{where}: expected images of up to {MOST_PIXELS:,} pixels a side before they are cropped; got "
            f"{size[-2]} x {size[-1]} with crop_pct {crop!r}"
        )
    channels = channels_of(size)
    for name in ("mean", "std"):
        if not _are_numbers(data[name], channels) or (name == "std" and min(data[name]) <= 0):
            raise PmvitError(f"{where}: {name}: expected a number for each of {channels} channels, got {data[name]!r}")
    for name, known in (("interpolation", INTERPOLATIONS), ("crop_mode", CROP_MODES)):
        if data[name] not in known:
            raise PmvitError(f"{where}: {name}: expected {', '.join(known)}; got {data[name]!r}")
    checked: dict[str, Any] = data
    return checked


def channels_of(size: Sequence[int]) -> int:
    """How many channels an example of this shape has: (..., channels, height, width), or one, without an axis."""
    return size[-3] if len(size) > 2 else 1


def sides_of(img_size: Any) -> tuple[int, int]:
    """Height and width of images, where one number may stand for both; `PmvitError` if they are no sizes."""
    sides = tuple(img_size) if isinstance(img_size, (tuple, list)) else (img_size, img_size)
    if not _are_numbers(sides, 2, int) or not 1 <= min(sides) <= max(sides) <= MOST_PIXELS:
        raise PmvitError(f"img_size: expected a side in pixels, or height and width; got {img_size!r}")
    return sides[0], sides[1]


def _are_numbers(values: Any, count: int, kind: type | tuple[type, ...] = (int, float)) -> bool:
    is_list = isinstance(values, (list, tuple)) and len(values) == count
    return is_list and all(isinstance(value, kind) and not isinstance(value, bool) for value in values)


class MadeModel(Host, ABC):
    """A host whose models a library makes of the name of an architecture and arguments.

    Attributes:
        library: Its name.
        described: The fields of a description.
        accepted: Arguments that a description may have: they say what the model is made of, and nothing else reaches
            the library, which would open or fetch other files for some.
        head: Where a model has its head, which may be replaced by another of PyTorch's layers.
    """

    library: str
    described: tuple[str, ...] = ("architecture", "arguments", "data")
    accepted: frozenset[str]
    head: str = "head"

    @classmethod
    @abstractmethod
    def make(cls, description: dict[str, Any]) -> AnyModule:
        """The model of a description whose arguments are accepted, with any weights."""

    @abstractmethod
    def preparation(self) -> dict[str, Any]:
        """`DATA_KEYS` without the size of the images."""

    @classmethod
    def checked_make(cls, description: dict[str, Any]) -> AnyModule:
        """`make`, or `PmvitError` in one line."""
        architecture, arguments = description["architecture"], description["arguments"]
        cls.check_arguments(arguments)
        told = textwrap.shorten(str(arguments), 300)
        with one_line(f"{cls.library} cannot make {architecture} with {told}"):
            model = cls.make(description)
            if "head" in description:
                check_numbers(description["head"], "the model's head")
                model.set_submodule(cls.head, make_head(description["head"]))
        if not cls.matches(model):
            raise PmvitError(f"expected a {cls.family}; {cls.library}'s {architecture} with {told} makes another")
        return model

    @classmethod
    def check_arguments(cls, arguments: Any) -> None:
        """Raise `PmvitError` if arguments from a file say more than what the model is made of."""
        unknown = sorted(set(arguments) - cls.accepted) if isinstance(arguments, dict) else [arguments]
        if unknown:
            raise PmvitError(
                f"expected arguments that describe the architecture, got {unknown[0]!r}: of a saved model, no others "
                f"reach {cls.library}"
            )
        check_numbers(arguments, "the arguments of the architecture")

    @classmethod
    def build(cls, description: dict[str, Any]) -> AnyModule:
        check_fields(description, cls.described, "the description of the model", optional=("head",))
        data = check_data(description["data"])
        model = cls.checked_make(description)
        if getattr(model, "pretrained_cfg", None) is None:
            model.pretrained_cfg = {}
        model.pretrained_cfg.update(data)
        return model.eval()

    def checked(self, description: dict[str, Any]) -> dict[str, Any]:
        """The description, with the head if it is not the library's; `PmvitError` if no such model is made of it."""
        expected, got = _shapes(self.model), self._shapes_of(description)
        if expected != got and (head := self._described_head()) is not None:
            description = {**description, "head": head}
            got = self._shapes_of(description)
        if expected != got:
            first = min(expected ^ got)[0]
            advice = "pass `arguments=` with what else it was created with"
            if first.startswith(self.head):
                advice += ", as num_classes; a head of your own is saved if it is an nn.Sequential of torch's layers"
            raise PmvitError(
                f"{self.library}'s {description['architecture']} with {description['arguments']} does not make this "
                f"model again (first difference: {first}): {advice}"
            )
        return description

    def _shapes_of(self, description: dict[str, Any]) -> set[tuple[str, tuple[int, ...]]]:
        with torch.device("meta"):
            return _shapes(self.build(description))

    def _described_head(self) -> list[list[Any]] | None:
        found = dict(self.model.named_modules()).get(self.head)
        return None if found is None else describe_head(found)

    def data_config(self) -> dict[str, Any]:
        size = self.input_size()
        found = {**self.preparation(), "input_size": size}
        for key in ("mean", "std"):
            if len(found[key]) != channels_of(size):  # made for other channels: their mean serves for each
                found[key] = (sum(found[key]) / len(found[key]),) * channels_of(size)
        return {key: list(v) if isinstance(v := found[key], tuple) else v for key in DATA_KEYS}


def _shapes(model: nn.Module) -> set[tuple[str, tuple[int, ...]]]:
    """The name and shape of every tensor in a model's state."""
    return {(name, tuple(value.shape)) for name, value in model.state_dict().items()}
