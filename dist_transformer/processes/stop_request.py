"""A stop request: a signal, a file or a time limit that says "save and stop"; the loop asks for it at each step boundary.

Handlers only note the request: saving inside a handler can tear a file or deadlock a collective. Slurm sends the
signals to every process of a job step, so helper processes ignore them and leave the answer to the training process.
"""

import ctypes
import math
import multiprocessing.forkserver
import multiprocessing.process
import multiprocessing.resource_tracker
import os
import select
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from dist_transformer.errors import EXIT_FAILED
from dist_transformer.files import modified

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
END_TIME_VARIABLE = "DIST_TRANSFORMER_END_TIME"
"""Unix seconds at which to save, because the Slurm job ends soon; set by launch/slurm_task.sh."""
STARTED_VARIABLE = "DIST_TRANSFORMER_STARTED"
"""Unix seconds of the start of the command that started this process as one of its ranks."""
LAUNCHER_VARIABLE = "DIST_TRANSFORMER_LAUNCHER"
"""The process that started this one as one of its ranks, and passes its signals on."""
PR_SET_PDEATHSIG = 1
"""Of prctl(2)."""


class StopRequest:
    """Notes the first stop signal, and ends the process at once, with code 128 + number, when a person insists.

    That is the same signal again, 0.5 to 10 seconds after the first. Sooner it is no second wish: terminals, launchers
    and Slurm deliver one request twice within milliseconds. Later it is Slurm repeating itself while a save is on its
    way. And another signal (USR1 before the time limit, then TERM) must not cost the save. The end harms no checkpoint:
    of one being written only a folder `.tmp` stays, which the next start clears.

    Args:
        repeat_seconds: the shortest and the longest time between two signals that end the process.
        answer: what the process does on a request, as a person is told.
    """

    def __init__(
        self, repeat_seconds: tuple[float, float] = (0.5, 10.0), answer: str = "saving at the end of this step"
    ) -> None:
        self.started = float(os.environ.get(STARTED_VARIABLE) or time.time())
        """Unix seconds of the start of this command, as far as it matters for time limits."""
        self._repeat_seconds = repeat_seconds
        self._answer = answer
        self._signal: signal.Signals | None = None
        self._came_at: dict[int, float] = {}
        self._stop_file: Path | None = None
        self._ends: list[tuple[float, str]] = []

    def listen(self) -> None:
        """Installs the handlers; call in the main thread, as early as possible. A SIGHUP that nohup ignores stays so.

        The process that loader workers are forked from is started while the signals are held back: it never gets any.
        Those that a launcher has held back until now are heard, and the end of that launcher is a SIGUSR2.
        """
        is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._watch_repeats, args=(reader,), name="signals", daemon=True).start()
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or not is_ignored:
                signal.signal(number, self._note)
        if launcher := os.environ.pop(LAUNCHER_VARIABLE, None):
            _hear_of_the_end_of(int(launcher))
        for start_helper in (
            multiprocessing.resource_tracker.ensure_running,
            multiprocessing.forkserver.ensure_running,
        ):
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # each time: the first lets some through at its end
            start_helper()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        if (end := _end_time(os.environ.get(END_TIME_VARIABLE, ""))) is not None:
            self.end_at(end, "end of the Slurm job")

    def end_at(self, unix_seconds: float, why: str = "time limit of training.max_hours") -> None:
        """From this time on there is a request, with `why` as its reason."""
        self._ends.append((unix_seconds, why))

    def watch_file(self, stop_file: Path) -> None:
        """Takes this file as a request too, from now on. One from before this process started was answered and is
        removed, unless DIST_TRANSFORMER_KEEP_STOP is set: a batch job may have been asked while it waited.
        """
        is_kept = "DIST_TRANSFORMER_KEEP_STOP" in os.environ
        with suppress(FileNotFoundError):
            if not is_kept and modified(stop_file) < self.started:
                stop_file.unlink()
        self._stop_file = stop_file

    def reason(self) -> str | None:
        """Why to stop ("signal SIGTERM", "file .../stop", "end of the Slurm job"), or None."""
        if self._signal is not None:
            return f"signal {self._signal.name}"
        with suppress(OSError):  # a disk that is away asks for nothing
            if self._stop_file is not None and self._stop_file.exists():
                return f"file {self._stop_file}"
        now = time.time()
        return next((why for end, why in sorted(self._ends) if now >= end), None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signal = self._signal or signal.Signals(number)

    def _watch_repeats(self, reader: int) -> None:
        """In a thread: Python runs a handler only between two steps of the main thread, which may hang in a collective."""
        while numbers := os.read(reader, 64):
            for number in numbers:
                if signal.getsignal(number) == self._note:  # not: one that was taken over by somebody else
                    self._end_if_repeated(number, time.monotonic())

    def _end_if_repeated(self, number: int, now: float) -> None:
        shortest, longest = self._repeat_seconds
        passed = now - self._came_at.get(number, -math.inf)
        name = signal.Signals(number).name
        if shortest <= passed <= longest:
            _say(f"{name} again: ended at once; what was saved before is untouched")
            os._exit(128 + number)
        if passed > longest:
            self._came_at[number] = now
            _say(f"{name}: {self._answer}; the same signal again within {longest:g} seconds ends at once")


def leave(code: int) -> NoReturn:
    """Ends this process at once, whatever hangs in it: all that is to be kept has been written and closed."""
    folder = multiprocessing.process.current_process()._config.get("tempdir")  # type: ignore[attr-defined]
    if folder is not None:  # of the sockets that helpers are asked through; Python's own end would remove it
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(code)


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


def _hear_of_the_end_of(launcher: int) -> None:
    """Linux only: elsewhere ranks outlive a launcher that is killed, until they miss each other."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGUSR2)
        if os.getppid() != launcher:  # it ended before
            signal.raise_signal(signal.SIGUSR2)


def _say(line: str) -> None:
    """On stderr, where a person looks: of several ranks the first. Never waits, since an end must not hang on a full pipe."""
    if os.environ.get("RANK", "0") != "0":
        return
    with suppress(OSError):  # no stderr
        if select.select([], [2], [], 0)[1]:
            start = "\n" if os.isatty(2) else ""  # below the progress bar
            os.write(2, f"{start}{line}\n".encode())


def _end_time(value: str) -> float | None:
    """Slurm's end of the job; None where it gave none, or not a time."""
    try:
        end = float(value)
    except ValueError:
        return None
    return end if math.isfinite(end) and end > 0 else None
