"""Loader processes: build windows ahead of need; a process that dies or hangs causes an error, not an endless wait.

Windows are built by request and sent as flat arrays, so that any process can build any of them and none has state.
docs/architecture.md says why each has a socket of its own, and why they are not those of torch's DataLoader.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize

from dist_transformer.data.loader.window import Window, WindowBuilder
from dist_transformer.data.loader.window_request import WindowRequest
from dist_transformer.errors import MachineError, UserError
from dist_transformer.processes.stop_request import STOPPED_SECONDS, end_with_parent, ignore_stop_signals

STACKS_SIGNAL = signal.SIGRTMIN + 1
"""Signal on which a loader process prints its stacks."""
STACKS_SECONDS = 1.0
EXIT_SECONDS = 10.0
"""Time limit for the exit code of a process whose socket has ended."""
EXIT_OF_EXCEPTION = 1

Built = tuple[WindowRequest, Window | UserError]
"""A window, or the error that prevented it, which is raised only when the window is needed."""


@dataclass(frozen=True)
class LoaderSettings:
    """Settings of the loader of a rank.

    Attributes:
        bos_id: first token of every decoder input.
        num_workers: loader processes; 0 builds windows in this process.
        stall_seconds: time limit for a window, after which it is an error.
    """

    bos_id: int
    num_workers: int
    stall_seconds: float


class WindowStream:
    """Windows by request, built by `num_workers` processes once requested; without processes, when they are taken.
    Raises MachineError: the processes cannot be started.

    `here`: requests that are built in this process when they are taken, without `ask`.
    """

    def __init__(self, builder: WindowBuilder, here: set[WindowRequest], settings: LoaderSettings) -> None:
        self._builder, self._here, self._settings = builder, here, settings
        self._early: dict[WindowRequest, Window | UserError] = {}
        self._processes = _start(builder, settings.num_workers)
        # Also at the end of the program, before multiprocessing waits for its children, which ignore its TERM.
        Finalize(self, _kill, (self._processes,), exitpriority=10)
        self._asked: deque[_LoaderProcess] = deque()
        self._stale = 0

    def ask(self, request: WindowRequest) -> None:
        """Requests a window; it is kept until it is taken."""
        if self._processes:
            process = min(self._processes, key=self._asked.count)
            process.ask(request)
            self._asked.append(process)

    def restart(self) -> None:
        """Discards all requests so far; from now on all windows are built by the processes."""
        self._stale = len(self._asked)
        self._early, self._here = {}, set()

    def take(self, request: WindowRequest) -> Window:
        """Returns the window of a request that was passed to `ask`. Raises UserError: it cannot be read; MachineError: it
        does not arrive in time, or a process was killed."""
        if not self._processes or request in self._here:
            self._here.discard(request)
            return self._builder.build(request)
        seconds = self._settings.stall_seconds
        while request not in self._early:
            seconds = self._receive(request, seconds)
        window = self._early.pop(request)
        if isinstance(window, UserError):
            raise window
        return window

    def _receive(self, awaited: WindowRequest, seconds: float) -> float:
        """Receives a window within these seconds, and returns the rest of them. The time of a suspension does not count."""
        process, pause, now = self._asked[0], min(1.0, seconds), time.monotonic()
        try:
            request, window = process.next_built(pause)
        except queue.Empty:
            if (seconds := seconds - pause * (time.monotonic() - now - pause < STOPPED_SECONDS)) > 0:
                return seconds
            _print_stacks(self._processes)
            _kill(self._processes)  # one that was stopped would outlive this process, and its server with it
            raise MachineError(
                f"no window within {self._settings.stall_seconds:g} s, half of training.hang_seconds (waiting for "
                f"{awaited.key}): the disk or the loader process hangs; where its threads stand is printed above. Look at "
                "the filesystem of the data, or raise training.hang_seconds"
            ) from None
        self._asked.popleft()
        if self._stale:
            self._stale -= 1
        else:
            self._early[request] = window
        return seconds


class _LoaderProcess:
    """A process that builds windows, and the thread in this process that receives them."""

    def __init__(self, builder: WindowBuilder) -> None:
        context = multiprocessing.get_context("forkserver")  # fork breaks pyarrow's threads
        self._socket, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(builder, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._arrived: queue.SimpleQueue[Built | None] = queue.SimpleQueue()
        threading.Thread(target=_receive_all, args=(self._socket, self._arrived), daemon=True).start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def ask(self, request: WindowRequest) -> None:
        with contextlib.suppress(OSError):  # it has ended: `next_built` raises the error
            self._socket.send(request)

    def next_built(self, seconds: float) -> Built:
        """Returns its next result; queue.Empty if that does not arrive within these seconds. Raises MachineError: the
        process was killed."""
        if (built := self._arrived.get(timeout=seconds)) is None:
            raise self._ended()
        return built

    def kill(self) -> None:
        self._process.kill()

    def _ended(self) -> Exception:
        self._process.join(EXIT_SECONDS)
        code = self._process.exitcode
        if code == EXIT_OF_EXCEPTION:
            return RuntimeError(f"loader process {self.pid} failed; its traceback is printed above")
        how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"is silent (exit code {code})"
        return MachineError(
            f"loader process {self.pid} {how}, perhaps for want of memory; lower data.window_rows or data.loader_workers"
        )


def _start(builder: WindowBuilder, count: int) -> list[_LoaderProcess]:
    processes: list[_LoaderProcess] = []
    try:
        for _ in range(count):
            processes.append(_LoaderProcess(builder))
    except OSError as error:
        _kill(processes)
        raise MachineError(
            f"the loader processes cannot be started ({error}). Is the folder for temporary files full, or a limit on "
            "processes or open files reached (ulimit -a)? Fix that, or set data.loader_workers=0"
        ) from error
    return processes


def _kill(processes: Sequence[_LoaderProcess]) -> None:
    for process in processes:
        process.kill()


def _receive_all(socket: Connection, arrived: "queue.SimpleQueue[Built | None]") -> None:
    """Puts the received windows into the queue, then None at the end, which may come in the middle of a window."""
    with contextlib.suppress(EOFError, OSError, MemoryError):
        while True:
            arrived.put(socket.recv())
    arrived.put(None)


def _serve(builder: WindowBuilder, socket: Connection) -> None:
    """Main function of a loader process: builds the requested windows until its trainer ends."""
    ignore_stop_signals()
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    end_with_parent()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            request: WindowRequest = socket.recv()
            try:
                built: Window | UserError = builder.build(request)
            except UserError as error:
                built = error
            socket.send((request, built))
            del built  # else it would be held beside the next one


def _print_stacks(processes: Sequence[_LoaderProcess]) -> None:
    """Makes each loader process print its stacks to stderr, and waits for it."""
    for process in processes:
        print(f"loader process {process.pid} does not deliver; its threads:", file=sys.stderr, flush=True)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, STACKS_SIGNAL)
        time.sleep(STACKS_SECONDS)
