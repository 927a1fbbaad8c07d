"""A stop request: a signal, a file or a time limit that means "save and stop", checked by the loop after each step.

Handlers only record the request: saving inside a handler can tear a file or deadlock a collective. Slurm sends the
signals to every process of a job step, so helper processes ignore them and leave the answer to the training process.
"""

import ctypes
import math
import multiprocessing.forkserver
import multiprocessing.process
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from dist_transformer.errors import EXIT_FAILED
from dist_transformer.files import modified

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
STARTED_VARIABLE = "DIST_TRANSFORMER_STARTED"
"""Unix seconds of the start of the command that started this process as one of its ranks."""
LAUNCHER_VARIABLE = "DIST_TRANSFORMER_LAUNCHER"
"""Pid of the process that started this one as one of its ranks, and forwards its signals."""
REPEAT_SECONDS = (0.5, 10.0)
"""The shortest and the longest time between two signals that end the process."""
STOPPED_SECONDS = 5.0
"""Excess of a pause from which on the whole process was stopped meanwhile, as by `scontrol suspend`."""
PR_SET_PDEATHSIG = 1
"""Option of prctl(2): the signal that a process receives at the end of its parent."""


class StopRequest:
    """Records the first stop signal, and ends the process at once, with code 128 + number, when a user repeats it.

    A repetition is the same signal within REPEAT_SECONDS of the first. An earlier one is no second request: terminals,
    launchers and Slurm deliver one request twice within milliseconds. A later one is Slurm repeating itself during a
    save. Another signal (USR1 before the time limit, then TERM) must not cost the save. The immediate end harms no
    checkpoint: one being written leaves only a folder `.tmp`, which the next start removes.

    `answer`: reaction of the process to a request, as printed for the user.
    """

    def __init__(self, answer: str = "saving at the end of this step") -> None:
        self.started = float(os.environ.get(STARTED_VARIABLE) or time.time())
        """Unix seconds of the start of this command."""
        self._began = time.monotonic() - (time.time() - self.started)
        self._answer = answer
        self._signal: signal.Signals | None = None
        self._came_at: dict[int, float] = {}
        self._stop_file: Path | None = None
        self._ends: list[tuple[float, str]] = []

    def listen(self) -> None:
        """Installs the handlers; call in the main thread, as early as possible. A SIGHUP that nohup ignores stays so.

        The process that loader workers are forked from is started while signals are blocked: it never receives any.
        Signals that a launcher has blocked until now are delivered, and the end of that launcher is a SIGUSR2.
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
            signal_at_the_end_of(int(launcher))
        if len(os.fsencode(theirs := tempfile.gettempdir())) > 75:  # and 32 below it: the longest address of a socket
            tempfile.tempdir = "/tmp"
            multiprocessing.util.get_temp_dir()  # of their sockets, made now; `leave` and a normal exit remove it
            tempfile.tempdir = theirs
        for helper in (multiprocessing.resource_tracker, multiprocessing.forkserver):
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # each time: the first start unblocks some
            helper.ensure_running()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def end_after(self, seconds: float, why: str = "time limit of training.max_hours") -> None:
        """Requests a stop so long after the start of this command, whatever the clock is set to; `why`: its reason."""
        self._ends.append((self._began + seconds, why))

    def watch_file(self, stop_file: Path) -> None:
        """Treats the existence of this file as a request. A file from before the start of this process was answered and
        is removed, unless DIST_TRANSFORMER_KEEP_STOP is set: a batch job may have been asked to stop while it waited.
        """
        is_kept = "DIST_TRANSFORMER_KEEP_STOP" in os.environ
        with suppress(FileNotFoundError):
            if not is_kept and modified(stop_file) < self.started:
                stop_file.unlink()
        self._stop_file = stop_file

    def reason(self) -> str | None:
        """Returns the reason to stop ("signal SIGTERM", "file .../stop", "time limit of ..."), or None."""
        if self._signal is not None:
            return f"signal {self._signal.name}"
        with suppress(OSError):  # a disk that is away requests nothing
            if self._stop_file is not None and self._stop_file.exists():
                return f"file {self._stop_file}"
        return next((why for end, why in sorted(self._ends) if time.monotonic() >= end), None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signal = self._signal or signal.Signals(number)

    def _watch_repeats(self, reader: int) -> None:
        """Ends the process on a repetition. Runs in a thread: handlers run in the main thread, which may hang."""
        while numbers := os.read(reader, 64):
            for number in numbers:
                if signal.getsignal(number) == self._note:  # else other code has replaced the handler
                    self._end_if_repeated(number, time.monotonic())

    def _end_if_repeated(self, number: int, now: float) -> None:
        shortest, longest = REPEAT_SECONDS
        passed = now - self._came_at.get(number, -math.inf)
        name = signal.Signals(number).name
        if shortest <= passed <= longest:
            _say(f"{name} again: ended at once; what was saved before is untouched")
            os._exit(128 + number)
        if passed > longest:
            self._came_at[number] = now
            _say(f"{name}: {self._answer}; the same signal again within {longest:g} seconds ends at once")


def leave(code: int) -> NoReturn:
    """Ends this process at once, whatever hangs in it: all files to be kept have been written and closed."""
    folder = multiprocessing.process.current_process()._config.get("tempdir")  # type: ignore[attr-defined]
    if folder is not None:  # holds the sockets of helper processes; a normal exit of Python would remove it
        shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def ignore_stop_signals() -> None:
    """Ignores stop signals in loader workers and other helpers: the training process decides when they end."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def end_with_parent() -> None:
    """Makes this child process end, whatever it is doing, as soon as the process that started it has ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end() -> None:
        parent.join()
        os._exit(EXIT_FAILED)

    threading.Thread(target=end, daemon=True).start()


def signal_at_the_end_of(launcher: int) -> None:
    """Sends this process SIGUSR2 at the end of its launcher. Linux only: elsewhere ranks outlive a launcher that is
    killed, until a collective fails."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGUSR2)
        if os.getppid() != launcher:  # it ended before
            signal.raise_signal(signal.SIGUSR2)


def _say(line: str) -> None:
    """Prints on stderr, on rank 0 only. Never waits, since the end of the process must not hang on a full pipe."""
    if os.environ.get("RANK", "0") != "0":
        return
    with suppress(OSError):  # no stderr
        if select.select([], [2], [], 0)[1]:
            start = "\n" if os.isatty(2) else ""  # below the progress bar
            os.write(2, f"{start}{line}\n".encode())
