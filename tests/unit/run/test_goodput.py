"""Goodput: every second of a run is in one class, whatever ended its starts."""

import errno
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dist_transformer import files
from dist_transformer.run import goodput as goodput_module
from dist_transformer.run.folder import RunDir
from dist_transformer.run.goodput import CLASSES, Counted, Goodput, goodput_of, goodput_text, rows_of
from dist_transformer.run.metrics_log import read_records_from

Record = Mapping[str, Any]


def write(path: Path, *records: Record) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def start(time: float, step: int, began: float, **values: Any) -> Record:
    return {"event": "start", "step": step, "time": time, "began": began, "num_ranks": 2, **values}


def end(time: float, step: int, state: str = "stopped") -> Record:
    return {"event": "end", "step": step, "time": time, "state": state, "reason": ""}


def train(
    time: float, step: int, seconds: float, wait: float = 0.0, save: float = 0.0, validation: float = 0.0
) -> Record:
    pauses = {"save_seconds": save, "validation_seconds": validation}
    return {"event": "train", "step": step, "time": time, "target_tokens": 1000, "tokens_per_second": 1000 / seconds,
            "data_wait_share": wait / seconds, **pauses}  # fmt: skip


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


def goodput(run_dir: RunDir, now: float) -> Goodput:
    found = goodput_of(run_dir, now)
    assert found is not None
    assert set(found.seconds) == set(found.rank_seconds) == set(CLASSES)
    assert sum(found.shares().values()) == pytest.approx(1)
    return found


def add(path: Path, *records: Record) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def nonzero(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 6) for name, value in seconds.items() if abs(value) > 1e-9}


def test_without_a_start_there_is_none(run_dir: RunDir) -> None:
    assert goodput_of(run_dir, 100.0) is None


def test_a_run_that_finished_has_its_steps_pauses_start_and_end(run_dir: RunDir) -> None:
    write(run_dir.history, start(1010, 0, 1000), end(1100, 20, "finished"))
    write(run_dir.metrics, train(1050, 10, 36, wait=2, save=1, validation=3), train(1090, 20, 40, wait=1))
    found = goodput(run_dir, 5000)
    assert found.total == pytest.approx(100)
    expected = {"steps": 73.0, "data_wait": 3.0, "validations": 3.0, "saves": 1.0, "start": 10.0, "other": 10.0}
    assert nonzero(found.seconds) == expected
    assert nonzero(found.rank_seconds) == {name: 2 * value for name, value in expected.items()}


def test_steps_of_a_killed_start_that_are_computed_again_are_lost_and_slurms_decision_ends_the_detection(
    run_dir: RunDir,
) -> None:
    write(
        run_dir.history,
        start(1010, 0, 1000),
        start(1210, 10, 1200, before_seen=1080.0),
        end(1300, 20, "finished"),
    )
    write(run_dir.metrics, train(1050, 10, 40), train(1290, 20, 80))  # those of 1050 to 1080 were dropped by the resume
    write(
        run_dir.attempts,
        {"event": "began", "time": 990, "job": "7", "attempt": 0},
        {"event": "ended", "time": 1095, "job": "7", "attempt": 0},
        {"event": "began", "time": 1190, "job": "7", "attempt": 1},
    )
    found = goodput(run_dir, 5000)
    assert found.total == pytest.approx(300)
    assert nonzero(found.seconds) == {
        "steps": 120.0, "start": 20.0, "lost": 30.0, "detection": 15.0, "queue": 105.0, "other": 10.0,
    }  # fmt: skip
    assert found.rank_seconds["queue"] == found.rank_seconds["detection"] == 0.0


def test_a_start_that_stopped_in_order_lost_nothing_and_a_record_that_spans_two_starts_counts_in_both(
    run_dir: RunDir,
) -> None:
    write(run_dir.history, start(1000, 0, 1000), end(1050, 7), start(1100, 7, 1100), end(1115, 10, "finished"))
    write(run_dir.metrics, train(1112, 10, 55))  # 43 seconds before the stop, 12 after the resume
    found = goodput(run_dir, 5000)
    assert nonzero(found.seconds) == {"steps": 55.0, "queue": 50.0, "other": 10.0}


def test_the_time_of_a_suspension_is_that_of_the_queue(run_dir: RunDir) -> None:
    write(run_dir.history, start(1010, 0, 1000), end(1200, 20, "finished"))
    write(run_dir.metrics, {**train(1190, 20, 80), "stop_seconds": 100.0})
    assert nonzero(goodput(run_dir, 5000).seconds) == {"steps": 80.0, "start": 10.0, "queue": 100.0, "other": 10.0}


def test_time_after_a_run_has_finished_is_not_part_of_it_when_it_is_started_again(run_dir: RunDir) -> None:
    finished = [start(1010, 0, 1000), end(1100, 20, "finished")]
    again = [start(90_010, 20, 90_000), end(90_020, 20, "finished")]
    write(run_dir.history, *finished, *again)
    write(run_dir.metrics, train(1090, 20, 80))
    assert nonzero(goodput(run_dir, 10**6).seconds) == {"steps": 80.0, "start": 20.0, "other": 20.0}


def test_steps_of_a_start_that_failed_are_lost_also_where_its_end_names_the_step_it_began_with(run_dir: RunDir) -> None:
    write(run_dir.history, start(1010, 5, 1000), end(1100, 5, "failed"), start(1110, 5, 1105), end(1150, 10, "failed"))
    write(run_dir.metrics, train(1145, 10, 30))
    expected = {
        "steps": 30.0,
        "start": 15.0,
        "lost": 90.0,
        "queue": 5.0,
        "other": 10.0,
    }  # no start computes the last again
    assert nonzero(goodput(run_dir, 5000).seconds) == expected


def test_a_divergence_loses_the_steps_behind_the_checkpoint_that_training_returns_to(run_dir: RunDir) -> None:
    write(run_dir.history, start(1000, 0, 990), end(1060, 12, "diverged"), start(1070, 6, 990), end(1100, 12))
    write(run_dir.metrics, train(1030, 6, 30), train(1100, 12, 30))
    found = goodput(run_dir, 5000)
    assert nonzero(found.seconds) == {"start": 10.0 + 10.0, "steps": 60.0, "lost": 30.0} | {}


def test_time_in_the_queue_counts_from_the_submission(run_dir: RunDir) -> None:
    write(run_dir.history, start(1010, 0, 1000), end(1100, 20, "finished"))
    run_dir.job.parent.mkdir(parents=True)
    run_dir.job.write_text(json.dumps({"job_id": "7", "submitted_at": "1970-01-01T00:15:00+00:00"}), encoding="utf-8")
    assert goodput(run_dir, 5000).seconds["queue"] == 100.0
    run_dir.job.write_text(json.dumps({"job_id": "8", "submitted_at": "1970-01-01T01:15:00+00:00"}), encoding="utf-8")
    assert goodput(run_dir, 5000).seconds["queue"] == 0.0  # a later submission


def test_a_run_that_trains_is_counted_up_to_now_and_one_that_was_killed_up_to_its_last_sign(run_dir: RunDir) -> None:
    write(run_dir.history, start(1010, 0, 1000))
    write(run_dir.metrics, train(1050, 10, 40))
    assert goodput(run_dir, 2000).total == pytest.approx(50)  # nobody holds the run folder
    run_dir.owner.write_text("{}", encoding="utf-8")
    assert goodput(run_dir, 2000).total == pytest.approx(1000)


def test_the_last_sign_of_a_run_is_by_this_machine_s_clock(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "file_clock", lambda _: time.time() + 3600)  # the file server's is ahead
    write(run_dir.history, start(1010, 0, 1000))
    run_dir.owner.write_text("{}", encoding="utf-8")
    os.utime(run_dir.owner, (0, 1500 + 3600))
    assert goodput(run_dir, 2000).total == pytest.approx(500, abs=60)


def one_record_then_an_error(*arguments: Any) -> Iterator[Any]:
    yield next(read_records_from(*arguments))
    raise OSError(errno.EIO, "a disk")


def test_log_lines_that_were_counted_before_are_not_read_again_and_come_to_the_same(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(run_dir.history, start(1000, 0, 990), end(1050, 7, "stopped"), start(1100, 7, 1095))
    write(run_dir.metrics, train(1040, 6, 40, wait=3))
    counted = Counted()
    with monkeypatch.context() as failing:
        failing.setattr(goodput_module, "read_records_from", one_record_then_an_error)
        with pytest.raises(OSError):
            goodput_of(run_dir, 5000, counted)
    for step, seconds in (
        (10, 55),
        (20, 80),
        (30, 30),
    ):  # the first was begun by the start before, the second is too long
        add(run_dir.metrics, train(1100 + step, step, seconds, wait=2, save=1), {"event": "goodput", "step": step})
        run_dir.owner.write_text("{}", encoding="utf-8")
        os.utime(run_dir.owner, (1105 + step, 1105 + step))
        for _ in range(2):  # also where nothing was added
            assert goodput_of(run_dir, 5000, counted) == goodput(run_dir, 5000)
    add(run_dir.metrics, train(1400, 40, 8, validation=2))  # since the start there is more time than all steps took
    whole, lines = goodput(run_dir, 5000), run_dir.metrics.read_bytes().splitlines(keepends=True)
    run_dir.metrics.write_bytes(b"".join(b"?" * (len(line) - 1) + b"\n" for line in lines[:-1]) + lines[-1])
    assert goodput_of(run_dir, 5000, counted) == whole


def test_damaged_and_older_records_are_no_error(run_dir: RunDir) -> None:
    write(
        run_dir.history, {"event": "start", "time": "?", "step": 0}, {"event": "start", "time": 1000.0, "step": 0},
        {"event": "end", "step": 5}, {"event": "start", "time": 1100.0, "step": 5}, end(1150, 9),
    )  # fmt: skip
    write(
        run_dir.metrics,
        {"event": "train", "step": 5},
        {"event": "train", "step": 6, "time": 1120.0, "tokens_per_second": "nan"},
    )
    found = goodput(run_dir, 5000)
    assert found.total == pytest.approx(150)


def test_records_whose_classes_come_to_nothing_have_rows_without_a_share(run_dir: RunDir) -> None:
    write(run_dir.history, start(1000, 0, 1000), end(1000, 5))
    write(run_dir.metrics, train(1000, 5, 40, wait=40))  # a clock that was set
    found = goodput_of(run_dir, 1000)
    assert found is not None
    assert [(words, seconds, share) for words, seconds, share, _ in rows_of(found)] == [("waiting for data", 40.0, 0.0)]


def test_the_text_and_the_rows_have_the_largest_classes(run_dir: RunDir) -> None:
    write(run_dir.history, start(1010, 0, 1000), end(1100, 20, "finished"))
    write(run_dir.metrics, train(1090, 20, 80, wait=1))
    found = goodput(run_dir, 5000)
    assert goodput_text(found) == "79.0% of 1 min 40 s (start 10.0%, other 10.0%, data wait 1.0%)"
    assert [(words, seconds) for words, seconds, _, _ in rows_of(found)] == [
        (CLASSES[name], pytest.approx(value)) for name, value in found.seconds.items() if value > 0
    ]
