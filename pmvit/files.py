"""Files that are whole or not there: atomic writes, and JSON documents that say what they are and notice damage."""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from numbers import Integral, Real
from pathlib import Path
from types import GenericAlias, NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from pmvit.errors import PmvitError

T = TypeVar("T")
SEAL = "sha256"  # the field of a document that holds the checksum of the others
MOST_LEVELS = 100  # of objects and lists inside each other; what pmvit writes has a dozen
KINDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", NoneType: "null"}
MOST_TEXT = 16 * 2**20  # characters of a document; the largest that pmvit writes have a few hundred thousand


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


def write_document(path: Path, text: str) -> None:
    """Write a JSON object atomically, with a checksum of what it says: damage is then told from what was meant."""
    text = text.rstrip()
    write_text(path, f'{text[:-1].rstrip()},\n "{SEAL}": "{_checksum(json.loads(text))}"\n}}\n')


def _checksum(data: Any) -> str:
    """SHA-256 of JSON data, however it is written."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def check_regular(path: Path) -> None:
    """Raise `PmvitError` if a path names a pipe, which one would wait for, or a device, which may have no end."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise PmvitError(f"expected a file at {path}; got a pipe, a socket or a device, which pmvit does not read")


def read_text(path: Path, what: str) -> str:
    """The text of a file of at most `MOST_TEXT` characters; `PmvitError` if it cannot be read."""
    check_regular(path)
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MOST_TEXT + 1)
    except FileNotFoundError:
        raise PmvitError(f"expected {what} at {path}; there is none") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PmvitError(f"expected {what} at {path}; it cannot be read ({error})") from None
    if len(text) > MOST_TEXT:
        raise PmvitError(f"expected {what} of at most {MOST_TEXT:,} characters at {path}; it is longer")
    return text


def parse_json(text: str, where: str) -> Any:
    """Parse JSON that nothing stumbles over later.

    Raises:
        PmvitError: If it is malformed or too deep, or has integers beyond 64 bits or characters that cannot be written.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PmvitError(f"{where}: expected JSON, got text that breaks off or is malformed ({error})") from None
    level, depth = [data], 0
    while level:
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner += [*value, *value.values()]
            elif isinstance(value, list):
                inner += value
            elif isinstance(value, int) and value.bit_length() > 63:
                raise PmvitError(f"{where}: expected integers of 64 bits, got one of {value.bit_length()}")
            elif isinstance(value, str) and not _can_be_written(value):
                raise PmvitError(f"{where}: expected Unicode, got {value!r}")
        level, depth = inner, depth + 1
        if depth > MOST_LEVELS:
            raise PmvitError(f"{where}: expected JSON of at most {MOST_LEVELS} levels, got more: is it damaged?")
    return data


def _can_be_written(text: str) -> bool:
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:  # half of a pair that stands for one character
        return False


def read_json(path: Path, what: str = "a JSON file") -> dict[str, Any]:
    """Read a JSON object, and see to its checksum if it has one."""
    data = parse_json(read_text(path, what), str(path))
    if not isinstance(data, dict):
        raise PmvitError(f"{path}: expected a JSON object, got {type(data).__name__}: is it another file?")
    return _opened(data, str(path))


def _opened(document: dict[str, Any], where: str) -> dict[str, Any]:
    """A document without its checksum, which has to be right. The configuration of a model has several, and keeps them.

    Documents that a text editor made, or pmvit 0.1, have none.
    """
    rest = {name: value for name, value in document.items() if name != SEAL}
    if len(rest) == len(document) or isinstance(document[SEAL], dict):
        return document
    if document[SEAL] != _checksum(rest):
        raise PmvitError(
            f"{where} is not what was written (its SHA-256 differs): it is damaged. If it was edited, take out the "
            f'field "{SEAL}"'
        )
    return rest


def read_document(path: Path, kind: str | tuple[str, ...], version: int) -> dict[str, Any]:
    """Read a JSON document from a file; see `parse_document`."""
    name = kind if isinstance(kind, str) else kind[0]
    return parse_document(read_text(path, f"a {name} file"), kind, version, where=str(path))


def parse_document(text: str, kind: str | tuple[str, ...], version: int, where: str) -> dict[str, Any]:
    """Parse a JSON object that says what it is (`"format"`) and of which version, and see to its checksum.

    Args:
        text: The JSON.
        kind: The format to expect; of several names, the first is today's and the others are older.
        version: The newest version the caller knows. Older ones are given back as they are, for the caller to upgrade.
        where: What to call the text in errors.

    Raises:
        PmvitError: If it is something else, or damaged, or a newer pmvit wrote it.
    """
    kinds = (kind,) if isinstance(kind, str) else kind
    document = parse_json(text, where)
    found = document.get("format") if isinstance(document, dict) else type(document).__name__
    if not isinstance(document, dict) or found not in kinds:
        raise PmvitError(
            f'{where}: expected a JSON object with "format": "{kinds[0]}", got {found!r}: is it another file?'
        )
    got = document.get("version")
    if type(got) is not int or not 1 <= got <= version:
        advice = "a newer pmvit wrote it, update yours" if type(got) is int and got > version else "make it again"
        raise PmvitError(f"{where}: expected version {version} of {found}, got {got!r}: {advice}")
    return _opened(document, where)


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
    """Make a dataclass from JSON data of the types that its fields have; those with a default may be left out."""
    return cls(**fields_from(cls, data, where))


def fields_from(cls: type, data: Any, where: str, beside: tuple[str, ...] = ()) -> dict[str, Any]:
    """The fields of a dataclass from JSON data, which may hold others `beside` them; see `config_from`."""
    known = {field.name: field for field in fields(cls) if field.name not in beside}
    needed = [name for name, each in known.items() if each.default is MISSING and each.default_factory is MISSING]
    given = check_fields(data, needed, where, optional=(*known, *beside))
    return {name: typed(known[name].type, given[name], f"{where}: {name}") for name in given if name in known}


def typed(kind: Any, value: Any, where: str) -> Any:
    """JSON data as a value of a type, lists as tuples and objects as dataclasses; `PmvitError` if it is of another."""
    parts = get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        if value is None and NoneType in parts:
            return None
        known = [part for part in parts if part is not NoneType]
        for part in known:
            try:
                return typed(part, value, where)
            except PmvitError:
                if len(known) == 1:
                    raise
    elif get_origin(kind) is Literal:
        if value in parts:
            return value
    elif hasattr(kind, "_fields"):  # a `NamedTuple`, which JSON has as a list
        return kind(*typed(GenericAlias(tuple, tuple(kind.__annotations__.values())), value, where))
    elif get_origin(kind) in (tuple, list):
        if isinstance(value, (list, tuple)):
            inner = parts[:1] * len(value) if parts[-1] is ... or get_origin(kind) is list else parts
            if len(inner) == len(value):
                pairs = enumerate(zip(inner, value, strict=True))
                return get_origin(kind)(typed(part, one, f"{where}: {number}") for number, (part, one) in pairs)
    elif get_origin(kind) in (dict, Mapping):
        if isinstance(value, Mapping):
            return {name: typed(parts[1], one, f"{where}: {name}") for name, one in value.items()}
    elif is_dataclass(kind):
        return config_from(kind, value, where)  # type: ignore[arg-type]  # a class, not a value of one
    elif kind is Any or (isinstance(value, _accepted(kind)) and (kind is bool or not isinstance(value, bool))):
        return value
    raise PmvitError(f"{where}: expected {_called(kind)}, got {_shortened(value)}")


def _accepted(kind: type) -> type:
    """What values may be of where a field is of a type: any whole number is a number."""
    numbers: dict[type, type] = {int: Integral, float: Real}
    return numbers.get(kind, kind)


def _called(kind: Any) -> str:
    """A type in words."""
    parts = get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(map(_called, parts))
    if get_origin(kind) is Literal:
        return " or ".join(map(str, parts))
    if get_origin(kind) in (tuple, list):
        return f"a list of {len(parts)}" if parts[1:] and parts[-1] is not ... else "a list"
    return KINDS.get(kind, "an object")


def _shortened(value: Any, most: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."
