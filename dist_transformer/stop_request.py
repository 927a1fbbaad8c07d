"""A stop request: a signal or a file that says "save and stop"; the loop asks for it at each step boundary.

Handlers only note the request: saving inside a handler can tear a file or deadlock a collective. Slurm sends the
signals to every process of a job step, so helper processes ignore them and leave the answer to the training process.
"""

import multiprocessing.forkserver
import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType

from dist_transformer.errors import EXIT_FAILED

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopRequest:
    """Notes the first stop signal. A second Ctrl-C ends the process at once (the last checkpoint stays whole)."""

    def __init__(self) -> None:
        self._signal: signal.Signals | None = None
        self._stop_file: Path | None = None
        self._since = time.time()

    def listen(self) -> None:
        """Installs the handlers; call in the main thread, as early as possible. A SIGHUP that nohup ignores stays so.

        The process that loader workers are forked from is started first, with the signals ignored: they inherit that.
        """
        is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        ignore_stop_signals()
        multiprocessing.forkserver.ensure_running()
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or not is_ignored:
                signal.signal(number, self._note)

    def watch_file(self, stop_file: Path) -> None:
        """Takes this file as a request too, from now on. One from before this process started was answered and is
        removed, unless DIST_TRANSFORMER_KEEP_STOP is set: a batch job may have been asked while it waited.
        """
        is_kept = "DIST_TRANSFORMER_KEEP_STOP" in os.environ
        if not is_kept and stop_file.exists() and stop_file.stat().st_mtime < self._since:
            stop_file.unlink(missing_ok=True)
        self._stop_file = stop_file

    def reason(self) -> str | None:
        """Why to stop ("signal SIGTERM", "file .../stop"), or None."""
        if self._signal is not None:
            return f"signal {self._signal.name}"
        if self._stop_file is not None and self._stop_file.exists():
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


def end_with_parent() -> None:
    """From now on this child process ends, whatever it is doing, as soon as the one that started it has ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end() -> None:
        parent.join()
        os._exit(EXIT_FAILED)

    threading.Thread(target=end, daemon=True).start()
