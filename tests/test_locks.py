"""One writer a folder: the second stops with one line, and what was killed locks nothing."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pmvit.errors import PmvitError
from pmvit.locks import FILE, only_writer

HOLD = """
import os, sys, time
from pathlib import Path
from pmvit.locks import only_writer
with only_writer(Path(sys.argv[1])):
    if os.fork() == 0:  # as a process that reads images, which lives on for a while when its parent is killed
        time.sleep(60)
        os._exit(0)
    print("here", flush=True)
    time.sleep(60)
"""
TRY = """
import sys
from pathlib import Path
from pmvit.locks import only_writer
with only_writer(Path(sys.argv[1])):
    pass
"""


def test_nothing_is_left_and_the_writer_may_nest(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "out"
    with only_writer(folder), only_writer(folder):
        assert (folder / FILE).read_text() == str(os.getpid())
    assert not folder.exists()
    with only_writer(folder):
        (folder / "model").touch()
    assert [path.name for path in folder.iterdir()] == ["model"]


def test_a_second_thread_is_refused_and_the_first_keeps_its_lock(tmp_path: Path) -> None:
    said: list[str] = []

    def write() -> None:
        try:
            with only_writer(tmp_path):
                said.append("wrote")
        except PmvitError as error:
            said.append(str(error))

    with only_writer(tmp_path):
        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
        assert "another thread of this process is writing to" in said[0]
        assert try_elsewhere(tmp_path) == 1
    assert try_elsewhere(tmp_path) == 0


def try_elsewhere(folder: Path) -> int:
    return subprocess.run([sys.executable, "-c", TRY, folder], capture_output=True, check=False).returncode


@contextmanager
def held_elsewhere(folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """Another process, which writes to the folder."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "here\n"
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    with held_elsewhere(tmp_path) as first:
        refused = pytest.raises(PmvitError, match=rf"another process \({first.pid}\) is writing to .*another folder")
        with refused, only_writer(tmp_path):
            pass
        first.kill()
        first.wait()
        assert (tmp_path / FILE).exists()
        with only_writer(tmp_path):  # although what the first one started still runs
            pass
        assert not (tmp_path / FILE).exists()
