"""Loader processes: build windows ahead of need; a process that dies or hangs ends in a message, never in a wait.

Windows are asked for by request and come as one flat array each, so that any process can build any of them and none
holds state. They are plain numpy arrays: sent through a pipe, not through shared memory, which containers keep small.
"""

import faulthandler
import multiprocessing
import multiprocessing.process
import multiprocessing.util
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from dist_transformer.data.plan import WindowRequest
from dist_transformer.data.window import Window, WindowBuilder
from dist_transformer.errors import DataError, MachineError
from dist_transformer.stop_request import ignore_stop_signals

STACKS_SIGNAL = signal.SIGRTMIN + 1
"""On it a loader process prints where it stands."""
STACKS_SECONDS = 1.0
POLL_SECONDS = 2
"""How often it is looked whether the loader processes live; torch looks only when it has waited in vain."""

KILL_PRIORITY = 10
"""Before all else that multiprocessing does at the end of the program."""


Built = tuple[WindowRequest, Window | DataError]
"""A window, or why there is none."""


class ProcessSettings(Protocol):
    """The part of the loader's settings that is for processes."""

    @property
    def num_workers(self) -> int: ...
    @property
    def stall_seconds(self) -> int: ...


class WindowStream:
    """Windows by request, built ahead by `num_workers` processes; with none, built when they are asked for.

    Args:
        requests: all that will be taken, about in that order.
        here: requests, not among `requests`, that are built in this process.
    """

    def __init__(
        self,
        builder: WindowBuilder,
        requests: Iterator[WindowRequest],
        here: set[WindowRequest],
        settings: ProcessSettings,
    ) -> None:
        self._built = _Built(builder)
        self._here, self._settings = here, settings
        self._early: dict[WindowRequest, Window | DataError] = {}
        self._asked = _Asked(requests)
        self._stale = 0
        self._received: Iterator[Built] | None = None
        if settings.num_workers:
            self._received = _start(self._built, self._asked, settings)

    def restart(self, requests: Iterator[WindowRequest]) -> None:
        """Other requests from now on; what was asked for before and has not come yet is thrown away."""
        self._asked.requests = requests
        self._stale = self._asked.outstanding
        self._early = {}

    def take(self, request: WindowRequest) -> Window:
        """The window of this request; those that come before it are kept for their turn.

        Raises:
            DataError: it cannot be read.
            MachineError: it does not come in time, or a process was killed.
        """
        if self._received is None or request in self._here:
            self._here.discard(request)
            _, window = self._built[request]
        else:
            while request not in self._early:
                found, window = self._receive(self._received, request)
                self._asked.outstanding -= 1
                if self._stale:
                    self._stale -= 1
                else:
                    self._early[found] = window
            window = self._early.pop(request)
        if isinstance(window, DataError):
            raise window
        return window

    def _receive(self, received: Iterator[Built], request: WindowRequest) -> Built:
        deadline = time.monotonic() + self._settings.stall_seconds
        while True:
            try:
                return next(received)
            except RuntimeError as error:
                if "exited unexpectedly" in str(error) or "killed by signal" in str(error):
                    raise MachineError(
                        f"a loader process ended ({error}): it was killed, perhaps for want of memory; lower "
                        "data.window_rows or data.loader_workers"
                    ) from error
                if "timed out" not in str(error):
                    raise
                if time.monotonic() < deadline:
                    continue
                _print_stacks_of_loader_processes()
                raise MachineError(
                    f"no window within data.stall_seconds = {self._settings.stall_seconds} s (waiting for "
                    f"{request.key}): the disk or the loader process hangs; where its threads stand is printed above. "
                    "Look at the filesystem of the data, or raise data.stall_seconds"
                ) from error


@dataclass(frozen=True)
class _Built(Dataset[Built]):
    """Windows by request, as a map-style dataset."""

    builder: WindowBuilder

    def __getitem__(self, request: WindowRequest) -> Built:
        """An error as a value: a loader process would wrap one that is raised into its traceback."""
        try:
            return request, self.builder.build(request)
        except DataError as error:
            return request, error


class _Asked(Sampler[WindowRequest]):
    """The requests as a sampler; `outstanding` were asked for and have not come yet."""

    def __init__(self, requests: Iterator[WindowRequest]) -> None:
        self.requests = requests
        self.outstanding = 0

    def __iter__(self) -> Iterator[WindowRequest]:
        while True:
            self.outstanding += 1
            yield next(self.requests)


def _start(built: _Built, asked: _Asked, settings: ProcessSettings) -> Iterator[Built]:
    loader = DataLoader(
        built,
        batch_size=None,
        sampler=asked,
        num_workers=settings.num_workers,
        prefetch_factor=2,
        multiprocessing_context="forkserver",  # fork breaks pyarrow's threads
        worker_init_fn=_begin,
        timeout=min(POLL_SECONDS, settings.stall_seconds),
        collate_fn=_as_it_is,
    )
    others = set(multiprocessing.active_children())
    try:
        received = iter(loader)
    except OSError as error:
        raise MachineError(
            f"the loader processes cannot be started ({error}). Is the shared-memory mount (/dev/shm) or the folder for "
            "temporary files full? Free it, or set data.loader_workers=0"
        ) from error
    # They ignore the signal that multiprocessing sends before it waits for them at the end of the program.
    loaders = set(multiprocessing.active_children()) - others
    multiprocessing.util.Finalize(None, _kill, (loaders,), exitpriority=KILL_PRIORITY)
    return received


def _kill(processes: set[multiprocessing.process.BaseProcess]) -> None:
    """They hold no state."""
    for process in processes:
        process.kill()


def _begin(worker: int) -> None:
    ignore_stop_signals()
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_the_trainer, daemon=True).start()


def _end_with_the_trainer() -> None:
    """torch's own watch looks at the fork server, which lives as long as its workers: neither would ever end."""
    trainer = multiprocessing.parent_process()
    assert trainer is not None
    trainer.join()
    os._exit(0)


def _print_stacks_of_loader_processes() -> None:
    """Asks each loader process to print its stacks to stderr, and gives it time to."""
    for process in multiprocessing.active_children():
        print(f"loader process {process.pid} does not deliver; its threads:", file=sys.stderr, flush=True)
        if process.pid is not None:
            os.kill(process.pid, STACKS_SIGNAL)
            time.sleep(STACKS_SECONDS)


def _as_it_is(window: Any) -> Any:
    return window
