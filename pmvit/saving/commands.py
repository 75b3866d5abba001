"""`commands.json`: the commands that made a model, each with the versions it ran with."""

import json
import platform
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pmvit.files import check_fields, read_document, typed, write_document

FILE = "commands.json"
FORMAT, VERSION = "pmvit-commands", 1
LIBRARIES = ("torchvision", "transformers", "segmentation_models_pytorch")
PACKAGES = ("pmvit", "torch", "timm", *LIBRARIES, "numpy", "pillow")


@cache
def versions() -> dict[str, str]:
    """Python and the packages that results depend on, as far as they are installed."""
    found = {"Python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def this_command() -> str:
    """The command line that is running, as one would type it."""
    return shlex.join(["pmvit", *sys.argv[1:]])


def commands_file(model: Path) -> Path:
    """Where the commands of a saved model are: in its folder, or beside its file."""
    return model.with_suffix(".commands.json") if model.suffix == ".safetensors" else model / FILE


def read_commands(model: Path) -> list[dict[str, Any]]:
    """The commands that made a saved model, first to last; none if it was made from Python.

    Raises:
        PmvitError: If the file is there and is not what it should be.
    """
    path = commands_file(model)
    if not path.exists():
        return []
    document = check_fields(read_document(path, FORMAT, VERSION), ("format", "version", "commands"), str(path))
    commands: tuple[dict[str, Any], ...] = typed(tuple[dict[str, Any], ...], document["commands"], f"{path}: commands")
    for one in commands:
        typed(str, one.get("command"), f"{path}: command")
    return list(commands)


_commands: ContextVar[Callable[[], list[dict[str, Any]]] | None] = ContextVar("commands", default=None)


@contextmanager
def running_command(after: Path | None) -> Iterator[None]:
    """Say that this command line runs now, so that every model it saves gets its record.

    Args:
        after: The model that it begins with, which may have been made by commands, too.
    """

    @cache  # a run that goes on in its own folder has one record there, however often it saves
    def commands() -> list[dict[str, Any]]:
        before = read_commands(after) if after is not None else []
        return [*before, {"command": this_command(), "versions": versions()}]

    token = _commands.set(commands)
    try:
        yield
    finally:
        _commands.reset(token)


def record_commands(model: Path) -> None:
    """Write down the commands that made a saved model; of one that Python made there are none, nor those of another."""
    commands, path = _commands.get(), commands_file(model)
    if commands is None:
        path.unlink(missing_ok=True)
        return
    document = {"format": FORMAT, "version": VERSION, "commands": commands()}
    write_document(path, json.dumps(document, indent=1) + "\n")
