"""A run from somebody else: what it names is not run, and not fetched before the user names it, too."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pmvit.cli.resuming import resumed
from pmvit.training.record import RunRecord
from tests.helpers import pmvit_here
from tests.saving.test_strangers import FIXTURES, refusal


def run_of(folder: Path, **command: Any) -> Path:
    """A run whose record names something else than it did."""
    shutil.copytree(FIXTURES / "finetune", folder)
    record = json.loads((folder / "finetune.json").read_text(encoding="utf-8"))
    record["command"].update(command)
    (folder / "finetune.json").write_text(json.dumps(record), encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", ["data", "val"])
@pytest.mark.parametrize(
    "value",
    [
        "pipe:touch ran",
        "PIPE:touch ran",
        "a.tar::pipe:touch ran.tar",
        "{pipe,x}:touch ran.tar",
        "https://x/a.tar::pipe:touch ran",
        "gs://bucket/a.tar",
        "ais://bucket/a.tar",
        "file:/etc/passwd",
    ],
)
def test_a_run_whose_data_is_a_command_is_not_resumed(name: str, value: str, tmp_path: Path) -> None:
    folder = run_of(tmp_path / "run", **{name: value})
    given: dict[str, Any]
    for given in ({}, {name: value}):
        assert "which a file may not name" in refusal(partial(resumed, folder, given))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("data", "hf:owner/name@train"),
        ("val", "hf-stream:owner/name"),
        ("data", "https://host:8080/train-{000..146}.tar"),
        ("model", "hf:owner/name"),
        ("model", "hf-hub:owner/name"),
        ("teacher", "local-dir:/somewhere"),
        ("model_arg", ["checkpoint_path=code.pt"]),
    ],
)
def test_what_a_run_would_fetch_has_to_be_named_by_the_user(name: str, value: Any, tmp_path: Path) -> None:
    folder = run_of(tmp_path / "run", **{name: value})
    assert "say so: pmvit finetune" in refusal(lambda: resumed(folder, {}))
    other = ["other=1"] if name == "model_arg" else "other"
    assert "resume it as it was" in refusal(lambda: resumed(folder, {name: other}))
    command, config = resumed(folder, {name: tuple(value) if isinstance(value, list) else value})
    assert command[name] == value
    assert config == RunRecord.read(folder).config


def test_a_run_is_resumed_as_it_is_from_the_command_line(tmp_path: Path) -> None:
    folder = run_of(tmp_path / "run", data=f"pipe:touch {tmp_path}/ran")
    result = pmvit_here("finetune", "--resume", folder)
    assert result.returncode != 0
    assert "which a file may not name" in result.stderr
    assert not (tmp_path / "ran").exists()
    folder = run_of(tmp_path / "other", data="hf:owner/name")
    result = pmvit_here("finetune", "--resume", folder, "--data", "hf:owner/other")
    assert "was started with hf:owner/name, not hf:owner/other" in " ".join(result.stderr.split())
