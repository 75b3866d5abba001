"""Ctrl-C and SIGTERM as a wish: the step in hand is finished, a checkpoint written, then the run ends."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from pmvit.errors import PmvitError

WATCHED = (signal.SIGINT, signal.SIGTERM)


class StoppedError(PmvitError):
    """The run was asked to stop; what it has done so far is in its last checkpoint."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number


class StopSignals:
    """While active, the first SIGINT or SIGTERM is only noted; a second one acts as it always does."""

    def __init__(self) -> None:
        self.received: int = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in WATCHED:
                if (
                    signal.getsignal(number) is not signal.SIG_IGN
                ):  # as in a background job, which Ctrl-C is not meant for
                    self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()
