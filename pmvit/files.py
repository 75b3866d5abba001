"""Files that are whole or not there: atomic writes, and JSON documents that say what they are."""

import json
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from pmvit.errors import PmvitError

T = TypeVar("T")


def check_writable(path: Path) -> None:
    """Raise `PmvitError` if no file can be written there: better found before hours of work than after."""
    if path.is_dir():
        raise PmvitError(f"expected the name of a file to write, got the folder {path}")
    nearest = next(folder for folder in path.absolute().parents if folder.exists())
    if not nearest.is_dir():
        raise PmvitError(f"expected a folder to write {path.name} to, got the file {nearest}")
    if not os.access(nearest, os.W_OK):
        raise PmvitError(f"expected a folder that can be written to; {nearest} cannot be: choose another output")


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, then rename it: a reader sees the old file or the new one."""
    check_writable(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        make_shared(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def make_shared(temporary: Path) -> None:
    """Give a temporary file, which is private, the rights of any new file: a saved model is as shared as its folder."""
    umask = os.umask(0)
    os.umask(umask)
    temporary.chmod(0o666 & ~umask)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def read_document(path: Path, kind: str | tuple[str, ...], version: int) -> dict[str, Any]:
    """Read a JSON document from a file; see `parse_document`."""
    name = kind if isinstance(kind, str) else kind[0]
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise PmvitError(f"expected a {name} file at {path}; there is none") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PmvitError(f"expected a {name} file at {path}; it cannot be read ({error})") from None
    return parse_document(text, kind, version, where=str(path))


def parse_document(text: str, kind: str | tuple[str, ...], version: int, where: str) -> dict[str, Any]:
    """Parse a JSON object that says what it is (`"format"`) and of which version.

    Args:
        text: The JSON.
        kind: The format to expect; of several names, the first is today's and the others are older.
        version: The newest version the caller knows. Older ones are given back as they are, for the caller to upgrade.
        where: What to call the text in errors.

    Raises:
        PmvitError: If it is something else, or a newer pmvit wrote it.
    """
    kinds = (kind,) if isinstance(kind, str) else kind
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise PmvitError(f"{where}: expected JSON, got text that breaks off or is malformed ({error})") from None
    found = document.get("format") if isinstance(document, dict) else type(document).__name__
    if not isinstance(document, dict) or found not in kinds:
        raise PmvitError(
            f'{where}: expected a JSON object with "format": "{kinds[0]}", got {found!r}: is it another file?'
        )
    got = document.get("version")
    if type(got) is not int or not 1 <= got <= version:
        advice = "a newer pmvit wrote it, update yours" if type(got) is int and got > version else "make it again"
        raise PmvitError(f"{where}: expected version {version} of {found}, got {got!r}: {advice}")
    return document


def check_fields(data: Any, names: Iterable[str], where: str, optional: Iterable[str] = ()) -> dict[str, Any]:
    """Return `data` if it is an object with just these fields; raise `PmvitError` that names the odd one if not."""
    if not isinstance(data, dict):
        raise PmvitError(f"{where}: expected an object, got {type(data).__name__}")
    required, allowed = set(names), {*names, *optional}
    if missing := sorted(required - set(data)):
        raise PmvitError(f"{where}: the field {missing[0]!r} is missing")
    if unknown := sorted(set(data) - allowed):
        raise PmvitError(f"{where}: unknown field {unknown[0]!r}; expected {', '.join(sorted(allowed))}")
    return data


def config_from(cls: type[T], data: Any, where: str) -> T:
    """Make a configuration dataclass from JSON data; fields that are left out keep their defaults."""
    names = [field.name for field in fields(cls)]  # type: ignore[arg-type]  # T is a dataclass
    given = check_fields(data, (), where, optional=names)
    return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})
