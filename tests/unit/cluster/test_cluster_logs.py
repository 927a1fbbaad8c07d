"""Reading logs from their end, one rank of them, and as they grow."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from watched_run import make_run

from dist_transformer.cluster.logs import follow, last_hang, log_of_job, log_of_run, newest_log, tail, wait_for_log
from dist_transformer.errors import UserError
from dist_transformer.run.folder import RunDir
from dist_transformer.run.tail import end_of_last_line, last_lines


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = make_run(tmp_path / "a")
    run_dir.slurm.mkdir()
    return run_dir


def write(path: Path, text: str, at: float = 0.0) -> Path:
    with path.open("a") as file:
        file.write(text)
    os.utime(path, (at, at))
    return path


@pytest.mark.parametrize("piece_bytes", [1, 2, 7, 1 << 16])
@pytest.mark.parametrize("text", ["", "\n", "one", "one\n", "one\ntwo\n\nthree\n", "one\r\nt\u00e4wo\nrest"])
def test_the_lines_from_the_end_are_those_of_the_file_backwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int, text: str
) -> None:
    monkeypatch.setattr("dist_transformer.run.tail.PIECE_BYTES", piece_bytes)
    path = tmp_path / "log"
    path.write_bytes(text.encode())
    assert list(last_lines(path, 1 << 20)) == text.split("\n")[::-1]
    assert end_of_last_line(path) == len(text[: text.rfind("\n") + 1].encode())


def test_a_huge_file_is_read_from_its_end_alone(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.seek(1 << 40)  # a terabyte with nothing in it
        file.write(b"\nlast\n")
    assert list(last_lines(path, 100))[:2] == ["", "last"]
    assert tail(path, 1, None) == ["last"]


def test_a_file_that_is_not_there_has_no_lines(tmp_path: Path) -> None:
    assert list(last_lines(tmp_path / "none")) == []


def test_the_newest_log_of_a_job_comes_before_that_of_rank_0(run_dir: RunDir) -> None:
    assert log_of_run(run_dir, "5") is None
    write(run_dir.log, "x\n", at=9)
    assert newest_log(run_dir) == run_dir.log
    first = write(run_dir.slurm / "job-5.log", "x\n", at=2)
    second = write(run_dir.slurm / "job-12.log", "x\n", at=3)
    assert newest_log(run_dir) == second
    assert log_of_run(run_dir, "5") == first
    assert log_of_run(run_dir, "13") == second


def test_the_log_of_a_job_is_that_of_no_other_and_bears_the_name_of_its_stage(run_dir: RunDir) -> None:
    prepare = write(run_dir.slurm / "prepare-14.log", "x\n")
    task = write(run_dir.slurm / "job-15_4.log", "x\n")
    assert log_of_job(run_dir, "14") == prepare
    assert log_of_job(run_dir, "15_4") == task
    assert log_of_job(run_dir, "4") is None


def test_a_log_is_waited_for_until_it_is_there_or_the_run_is_over(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run_dir.slurm / "job-5.log"
    happens(monkeypatch, lambda: None, lambda: write(path, "a\n"))
    assert wait_for_log(lambda: newest_log(run_dir), lambda: False) == path
    path.unlink()
    asked: list[bool] = []
    looks: list[float] = []

    def over() -> bool:
        asked.append(True)
        return len(asked) == 3

    monkeypatch.setattr("dist_transformer.cluster.logs.time.sleep", looks.append)
    assert wait_for_log(lambda: newest_log(run_dir), over) is None
    assert sum(looks) == 20


def test_a_rank_is_told_by_its_label_whatever_its_width(run_dir: RunDir) -> None:
    path = write(run_dir.slurm / "job-5.log", "2027 job 5 attempt 0: 12 ranks\n 1: one\n10: ten 1: no\n 1:\n 1: more\n")
    assert tail(path, 9, 1) == ["one", "more"]
    assert tail(path, 9, 10) == ["ten 1: no"]
    assert tail(path, 1, 1) == ["more"]
    assert tail(path, 2, None) == [" 1:", " 1: more"]
    assert tail(path, 0, None) == []


def test_the_log_of_rank_0_has_nothing_of_others(run_dir: RunDir) -> None:
    path = write(run_dir.log, "0: not a label\n")
    assert tail(path, 5, 0) == ["0: not a label"]
    with pytest.raises(UserError, match=r"train.log: is written by rank 0 alone, so nothing of rank 1 is in it"):
        tail(path, 5, 1)


def happens(monkeypatch: pytest.MonkeyPatch, *steps: Callable[[], object]) -> None:
    """In place of waiting: one step a time."""
    left = list(steps)

    def instead(seconds: float) -> None:
        left.pop(0)() if left else pytest.fail("waits for nothing")

    monkeypatch.setattr("dist_transformer.cluster.logs.time.sleep", instead)


def test_following_goes_on_over_a_requeue_and_a_new_job_and_ends_with_the_run(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(run_dir.slurm / "job-5.log", "a\nb\nhal", at=1)
    over: list[bool] = []
    new = run_dir.slurm / "job-6.log"
    happens(
        monkeypatch,
        lambda: write(path, "f\nrequeued\n", at=2),
        lambda: write(new, "0: next\n", at=3),
        lambda: (write(new, "0: end\nno line break", at=4), over.append(True)),
        *[lambda: None] * 40,
    )
    lines = list(follow(lambda: newest_log(run_dir), path, 1, None, lambda: bool(over)))
    assert lines == ["b", "half", "requeued", f"--- {new}", "0: next", "0: end", "no line break"]


def test_following_one_rank_shows_its_lines_alone(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(run_dir.slurm / "job-5.log", "0: a\n1: b\n", at=1)
    over: list[bool] = []
    happens(monkeypatch, lambda: (write(path, "1: c\n0: d\n", at=2), over.append(True)), *[lambda: None] * 40)
    assert list(follow(lambda: newest_log(run_dir), path, 5, 1, lambda: bool(over))) == ["b", "c"]


def test_a_run_that_is_over_is_said_to_the_end_without_waiting(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(run_dir.slurm / "job-5.log", "a\nb\n")
    happens(monkeypatch)
    assert list(follow(lambda: newest_log(run_dir), path, 5, None, lambda: True)) == ["a", "b"]


def test_slurm_is_not_asked_at_every_look(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(run_dir.slurm / "job-5.log", "a\n")
    asked: list[bool] = []
    looks: list[float] = []
    monkeypatch.setattr("dist_transformer.cluster.logs.time.sleep", looks.append)
    list(follow(lambda: newest_log(run_dir), path, 5, None, lambda: asked.append(True) or len(asked) == 3))  # type: ignore[func-returns-value]
    assert len(looks) == 40
    assert sum(looks) == 20


def test_a_log_that_was_cut_is_read_from_its_beginning_and_one_that_is_gone_waited_for(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(run_dir.slurm / "job-5.log", "long line\n")
    over: list[bool] = []
    happens(
        monkeypatch,
        path.unlink,
        lambda: path.write_text("new\n"),
        lambda: over.append(True),
        *[lambda: None] * 40,
    )
    assert list(follow(lambda: path, path, 5, None, lambda: bool(over))) == ["long line", "new"]


def test_the_stacks_of_the_newest_attempt_that_hung_are_found_in_the_log(run_dir: RunDir) -> None:
    path = run_dir.slurm / "job-5.log"
    write(path, "t job 5 attempt 0: 2 ranks on n1\n0: rank 0: no progress for 9 s; where each thread stands:\n0: old\n")
    assert last_hang(path) == ["0: rank 0: no progress for 9 s; where each thread stands:", "0: old"]
    write(path, "t job 5 attempt 1: 2 ranks on n1\n1: rank 1: no progress; where each thread stands:\n1:   File x\n")
    write(path, "0: rank 0: no progress; where each thread stands:\n0:   File y\nt job 5 attempt 1: exit code 70\n")
    found = last_hang(path)
    assert found[0].startswith("1: rank 1")
    assert "0:   File y" in found
    assert "0: old" not in found


def test_a_log_without_a_hang_has_no_stacks(run_dir: RunDir) -> None:
    assert last_hang(write(run_dir.slurm / "job-5.log", "t job 5 attempt 0: exit code 1\n")) == []
