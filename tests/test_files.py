"""JSON documents say what they are: those of older versions are read, those of newer ones refused."""

import json

import pytest

from pmvit.errors import PmvitError
from pmvit.files import parse_document


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
