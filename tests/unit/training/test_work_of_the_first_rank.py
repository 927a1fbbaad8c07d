"""One rank's work for all: every rank gets its result or its error, and hears of it only while it moves."""

import threading

import pytest
from checkpoint_helpers import on_ranks

from dist_transformer.cli.first_rank import by_first_rank
from dist_transformer.errors import CheckpointError


def test_every_rank_has_the_result_of_work_that_only_the_first_did():
    done_by = []

    def work() -> str:
        done_by.append(threading.current_thread().name)
        return "result"

    assert on_ranks(3, lambda ranks: by_first_rank(ranks, work, lambda: None)) == ["result"] * 3
    assert len(done_by) == 1


def test_a_users_error_is_raised_on_every_rank():
    def fail() -> None:
        raise CheckpointError("no whole one")

    def attempt(ranks) -> tuple[str, bool]:
        with pytest.raises(CheckpointError) as raised:
            by_first_rank(ranks, fail, lambda: None)
        return str(raised.value), raised.value.is_agreed

    assert on_ranks(2, attempt) == [("no whole one", True)] * 2


def test_busy_work_is_heard_of_and_waiting_is_not():
    heard: dict[str, int] = {"busy": 0, "waiting": 0}

    def while_heard_of(name: str, is_busy: bool) -> None:
        looked_at, finished = threading.Event(), threading.Event()

        def work() -> None:
            while not finished.is_set():
                sum(range(10_000)) if is_busy else looked_at.wait(0.05)

        def progress() -> None:
            heard[name] += 1
            if heard[name] == 3:
                finished.set()

        timer = threading.Timer(4.0, finished.set)  # of work that is never heard of
        timer.start()
        on_ranks(1, lambda ranks: by_first_rank(ranks, work, progress))
        timer.cancel()

    while_heard_of("busy", True)
    while_heard_of("waiting", False)
    assert heard["busy"] == 3
    assert heard["waiting"] <= 2  # starting a thread takes processor time too
