"""Work that rank 0 does for all ranks: the others wait for it without a time limit, as long as it makes progress."""

import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from typing import TypeVar

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
    outcome, others = Future[Result](), {thread.id for thread in psutil.Process().threads()}
    if ranks.is_rank_zero:
        threading.Thread(target=_do, args=(work, outcome), name="work for all ranks", daemon=True).start()
    before: float | None = None
    patient_until = time.monotonic() + may_wait_seconds
    while True:
        if ranks.is_rank_zero:
            wait([outcome], LOOK_SECONDS)
        if (standing := ranks.from_rank_zero(lambda: None if outcome.done() else _used_seconds(others))) is None:
            break
        if standing != before or time.monotonic() < patient_until:
            progress()
        before = standing
        if wants_stop is not None and any(ranks.all_gather_object(wants_stop())):
            raise Stopped
    refusal = ranks.from_rank_zero(lambda: error if isinstance(error := outcome.exception(), UserError) else None)
    if refusal is not None:
        raise refusal.agreed()
    return ranks.from_rank_zero(outcome.result)


def _do(work: Callable[[], Result], outcome: "Future[Result]") -> None:
    try:
        outcome.set_result(work())
    except BaseException as error:  # noqa: BLE001  (raised again in the thread that can report it)
        outcome.set_exception(error)


def _used_seconds(others: Collection[int]) -> float:
    """Processor time of all threads of this process but the `others`."""
    own = [thread for thread in psutil.Process().threads() if thread.id not in others]
    return float(sum(thread.user_time + thread.system_time for thread in own))
