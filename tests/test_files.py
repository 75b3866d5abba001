"""JSON documents say what they are and notice damage; those of older versions are read, those of newer ones refused."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest

from pmvit.errors import PmvitError
from pmvit.files import config_from, parse_document, parse_json, read_document, read_json, write_document


@pytest.mark.parametrize("version", [1, 2, 3])
def test_versions_up_to_the_known_one_are_read(version: int) -> None:
    document = {"format": "pmvit-example", "version": version, "old": 1}
    assert parse_document(json.dumps(document), "pmvit-example", 3, "a file") == document


def test_an_older_name_of_a_format_is_read() -> None:
    document = {"format": "pmvit-before", "version": 1}
    assert parse_document(json.dumps(document), ("pmvit-now", "pmvit-before"), 1, "a file") == document
    with pytest.raises(PmvitError, match='expected a JSON object with "format": "pmvit-now", got \'pmvit-before\''):
        parse_document(json.dumps(document), "pmvit-now", 1, "a file")


@pytest.mark.parametrize(
    ("version", "advice"), [(4, "update yours"), (0, "make it"), (True, "make it"), ("1", "make it"), (None, "make it")]
)
def test_other_versions_are_refused_with_what_to_do(version: object, advice: str) -> None:
    text = json.dumps({"format": "pmvit-example", "version": version})
    with pytest.raises(PmvitError, match=rf"^a file: expected version 3 of pmvit-example, got {version!r}: .*{advice}"):
        parse_document(text, "pmvit-example", 3, "a file")


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": ', "breaks off or is malformed"),
        (DEEP + "]" * len(DEEP), "breaks off or is malformed"),
        ("[" * 200 + "]" * 200, "at most 100 levels"),
        ("9" * 5000, "breaks off or is malformed"),
        ("9" * 40, "integers of 64 bits"),
        (r'{"a": "\ud800"}', "expected Unicode"),
        ("\ufeff{}", "breaks off or is malformed"),
    ],
)
def test_json_that_somebody_would_stumble_over_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(PmvitError, match=message) as error:
        parse_json(text, "a file")
    assert str(error.value).startswith("a file: expected ")
    assert "\n" not in str(error.value)


def test_another_encoding_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for data in ('{"a": 1}'.encode("utf-16"), b'{"a": "\xe9"}'):
        path.write_bytes(data)
        with pytest.raises(PmvitError, match="cannot be read"):
            read_json(path)


def test_a_document_knows_its_own_damage(tmp_path: Path) -> None:
    path, document = tmp_path / "a.json", {"format": "pmvit-example", "version": 1, "weights": [0.1, 2, {"b": None}]}
    write_document(path, json.dumps(document, indent=1))
    assert read_document(path, "pmvit-example", 1) == document
    assert read_json(path) == document
    text = path.read_text()
    path.write_text(json.dumps(json.loads(text), sort_keys=True))  # written another way, it says the same
    assert read_json(path) == document
    path.write_text(text.replace("0.1", "0.2"))
    with pytest.raises(PmvitError, match=r'is not what was written .* take out the field "sha256"'):
        read_document(path, "pmvit-example", 1)
    with pytest.raises(PmvitError, match="is not what was written"):
        read_json(path)
    edited = {key: value for key, value in json.loads(path.read_text()).items() if key != "sha256"}
    path.write_text(json.dumps(edited))
    assert read_json(path)["weights"][0] == 0.2


class Point(NamedTuple):
    x: int
    y: float


@dataclass(frozen=True)
class Inner:
    name: str


@dataclass(frozen=True)
class Outer:
    count: int
    share: float
    points: tuple[Point, ...]
    inner: Inner | None
    kind: Literal["a", "b"] = "a"
    size: tuple[int, int] = (1, 1)
    on: bool = False
    named: dict[str, int] = field(default_factory=dict)


OUTER: dict[str, Any] = {"count": 3, "share": 1, "points": [[1, 0.5], [2, 1]], "inner": {"name": "x"}, "kind": "b"}


def test_json_becomes_dataclasses() -> None:
    made = config_from(Outer, {**OUTER, "size": [2, 3], "named": {"a": 1}}, "a file")
    assert made == Outer(3, 1, (Point(1, 0.5), Point(2, 1)), Inner("x"), "b", (2, 3), named={"a": 1})
    assert config_from(Outer, {**OUTER, "inner": None}, "a file").inner is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": 1.5}, "count: expected a whole number, got 1.5"),
        ({"count": True}, "count: expected a whole number, got True"),
        ({"count": "3"}, "count: expected a whole number, got '3'"),
        ({"share": None}, "share: expected a number, got None"),
        ({"points": {}}, "points: expected a list"),
        ({"points": [[1]]}, "points: 0: expected a list of 2"),
        ({"points": [[1, "y"]]}, "points: 0: 1: expected a number, got 'y'"),
        ({"inner": {}}, "inner: the field 'name' is missing"),
        ({"inner": {"name": 3}}, "inner: name: expected a text, got 3"),
        ({"kind": "c"}, "kind: expected a or b, got 'c'"),
        ({"kind": []}, r"kind: expected a or b, got \[\]"),
        ({"size": [1, 2, 3]}, "size: expected a list of 2"),
        ({"on": 1}, "on: expected true or false, got 1"),
        ({"named": [1]}, "named: expected an object"),
        ({"other": 1}, "unknown field 'other'"),
    ],
)
def test_json_of_other_types_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PmvitError, match=f"^a file: {message}"):
        config_from(Outer, {**OUTER, **change}, "a file")
