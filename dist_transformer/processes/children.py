"""Child processes of this process, and the signals that it forwards to them."""

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
from dist_transformer.processes.stop_request import LAUNCHER_VARIABLE, STOP_SIGNALS, leave

# HUP, of a closed terminal, goes on as TERM: the ranks, in sessions of their own, would not receive it.
_FORWARDED_AS = {number: number for number in STOP_SIGNALS} | {signal.SIGHUP: signal.SIGTERM}


@dataclass
class Signals:
    """The signals that this process forwards.

    Attributes:
        came: all received so far, in their order.
        processes: the processes that receive them.
        started: Unix seconds at which forwarding began.
    """

    came: list[int] = field(default_factory=list)
    processes: list["Process"] = field(default_factory=list)
    started: float = field(default_factory=time.time)

    def add(self, start: Callable[[], "Process"], is_held: bool) -> None:
        """Starts one more process, which also receives the signals that came before; `is_held`: it starts with them blocked,
        and unblocks them itself (`StopRequest.listen`). Raises MachineError: no process can be started."""
        try:
            with holding_signals() if is_held else nullcontext():
                process = start()
                with holding_signals():
                    self.processes.append(process)
                    for number in self.came:
                        process.send_signal(_FORWARDED_AS[signal.Signals(number)])
        except OSError as error:
            which = f"process {len(self.processes) + 1} of this machine"
            look = "look at `ulimit -a`, at the memory and at the number of processes"
            raise MachineError(f"{which} cannot be started: {error}; {look}") from error


class Forked:
    """A process forked from this one, which runs `work` and ends as a program does, with the exit code of SystemExit.

    It has a session of its own. Used as a `subprocess.Popen`; only the main thread may call `poll`.
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
        """Returns the exit code, -N after signal N; None while it runs."""
        with suppress(ChildProcessError):  # the handler of a signal has polled meanwhile
            pid, status = (0, 0) if self.returncode is not None else os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self) -> None:
        """Waits until it has ended. Its pid is not reused until `poll`: a signal can reach no other process."""
        with suppress(ChildProcessError):  # it was polled
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


Process = subprocess.Popen[bytes] | Forked


def kill(processes: list[Process]) -> None:
    """Kills the processes that still run, with their own helpers."""
    for process in processes:
        if process.poll() is None:
            for end in (os.killpg, os.kill):  # a fork that has not created its own session yet has no group
                with suppress(ProcessLookupError):
                    end(process.pid, signal.SIGKILL)


@contextmanager
def forwarding_signals() -> Iterator[Signals]:
    """Forwards, while the block lasts, all stop signals of this process to its children. Call it in the main thread."""
    signals = Signals()

    def forward(number: int, frame: FrameType | None) -> None:
        signals.came.append(number)
        for process in signals.processes:
            process.send_signal(_FORWARDED_AS[signal.Signals(number)])

    # A signal that is ignored (HUP under nohup) stays ignored.
    heard = [number for number in _FORWARDED_AS if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, forward) for number in heard}
    # Where SIGCHLD is ignored, which children inherit from a parent, exit codes are lost.
    previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield signals
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def holding_signals() -> Iterator[None]:
    """Blocks the forwarded signals while the block lasts; those that come meanwhile are delivered at its end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED_AS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work_and_leave(work: Callable[[], object]) -> NoReturn:
    """Runs `work` in a fork and exits. No code of the parent may run on in it: no `finally`, no end of its `with`s."""
    code = EXIT_FAILED
    try:
        os.setsid()  # Ctrl-C would else reach it from the terminal too, and count twice
        work()
        code = EXIT_DONE
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else EXIT_DONE if end.code is None else EXIT_FAILED
    except BaseException:  # noqa: BLE001  (as the interpreter does at its end)
        traceback.print_exc()
    finally:
        leave(code)
