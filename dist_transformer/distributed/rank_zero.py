"""Work that rank 0 does for all ranks: the others wait for it without a time limit, as long as it makes progress."""

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar, cast

import psutil

from dist_transformer.distributed.group import Ranks
from dist_transformer.distributed.rounds import Stopped, WantsStop
from dist_transformer.errors import UserError

Result = TypeVar("Result")
LOOK_SECONDS = 0.5
"""Interval at which the ranks exchange whether the work is done."""


def run_on_rank_zero(
    ranks: Ranks,
    work: Callable[[], Result],
    progress: Callable[[], None],
    may_wait_seconds: float = 0.0,
    wants_stop: WantsStop | None = None,
) -> Result:
    """Runs `work` on rank 0 and returns its result on every rank (collective).

    `work` runs in a thread, so that hashing or copying for longer than training.hang_seconds is no hang; it may not
    call collectives. `progress` is called on every rank while the thread uses the processor, which it does not while a
    disk is stalled; in the first `may_wait_seconds` it is called in any case, for work that waits for others for a
    limited time. Without `wants_stop` a stop request does not end the wait.

    Raises:
        UserError: `work` raised it; raised on every rank. Any other exception is raised on rank 0 alone.
        Stopped: a rank wants to stop; raised on every rank. `work` is not interrupted, and ends with the process.
    """
    worker = _Worker(work)
    if ranks.is_rank_zero:
        worker.start()
    before: float | None = None
    patient_until = time.monotonic() + may_wait_seconds
    while True:
        if ranks.is_rank_zero:
            worker.join(LOOK_SECONDS)
        if (standing := ranks.from_rank_zero(worker.used_seconds)) is None:
            break
        if standing != before or time.monotonic() < patient_until:
            progress()
        before = standing
        if wants_stop is not None and any(ranks.all_gather_object(wants_stop())):
            raise Stopped
    result = ranks.from_rank_zero(worker.result)
    if isinstance(result, UserError):
        raise result.agreed()
    return result


class _Worker(threading.Thread, Generic[Result]):
    def __init__(self, work: Callable[[], Result]) -> None:
        super().__init__(name="work for all ranks", daemon=True)
        self._work = work
        self._result: Result | BaseException | None = None
        self._threads_before = {thread.id for thread in psutil.Process().threads()}

    def run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:  # noqa: BLE001  (raised again by `result`, in the thread that can report it)
            self._result = error

    def used_seconds(self) -> float | None:
        """Processor time of this thread and of the threads that it started; None when it has ended."""
        if not self.is_alive():
            return None
        own = [thread for thread in psutil.Process().threads() if thread.id not in self._threads_before]
        return float(sum(thread.user_time + thread.system_time for thread in own))

    def result(self) -> "Result | UserError":
        if isinstance(self._result, BaseException) and not isinstance(self._result, UserError):
            raise self._result
        return cast("Result | UserError", self._result)
