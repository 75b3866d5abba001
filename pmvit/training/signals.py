"""Ctrl-C and SIGTERM as a wish: the step in hand is finished, a checkpoint written, then the run ends."""

import signal
import threading
import time
from types import FrameType
from typing import Any

from pmvit.errors import PmvitError

WATCHED = (signal.SIGINT, signal.SIGTERM)
SAME_SIGNAL = 2.0  # seconds


class StoppedError(PmvitError):
    """The run was asked to stop; what it has done so far is in its last checkpoint."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number


class StopSignals:
    """While active, SIGINT and SIGTERM are only noted; Ctrl-C a second time, later than the first, stops at once.

    Launchers tend to pass on a signal that their processes got already: what comes right after it counts as the same.
    """

    def __init__(self) -> None:
        self.received: int = 0
        self._at = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in WATCHED:
                if signal.getsignal(number) is not signal.SIG_IGN:  # which a background job does
                    self._before[number] = signal.signal(number, self._note)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if not self.received:
            self.received, self._at = number, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._at > SAME_SIGNAL:
            raise KeyboardInterrupt

    def __exit__(self, *_error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
