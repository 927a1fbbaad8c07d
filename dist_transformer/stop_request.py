"""A stop request: a signal or a file that says "save and stop"; the loop asks for it at each step boundary.

Handlers only note the request: saving inside a handler can tear a file or deadlock a collective. Slurm sends the
signals to every process of a job step, so helper processes call `ignore_stop_signals` and leave the answer to the loop.
"""

import os
import signal
from pathlib import Path
from types import FrameType

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Notes the first stop signal. A second Ctrl-C ends the process at once (the last checkpoint stays whole)."""

    def __init__(self, stop_file: Path) -> None:
        self._stop_file = stop_file
        self._signal: signal.Signals | None = None

    def listen(self) -> None:
        """Installs the handlers; call in the main thread."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)

    def reason(self) -> str | None:
        """Why to stop ("signal SIGTERM", "file .../stop"), or None."""
        if self._signal is not None:
            return f"signal {self._signal.name}"
        if self._stop_file.exists():
            return f"file {self._stop_file}"
        return None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None and number == signal.SIGINT:
            os._exit(130)
        self._signal = self._signal or signal.Signals(number)


def ignore_stop_signals() -> None:
    """For loader workers and other helpers: the training process decides when they end."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
