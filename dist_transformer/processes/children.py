"""Processes that this one starts to work for it, and the signals that it passes on to them."""

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import NoReturn

from dist_transformer.errors import EXIT_DONE, EXIT_FAILED, MachineError
from dist_transformer.processes.stop_request import LAUNCHER_VARIABLE, leave

_FORWARDED_AS = {
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGUSR2: signal.SIGUSR2,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGINT: signal.SIGINT,
    # A closed terminal; the ranks, in sessions of their own, would not hear of it.
    signal.SIGHUP: signal.SIGTERM,
}


@dataclass
class Signals:
    """Those that this process passes on.

    Attributes:
        came: all so far, in their order.
        processes: who gets them.
        started: Unix seconds since when.
    """

    came: list[int] = field(default_factory=list)
    processes: list["Process"] = field(default_factory=list)
    started: float = field(default_factory=time.time)

    def add(self, start: Callable[[], "Process"], is_held: bool) -> None:
        """Starts one more, which gets what came before, too.

        Args:
            is_held: it is born with the signals held back, and listens (`StopRequest.listen`) when it can.

        Raises:
            MachineError: no process can be started.
        """
        try:
            with holding_signals() if is_held else nullcontext():
                process = start()
                with holding_signals():
                    self.processes.append(process)
                    for number in self.came:
                        process.send_signal(_FORWARDED_AS[signal.Signals(number)])
        except OSError as error:
            raise MachineError(
                f"process {len(self.processes) + 1} of this machine cannot be started: {error}; look at `ulimit -a`, at "
                "the memory and at the number of processes"
            ) from error


class Forked:
    """A process forked from this one, which runs `work` and ends as a program does, with its SystemExit for an exit code.

    It has a session of its own. To be used as a `subprocess.Popen`, with `poll` for the main thread alone.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.returncode: int | None = None
        launcher = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            os.environ[LAUNCHER_VARIABLE] = str(launcher)
            _work_and_leave(work)

    def poll(self) -> int | None:
        """The exit code, -N after signal N; None while it runs."""
        with suppress(ChildProcessError):  # a signal's handler has asked meanwhile
            pid, status = (0, 0) if self.returncode is not None else os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self) -> None:
        """Until it has ended. Its number stays its own until `poll`: a signal can reach no other process."""
        with suppress(ChildProcessError):  # it was polled
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


Process = subprocess.Popen[bytes] | Forked


def kill(processes: list[Process]) -> None:
    """Ends those that still run, with their own helpers."""
    for process in processes:
        if process.poll() is None:
            for end in (os.killpg, os.kill):  # a fork that has not come to its own session has no group yet
                with suppress(ProcessLookupError):
                    end(process.pid, signal.SIGKILL)


@contextmanager
def forwarding_signals() -> Iterator[Signals]:
    """From now on this process has no stop signals of its own: they are for those that it starts. In the main thread."""
    signals = Signals()

    def forward(number: int, frame: FrameType | None) -> None:
        signals.came.append(number)
        for process in signals.processes:
            process.send_signal(_FORWARDED_AS[signal.Signals(number)])

    # One that is ignored (HUP under nohup) stays ignored.
    heard = [number for number in _FORWARDED_AS if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, forward) for number in heard}
    # Where it is ignored, which a parent can leave to its children, exit codes are lost.
    previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield signals
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def holding_signals() -> Iterator[None]:
    """Those that come meanwhile come at its end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED_AS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work_and_leave(work: Callable[[], object]) -> NoReturn:
    """Nothing of the process that it was forked from may run on in it: no `finally`, no end of its `with`s."""
    code = EXIT_FAILED
    try:
        os.setsid()  # Ctrl-C would else reach it from the terminal too, and count twice
        work()
        code = EXIT_DONE
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else EXIT_DONE if end.code is None else EXIT_FAILED
    except BaseException:  # noqa: BLE001  (what the interpreter does with one at its end)
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        leave(code)
