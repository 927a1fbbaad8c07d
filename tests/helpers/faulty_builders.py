"""Window builders that go wrong, for tests of loader processes. Requests are told apart by the number of their window."""

import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from dist_transformer.data.loader import workers
from dist_transformer.data.loader.window import BatchShape, Window
from dist_transformer.data.loader.window_request import WindowKey, WindowRequest
from dist_transformer.data.loader.workers import LoaderSettings, WindowStream
from dist_transformer.errors import DataError, MachineError

WINDOW_TOKENS = 1_000_000
"""Far more than a pipe holds, as in real life: a process that is killed is in the middle of handing one over."""
PATIENT = LoaderSettings(bos_id=1, num_workers=1, stall_seconds=60)


@dataclass(frozen=True)
class FaultyBuilder:
    """Goes wrong in one window, of which it is all the same told that it begins."""

    bad_window: int
    fault: str

    def build(self, request: WindowRequest) -> Window:
        number = request.key.window
        if number == self.bad_window:
            getattr(self, self.fault)()
        ids = np.array([number], np.int64)
        return Window(request, (BatchShape(1, 1, 1, 1, 1, 1),), np.zeros(WINDOW_TOKENS, np.int32), ids, {}, ())

    def no_fault(self) -> None:
        """All is well."""

    def kill_itself(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def wait_for_a_dead_disk(self) -> None:
        threading.Event().wait()

    def divide_by_zero(self) -> None:
        self.bad_window // 0

    def meet_a_bad_row_group(self) -> None:
        raise DataError("train-00007.parquet: row group 3 cannot be read")


def request(number: int) -> WindowRequest:
    return WindowRequest(WindowKey(0, 0, 0, number), ())


def stream(builder: FaultyBuilder, order: Sequence[int] | None = None, settings: Any = PATIENT) -> WindowStream:
    """Windows from one loader process, asked for in this order, and then up to the 20th."""
    windows = WindowStream(builder, set(), settings)
    given = list(order or [])
    for number in (*given, *range(max(given, default=-1) + 1, 20)):
        windows.ask(request(number))
    return windows


def hang_in_window_one() -> None:
    """A program of its own: prints the error that a hanging loader process ends in, and its exit code, and leaves."""
    settings = SimpleNamespace(num_workers=1, stall_seconds=60)
    windows = stream(FaultyBuilder(1, "wait_for_a_dead_disk"), settings=settings)
    windows.take(request(0))  # the process has started
    settings.stall_seconds = 1
    try:
        windows.take(request(1))
    except MachineError as error:
        print(error)
    (process,) = windows._processes
    process._process.join(30)
    print("the loader process ended with", process._process.exitcode)
    sys.stdout.flush()
    os._exit(0)  # as `train` does: the process that hangs must not hold up the end


def be_stopped_in_window_one() -> None:
    """A program of its own: waits for a window for at most a second, in which it is suspended for an hour by its clock."""
    settings, clock = SimpleNamespace(num_workers=1, stall_seconds=60), SimpleNamespace(stopped=0.0)
    windows = stream(FaultyBuilder(1, "no_fault"), settings=settings)
    windows.take(request(0))
    (process,) = windows._processes
    next_built = process.next_built

    def stopped_at_first(seconds: float) -> Any:
        if clock.stopped:
            return next_built(PATIENT.stall_seconds)
        clock.stopped = 3600.0
        raise queue.Empty

    settings.stall_seconds = 1
    process.next_built = stopped_at_first
    workers.time = SimpleNamespace(monotonic=lambda: time.monotonic() + clock.stopped, sleep=time.sleep)
    print(windows.take(request(1)).row_ids[0])
