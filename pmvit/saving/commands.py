"""`commands.json`: the commands that made a model, each with the versions it ran with."""

import json
import platform
import shlex
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pmvit.errors import PmvitError
from pmvit.files import read_document, write_text

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
    commands = read_document(path, FORMAT, VERSION).get("commands")
    if not isinstance(commands, list) or not all(isinstance(one, dict) and "command" in one for one in commands):
        raise PmvitError(f"{path}: expected a list of commands, got {commands!r}: remove the file")
    return commands


def remember_command(model: Path, *, after: Path | None = None) -> None:
    """Write down that this command line made a saved model, after the commands that made the one it began with."""
    before = read_commands(after) if after is not None else []
    commands = [*before, {"command": this_command(), "versions": versions()}]
    document = {"format": FORMAT, "version": VERSION, "commands": commands}
    write_text(commands_file(model), json.dumps(document, indent=1) + "\n")
