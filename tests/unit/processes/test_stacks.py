"""Asking real processes where they stand."""

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dist_transformer.processes import stacks
from dist_transformer.processes.stacks import SIGNAL, dump_local, rank_processes

BLOCKED_IN_C = """
def waits_in_c():
    import _thread
    lock = _thread.allocate_lock()
    lock.acquire()
    print("ready", flush=True)
    lock.acquire()  # in C, for ever: Python runs no handler of its own here
waits_in_c()
"""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that answers does so at once, but for a busy moment."""
    monkeypatch.setattr(stacks, "ANSWER_SECONDS", 120.0)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a rank that registers, runs a piece of code, and says "ready"."""
    processes = []

    def started(code: str, *, rank: int = 0, job: str = "7", folder: Path = tmp_path) -> subprocess.Popen[str]:
        begin = (
            "from pathlib import Path\nfrom dist_transformer.processes.stacks import register\n"
            f"register(Path({str(folder)!r}))\n"
        )
        environment = {**os.environ, "RANK": str(rank), "SLURM_JOB_ID": job}
        process = subprocess.Popen(
            [sys.executable, "-c", begin + textwrap.dedent(code)], env=environment, stdout=subprocess.PIPE, text=True
        )
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield started
    for process in processes:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_a_rank_that_waits_in_c_says_where(start: Start, tmp_path: Path) -> None:
    process = start(BLOCKED_IN_C, rank=3)
    [dump] = dump_local("7", tmp_path)
    assert (dump.rank, dump.pid) == (3, process.pid)
    assert "waits_in_c" in dump.text
    assert "most recent call first" in dump.text
    assert process.poll() is None


def test_asked_again_it_answers_with_the_new_stacks_alone(start: Start, tmp_path: Path) -> None:
    start(BLOCKED_IN_C)
    texts = [dump_local("7", tmp_path)[0].text for _ in range(2)]
    assert [text.count("Current thread") for text in texts] == [1, 1]


def test_the_thread_that_trains_comes_first(start: Start, tmp_path: Path) -> None:
    start(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()" + BLOCKED_IN_C
    )
    [dump] = dump_local("7", tmp_path)
    assert dump.text.startswith("Current thread")
    assert "\n\nThread 0x" in dump.text


def test_the_ranks_of_another_job_are_not_asked(start: Start, tmp_path: Path) -> None:
    start(BLOCKED_IN_C, rank=0, job="7")
    start(BLOCKED_IN_C, rank=1, job="8")
    assert [dump.rank for dump in dump_local("8", tmp_path)] == [1]
    assert [process.job for process in rank_processes(tmp_path)] == ["7", "8"]


def test_a_process_that_took_over_the_number_of_a_dead_rank_is_left_alone(start: Start, tmp_path: Path) -> None:
    process = start(BLOCKED_IN_C)
    [path] = tmp_path.iterdir()
    about = json.loads(path.read_text())
    other = subprocess.Popen(["sleep", "60"])  # would die of the signal
    try:
        path.write_text(json.dumps({**about, "pid": other.pid}) + "\n")
        assert dump_local("7", tmp_path) == []
        assert not path.exists()
        assert other.poll() is None
        assert process.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_rank_that_was_stopped_gives_the_reason_and_not_a_wait_without_end(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "ANSWER_SECONDS", 0.3)
    process = start(BLOCKED_IN_C)
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    [dump] = dump_local("7", tmp_path)
    assert dump.text == "no answer within 0.3 s: it was stopped by a signal"


def test_the_file_goes_with_the_process(start: Start, tmp_path: Path) -> None:
    process = start('print("ready", flush=True)')
    process.wait()
    assert list(tmp_path.iterdir()) == []


def test_the_file_of_a_killed_rank_is_removed(start: Start, tmp_path: Path) -> None:
    process = start(BLOCKED_IN_C)
    process.kill()
    process.wait()
    assert len(list(tmp_path.iterdir())) == 1
    assert rank_processes(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_only_the_owner_can_read_it_and_a_link_is_not_followed(tmp_path: Path, start: Start) -> None:
    start(BLOCKED_IN_C)
    [path] = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    link = path.with_name(path.name.replace(path.name.split("-")[-1], "1.txt"))
    link.symlink_to(path)
    assert len(rank_processes(tmp_path)) == 1


def test_a_folder_that_cannot_be_written_does_not_end_the_rank(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stacks.register(tmp_path / "missing")
    assert "`dist-transformer stacks` will not see this rank" in caplog.text


def test_a_foreign_file_in_the_way_does_not_end_the_rank(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / f"{stacks._prefix()}{os.getpid()}.txt"
    path.mkdir()  # as a file of another user in a sticky folder: it cannot be removed
    stacks.register(tmp_path)
    assert f"{path}: " in caplog.text
    assert "`dist-transformer stacks` will not see this rank" in caplog.text


@pytest.mark.parametrize("is_file_there", [True, False])
def test_a_rank_that_ends_meanwhile_does_not_cost_the_answers_of_the_others(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_file_there: bool
) -> None:
    process = start(BLOCKED_IN_C, rank=1)
    with subprocess.Popen(["true"]) as other:
        other.wait()
    ended = stacks.RankProcess(other.pid, 0, "7", tmp_path / "ended.txt")
    if is_file_there:
        ended.file.write_text("")
    living = rank_processes(tmp_path)
    monkeypatch.setattr(stacks, "rank_processes", lambda folder: [ended, *living])
    assert [(dump.rank, dump.pid) for dump in dump_local("7", tmp_path)] == [(1, process.pid)]


def test_a_process_that_did_not_register_would_die_of_the_signal() -> None:
    """Why nothing is sent without looking."""
    with subprocess.Popen(["sleep", "60"]) as process:
        process.send_signal(SIGNAL)
        assert process.wait() == -SIGNAL


def test_a_node_prints_a_line_for_itself_and_short_ones_for_each_rank(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start(BLOCKED_IN_C, rank=1)
    start(BLOCKED_IN_C, rank=0)
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    stacks.main(["7"], sys.stdout, tmp_path)
    node, *ranks = map(json.loads, capsys.readouterr().out.splitlines())
    assert node == {"node": "n7", "ranks": 2}
    assert list(dict.fromkeys((rank["rank"], rank["host"]) for rank in ranks)) == [(0, "n7"), (1, "n7")]
    assert max(len(json.dumps(rank)) for rank in ranks) < 1000


def test_a_full_disk_keeps_no_rank_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    stacks.register(tmp_path)
    assert "No space left on device: `dist-transformer stacks` will not see this rank" in caplog.text
    assert list(tmp_path.iterdir()) == []
