"""Work of all ranks that ends on all of them together: in rounds, when one fails or is asked to stop; or refused by one.

    in_rounds(ranks, num_rounds, lambda number: translate(batches[number]), wants_stop)

docs/architecture.md ("A validation runs in rounds") says how no rank waits for the slowest, or alone in a collective.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from dist_transformer.distributed.group import Pending, Ranks
from dist_transformer.errors import MachineError, UserError

log = logging.getLogger(__name__)

Result = TypeVar("Result")
MOST_TOLD = 3
"""Messages of ranks that are said together."""
WantsStop = Callable[[], bool]
"""Returns True if this rank was asked to stop; the others may not have been."""


class Stopped(Exception):
    """Long work was abandoned for a stop request: raised on every rank, once they have agreed on it."""


class WorkFailed(MachineError):
    """A part of the work failed on the rank that the message names."""


def in_rounds(ranks: Ranks, num_rounds: int, work: Callable[[int], None], wants_stop: WantsStop) -> None:
    """Calls `work` with the number of each round, on every rank (collective). All ranks end after the same round.

    Args:
        work: may leave a round in its middle by raising `Stopped` or `WorkFailed`; any other exception is raised at
            once, on this rank alone.

    Raises:
        Stopped: one rank was asked to stop; raised on every rank.
        WorkFailed: the work of one rank failed; raised on every rank.
    """
    is_stopped, failure = False, None
    pending: Pending | None = None  # whether a rank does not continue, sent in the round before
    for number in range(num_rounds):
        try:
            is_stopped = is_stopped or wants_stop()
            # Also where a stop is wanted: the work may be a collective, and no other rank has received the wish yet.
            if failure is None:
                work(number)
        except Stopped:
            is_stopped = True
        except WorkFailed as error:
            failure = str(error)
        answer, pending = pending, None
        if answer is not None and bool(answer.wait().any()):
            break
        pending = ranks.start_sum(torch.tensor([is_stopped or failure is not None], dtype=torch.int64))
    if pending is not None:
        pending.wait()
    answers = ranks.all_gather_object((is_stopped, failure))
    if any(is_stopped for is_stopped, _ in answers):
        raise Stopped
    if problems := [failure for _, failure in answers if failure is not None]:
        raise WorkFailed("; ".join(problems[:MOST_TOLD])).agreed()


def together(ranks: Ranks, work: Callable[[], Result]) -> Result:
    """Returns what `work`, which calls no collective, returns on this rank (collective). Raises UserError: on every rank:
    `work` raised it on one or more, perhaps of a node with other files; it has each message once."""
    refusal: UserError | None = None
    try:
        result = work()
    except UserError as error:
        refusal = error
    said = ranks.all_gather_object(refusal and (str(refusal), isinstance(refusal, MachineError)))
    if texts := dict(each for each in said if each is not None):
        more = [f"and {len(texts) - MOST_TOLD} other refusals"] if len(texts) > MOST_TOLD else []
        told = "\n".join([*texts][:MOST_TOLD] + more)
        raise (MachineError if all(texts.values()) else UserError)(told).agreed() from refusal
    return result


@contextmanager
def failures_named(ranks: Ranks) -> Iterator[None]:
    """Turns an exception in the block into a `WorkFailed` that names this rank. The block may contain no collective:
    the other ranks would wait in it for ever."""
    try:
        yield
    except (Stopped, WorkFailed):
        raise
    except Exception as error:  # any exception: it must be reported to the other ranks
        is_told = isinstance(error, UserError | OSError)  # their message is enough; any other error needs its traceback
        log.warning("rank %d: %s", ranks.rank, error, exc_info=not is_told)
        kind = "" if is_told else f"{type(error).__name__}: "
        raise WorkFailed(f"rank {ranks.rank}: {kind}{error}") from None
