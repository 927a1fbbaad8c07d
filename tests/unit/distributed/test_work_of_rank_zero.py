"""One rank's work for all: every rank gets its result or its error, and hears of it only while it moves."""

import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from checkpoint_helpers import on_ranks

from dist_transformer.config.schema import TrackingConfig
from dist_transformer.distributed.rank_zero import run_on_rank_zero
from dist_transformer.distributed.rounds import Stopped
from dist_transformer.errors import CheckpointError
from dist_transformer.run.folder import RunDir
from dist_transformer.training import finish
from dist_transformer.training.finish import RunEnd

pytestmark = pytest.mark.slow


def test_every_rank_has_the_result_of_work_that_only_the_first_did():
    done_by = []

    def work() -> str:
        done_by.append(threading.current_thread().name)
        return "result"

    assert on_ranks(3, lambda ranks: run_on_rank_zero(ranks, work, lambda: None)) == ["result"] * 3
    assert len(done_by) == 1


def test_a_users_error_is_raised_on_every_rank():
    def fail() -> None:
        raise CheckpointError("no whole one")

    def attempt(ranks) -> tuple[str, bool]:
        with pytest.raises(CheckpointError) as raised:
            run_on_rank_zero(ranks, fail, lambda: None)
        return str(raised.value), raised.value.is_agreed

    assert on_ranks(2, attempt) == [("no whole one", True)] * 2


def test_busy_work_is_heard_of_and_waiting_is_not():
    heard: dict[str, int] = {"busy": 0, "waiting": 0}

    def while_heard_of(name: str, is_busy: bool, seconds: float) -> None:
        finished = threading.Event()

        def work() -> None:
            while is_busy and not finished.is_set():
                sum(range(10_000))
            finished.wait()

        def progress() -> None:
            heard[name] += 1
            if heard[name] == 3:
                finished.set()

        timer = threading.Timer(seconds, finished.set)  # of work that is never heard of
        timer.start()
        on_ranks(1, lambda ranks: run_on_rank_zero(ranks, work, progress))
        timer.cancel()

    while_heard_of("busy", True, 120.0)
    while_heard_of("waiting", False, 4.0)
    assert heard["busy"] == 3
    assert heard["waiting"] <= 2  # starting a thread takes processor time too


def test_waiting_of_a_known_length_is_heard_of_on_every_rank():
    heard, finished = [0, 0], threading.Event()

    def progress(rank: int) -> None:
        heard[rank] += 1
        if min(heard) >= 5:
            finished.set()

    on_ranks(2, lambda ranks: run_on_rank_zero(ranks, lambda: finished.wait(120), lambda: progress(ranks.rank), 110.0))
    assert min(heard) >= 5


def test_a_stop_of_any_rank_leaves_the_work_alone_on_all():
    finished, left = threading.Event(), []

    def attempt(ranks) -> None:
        with pytest.raises(Stopped):
            run_on_rank_zero(ranks, lambda: finished.wait(60), lambda: None, wants_stop=lambda: ranks.rank == 1)
        left.append(ranks.rank)

    on_ranks(3, attempt)
    assert sorted(left) == [0, 1, 2]
    finished.set()
    assert (
        on_ranks(2, lambda ranks: run_on_rank_zero(ranks, lambda: "done", print, wants_stop=lambda: False))
        == ["done"] * 2
    )


def test_waiting_beyond_its_length_is_no_progress():
    heard, finished = [], threading.Event()
    timer = threading.Timer(2.5, finished.set)

    def progress() -> None:
        heard.append(1)
        if len(heard) == 1:
            timer.start()  # not before: in a busy moment the first look may come late

    on_ranks(1, lambda ranks: run_on_rank_zero(ranks, lambda: finished.wait(120), progress, 0.8))
    timer.cancel()
    assert 1 <= len(heard) <= 4


class SlowTracker:
    """Takes until every rank has said twice that it moves; then its status is known."""

    def __init__(self, may_end: threading.Event) -> None:
        self._may_end = may_end
        self.closed_with: list[str] = []

    def close(self, status: str) -> None:
        assert self._may_end.wait(120)
        self.closed_with.append(status)


def ended(
    num_ranks: int, act: Callable[[RunEnd], None], tracker: SlowTracker, may_end: threading.Event, run_dir
) -> list:
    """What each rank's watchdog was told."""
    said: list[list[str]] = [[] for _ in range(num_ranks)]

    def on_rank(ranks) -> None:
        def progress(doing: str) -> None:
            said[ranks.rank].append(doing)
            if all(len(each) >= 2 for each in said):
                may_end.set()

        run = SimpleNamespace(
            config=SimpleNamespace(tracking=TrackingConfig()),
            run_dir=run_dir,
            ranks=ranks,
            doing=lambda what: partial(progress, what),
        )
        act(RunEnd(run, tracker if ranks.is_rank_zero else None))

    with patch.object(finish, "CLOSE_SECONDS", 1):
        on_ranks(num_ranks, on_rank)
    return said


def test_all_ranks_wait_for_mlflow_and_say_so(tmp_path):
    may_end = threading.Event()
    tracker = SlowTracker(may_end)

    def act(end: RunEnd) -> None:
        end.close("FINISHED")
        end.close_alone("FAILED")

    said = ended(2, act, tracker, may_end, RunDir(tmp_path))
    assert all(len(each) >= 2 and set(each) == {"waiting for MLflow to take the rest"} for each in said)
    assert tracker.closed_with == ["FINISHED"]


def test_after_an_error_only_the_first_rank_closes_and_nobody_is_waited_for(tmp_path):
    may_end = threading.Event()
    may_end.set()
    tracker = SlowTracker(may_end)
    end = RunEnd(SimpleNamespace(watchdog=SimpleNamespace(progress=print)), tracker)
    end.close_alone("FAILED")
    assert tracker.closed_with == ["FAILED"]


def test_a_history_that_takes_long_to_read_is_left_to_people(tmp_path, monkeypatch, caplog):
    run_dir = RunDir(tmp_path)
    run_dir.metrics.write_text("x" * 1000, encoding="utf-8")
    monkeypatch.setattr(finish, "LARGEST_AT_END_BYTES", 999)
    with caplog.at_level("INFO"):
        assert not finish.report_after_training(run_dir)
    assert f"dist-transformer report {tmp_path}" in caplog.text
    assert not run_dir.report.exists()
