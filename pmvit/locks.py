"""One writer a folder: a second one stops before it writes anything.

The system holds the lock for the process and takes it back when the process ends, however that is: what a killed run
leaves behind locks nothing.
"""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from pmvit.errors import PmvitError
from pmvit.files import check_writable

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

FILE = ".pmvit.lock"
_writers: dict[Path, tuple[int, int]] = {}  # by lock file: the process and thread that write there


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is made if need be. A thread that holds it already may enter again.

    Raises:
        PmvitError: If another process, or another thread of this one, writes there.
    """
    path, me = folder.resolve() / FILE, (os.getpid(), threading.get_ident())
    if _writers.get(path) == me:
        yield
        return
    check_writable(path)
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    file = _locked(path)
    _writers[path] = me
    try:
        file.write(str(os.getpid()))
        file.flush()
        yield
    finally:
        del _writers[path]
        with suppress(OSError):  # Windows removes no file that is open
            path.unlink()
        file.close()
        if is_new:
            with suppress(OSError):  # something came of it
                folder.rmdir()


def _locked(path: Path) -> IO[str]:
    """The lock file, open and locked."""
    while True:
        other = _writers.get(path, (0, 0))
        if other[0] == os.getpid():  # a second handle would not meet the lock of the first, and would end it
            raise _busy(path, "another thread of this process")
        file = path.open("a+", encoding="utf-8")
        try:
            if sys.platform == "win32":
                msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
            else:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of this process: one that it forks does not hold it
        except (BlockingIOError, PermissionError):
            file.seek(0)
            number = file.read(20) or "it has not said which"
            file.close()
            raise _busy(path, f"another process ({number})") from None
        except OSError:
            pass  # a file system without locks: as good as it gets
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            file.truncate(0)
            return file
        file.close()  # who had it before removed the file meanwhile


def _busy(path: Path, who: str) -> PmvitError:
    return PmvitError(f"{who} is writing to {path.parent}: wait until it is done, or choose another folder")
