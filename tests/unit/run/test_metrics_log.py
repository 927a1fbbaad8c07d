import json
import math
import resource
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from dist_transformer.run import metrics_log, tail
from dist_transformer.run.metrics_log import MetricsLog, add_event, newest_record, read_records, read_records_from


def steps_of(path: Path) -> list[int]:
    return [record["step"] for record in read_records(path)]


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "run" / "metrics.jsonl")
    log.append("train", 1, {"loss": 0.1 + 0.2, "tokens": 7, "batch_digest": "äb"})
    (record,) = read_records(log.path)
    assert record.pop("time") > 0
    assert record == {"event": "train", "step": 1, "loss": 0.1 + 0.2, "tokens": 7, "batch_digest": "äb"}


def test_event_step_and_time_stand_first_in_a_line(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append("train", 1, {"loss": 1.0})
    assert list(json.loads(log.path.read_text()))[:3] == ["event", "step", "time"]


def test_values_that_are_not_finite_are_valid_json_and_come_back_as_floats(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append("train", 1, {"nan": math.nan, "up": math.inf, "down": -math.inf})

    def reject(name: str) -> float:
        raise AssertionError(f"{name} is not JSON")

    json.loads(log.path.read_text(), parse_constant=reject)
    (record,) = read_records(log.path)
    assert math.isnan(record["nan"])
    assert (record["up"], record["down"]) == (math.inf, -math.inf)


def test_a_torn_last_line_is_skipped_by_readers_and_removed_by_the_next_writer(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsLog(path).append("train", 1, {"loss": 1.0})
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole + whole[:length])
        assert steps_of(path) == [1]
    MetricsLog(path).append("train", 2, {"loss": 0.5})
    assert steps_of(path) == [1, 2]


def test_a_damaged_line_in_the_middle_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append("train", 1, {})
    with log.path.open("ab") as file:
        file.write(b"\0\0\0\n[1]\n")
    log.append("train", 2, {})
    assert steps_of(log.path) == [1, 2]
    assert "damaged and skipped" in caplog.text


def test_lines_of_other_events_are_not_even_parsed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append("train", 1, {})
    log.append("system", 1, {"named": "train"})
    with log.path.open("ab") as file:
        file.write(b'{"event": "system", "step": 1\n')
    log.append("validation", 2, {})
    assert [record["event"] for record in read_records(log.path, "train")] == ["train"]
    assert [record["event"] for record in read_records(log.path, "train", "validation")] == ["train", "validation"]
    assert caplog.text == ""


def test_a_file_that_does_not_exist_has_no_records(tmp_path: Path) -> None:
    assert list(read_records(tmp_path / "none.jsonl")) == []
    assert newest_record(tmp_path / "none.jsonl", "train") == {"step": 0}


@pytest.mark.parametrize("event", ["train", "validation"])
def test_the_newest_record_is_the_last_of_all_wherever_the_file_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    monkeypatch.setattr(tail, "PIECE_BYTES", 64)  # so that lines lie in several pieces
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in (5, 10):
        log.append("train", step, {"loss": math.nan, "norm": math.inf, "batch_digest": "äb"})
        log.append("validation", step, {"bleu": 0.1})
        log.append("system", step, {"named": "train", "also": "validation"})
        with log.path.open("ab") as file:
            file.write(b'\0\0"train" "validation"\n{"event": "train"}\n{"event": "validation", "step": "many"}\n')
    whole = log.path.read_bytes()
    for length in range(len(whole) + 1):
        log.path.write_bytes(whole[:length])
        all_of_them = [record for record in read_records(log.path, event) if "step" in record]
        assert repr(newest_record(log.path, event)) == repr(all_of_them[-1] if all_of_them else {"step": 0})


def test_what_lies_before_the_newest_record_is_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in range(1, 51):
        log.append("train", step, {})
        log.append("system", step, {})
    parsing = Mock(wraps=metrics_log.records_of)
    monkeypatch.setattr(metrics_log, "records_of", parsing)
    assert newest_record(log.path, "train")["step"] == 50
    assert parsing.call_count == 1


def test_reading_goes_on_from_every_offset_it_gave(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in range(1, 6):
        log.append("train", step, {"loss": 1.0})
    ends = [end for _, end in read_records_from(log.path, 0)]
    for count, end in enumerate(ends, start=1):
        assert [record["step"] for record, _ in read_records_from(log.path, end)] == list(range(count + 1, 6))


@pytest.mark.parametrize("resumed_at", range(6))
def test_after_a_rewind_the_file_is_that_of_a_run_never_stopped(tmp_path: Path, resumed_at: int) -> None:
    log = MetricsLog(tmp_path / "audit.jsonl")
    for step in range(1, 6):
        log.append("audit", step, {"loss": math.nan})
    before = log.path.read_bytes().splitlines()
    log.rewind(resumed_at)
    assert log.path.read_bytes().splitlines() == before[:resumed_at]
    log.append("audit", resumed_at + 1, {})
    assert steps_of(log.path) == list(range(1, resumed_at + 2))


def test_the_copy_of_a_rewind_that_was_killed_goes_with_the_next_start(tmp_path: Path) -> None:
    program = f"""
import os, signal
from pathlib import Path
from dist_transformer.run.metrics_log import MetricsLog

log = MetricsLog(Path({str(tmp_path / "metrics.jsonl")!r}))
for step in (1, 2):
    log.append("train", step, {{}})
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
log.rewind(1)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL
    assert len([*tmp_path.iterdir()]) == 2
    (tmp_path / ".metrics.jsonl.mine.tmp").touch()
    MetricsLog(tmp_path / "metrics.jsonl")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".metrics.jsonl.mine.tmp", "metrics.jsonl"]
    assert steps_of(tmp_path / "metrics.jsonl") == [1, 2]


def test_a_value_may_not_take_the_name_of_a_field(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="field of every record"):
        MetricsLog(tmp_path / "metrics.jsonl").append("train", 1, {"step": 2})


def test_a_torn_line_longer_than_a_block_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.append("train", 1, {"loss": 1.0})
    log.close()
    whole = path.read_bytes()
    path.write_bytes(whole + b"x" * 200_000)
    MetricsLog(path).close()
    assert path.read_bytes() == whole
    path.write_bytes(b"x" * 200_000)
    MetricsLog(path).close()
    assert path.read_bytes() == b""


def test_an_event_of_which_the_disk_takes_a_part_is_an_error_and_its_part_goes_with_the_next(tmp_path: Path) -> None:
    path, limits = tmp_path / "events.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    add_event(path, "status", {"status": "RUNNING"})
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            add_event(path, "status", {"status": "FAILED"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    add_event(path, "status", {"status": "FINISHED"})
    assert [record["status"] for record in read_records(path)] == ["RUNNING", "FINISHED"]


def test_a_rewind_by_another_field_keeps_what_has_the_same_step(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "audit.jsonl")
    for batch in (1, 2, 3):  # the update of batch 2 was skipped, and 3 is not in the checkpoint
        log.append("batch", 2, {"batch": batch})
    log.rewind(2, "batch")
    assert [record["batch"] for record in read_records(log.path)] == [1, 2]


@pytest.mark.parametrize("in_place", [False, True])
def test_a_rewind_reads_only_the_end_of_a_file_and_cuts_it_in_place_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_place: bool
) -> None:
    """An audit of days has tens of gigabytes; the readers of others see by a new file that it was cut."""
    log = MetricsLog(tmp_path / "audit.jsonl")
    for step in range(1, 301):
        log.append("batch", step, {"text": "ä" * (step % 7)})
    before, number, read = log.path.read_bytes(), log.path.stat().st_ino, []
    monkeypatch.setattr(metrics_log, "_decode", lambda line: read.append(line) or json.loads(line or b"{}"))
    log.rewind(300, in_place=in_place)
    assert (log.path.read_bytes(), log.path.stat().st_ino) == (before, number)
    log.rewind(296, in_place=in_place)
    assert len(read) < 20
    assert log.path.read_bytes() == b"".join(before.splitlines(keepends=True)[:296])
    assert (log.path.stat().st_ino == number) == in_place


@pytest.mark.parametrize("late", ["goodput", "of another version"])
def test_a_rewind_keeps_what_was_told_late_of_an_earlier_step_and_nothing_before_it_that_is_beyond(
    tmp_path: Path, late: str
) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    written = [("train", 4), ("validation", 4), ("train", 6), (late, 4), ("train", 8), (late, 6), (late, 5)]
    for event, step in written:
        log.append(event, step, {})
    log.rewind(5)
    kept = [(record["event"], record["step"]) for record in read_records(log.path)]
    assert kept == [("train", 4), ("validation", 4), (late, 4), (late, 5)]
