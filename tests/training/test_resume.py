"""A run that is killed and resumed ends as one that was not."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("killed")
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.training.killed_runs", str(folder)]
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}  # threads that wait do not take time from the workers
    result = subprocess.run(
        command, cwd=root, capture_output=True, text=True, check=False, timeout=600, env=environment
    )
    assert result.returncode == 0, result.stderr
    report: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    assert report.pop("whole") == 0, result.stderr
    return report


@pytest.mark.parametrize("turn", range(2))
def test_killed_runs_end_bit_identical(report: dict[str, Any], turn: int) -> None:
    run = report[f"SIGKILL {turn}"]
    assert run["codes"] == [-9, -9, -9]
    assert run["final"] == 0
    assert all(run["same"].values()), run
    assert run["steps"] == 16


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_stopped_runs_checkpoint_and_end_bit_identical(report: dict[str, Any], name: str) -> None:
    run = report[f"{name} 0"]
    assert set(run["codes"]) == {3}, run  # stopped cleanly, each time
    assert run["final"] == 0
    assert all(run["same"].values()), run
