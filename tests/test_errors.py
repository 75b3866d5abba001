"""Errors of other libraries, in one line."""

import pytest

from pmvit.errors import first_line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("one\ntwo"), "one"),
        (ValueError("\n  after an empty line \n"), "after an empty line"),
        (ValueError(), "ValueError()"),
        (RuntimeError(" \n"), "RuntimeError(' \\n')"),
    ],
)
def test_the_first_line_says_something(error: Exception, line: str) -> None:
    assert first_line(error) == line
