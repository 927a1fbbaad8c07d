"""Only one job works on a run folder, and the others are told who does."""

import errno
import fcntl
import json
import multiprocessing
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dist_transformer import files
from dist_transformer.errors import MachineError, UserError
from dist_transformer.files import read_json, write_json
from dist_transformer.run.folder import RunDir
from dist_transformer.run.lock import STALE_BEATS, RunLock, while_nobody_trains

BEAT_SECONDS = 0.05
PATIENT_BEAT_SECONDS = 2.0
"""Beat by which one judges a living holder, which may miss many of its short beats in a busy moment."""
ELSEWHERE = {
    "host": "far",
    "boot": "another machine",
    "pid": 7,
    "job": "31",
    "attempt": 2,
    "token": "x",
    "started": 1.0,
}


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def _lock(run_dir: RunDir, beat_seconds: float = BEAT_SECONDS) -> RunLock:
    return RunLock(run_dir, wait_seconds=0.1, beat_seconds=beat_seconds)


def _patient_lock(run_dir: RunDir) -> RunLock:
    return _lock(run_dir, PATIENT_BEAT_SECONDS)


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _hold(folder: Path, environment: dict[str, str], release: bool) -> None:
    os.environ.update(environment)
    lock = _lock(RunDir(folder))
    lock.acquire()
    if release:
        lock.release()
    else:
        time.sleep(600)


def _other_process(run_dir: RunDir, release: bool = False, **environment: str) -> multiprocessing.Process:
    process = multiprocessing.get_context("fork").Process(
        target=_hold,
        args=(run_dir.path, environment, release),
        daemon=True,  # of a test that fails it does not stay
    )
    process.start()
    return process  # type: ignore[return-value]


def test_a_second_job_is_refused_and_told_who_works_here(run_dir: RunDir) -> None:
    first = _other_process(run_dir, SLURM_JOB_ID="12", SLURM_RESTART_COUNT="3")
    _until(run_dir.owner.exists)
    with pytest.raises(UserError) as refused:
        _patient_lock(run_dir).acquire()
    assert not isinstance(refused.value, MachineError)
    assert f"job 12 (attempt 3) with pid {first.pid} on {platform.node()} works on this run folder" in str(
        refused.value
    )
    first.kill()
    first.join()


def test_an_earlier_attempt_of_the_same_job_is_a_fault_that_may_pass(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = _other_process(run_dir, SLURM_JOB_ID="12")
    _until(run_dir.owner.exists)
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    with pytest.raises(MachineError, match="an earlier attempt of this job"):
        _patient_lock(run_dir).acquire()
    first.kill()
    first.join()


@pytest.mark.parametrize("killed", [True, False])
def test_the_lock_of_one_that_has_ended_or_was_killed_here_is_free_at_once(run_dir: RunDir, killed: bool) -> None:
    first = _other_process(run_dir, release=not killed)
    if killed:
        _until(run_dir.owner.exists)
        first.kill()
    first.join()
    assert run_dir.owner.exists() == killed
    lock = _lock(run_dir)
    lock.acquire()
    assert read_json(run_dir.owner)["pid"] == os.getpid()
    lock.release()
    assert not run_dir.owner.exists()


def test_a_holder_on_another_machine_whose_heart_beats_is_refused_though_its_lock_was_not_seen(run_dir: RunDir) -> None:
    write_json(run_dir.owner, ELSEWHERE)
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(BEAT_SECONDS):
            os.utime(run_dir.owner)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(UserError, match=r"job 31 \(attempt 2\) with pid 7 on far works on this run folder"):
            _patient_lock(run_dir).acquire()
    finally:
        stop.set()
        thread.join()
    assert read_json(run_dir.owner) == ELSEWHERE


def test_a_holder_on_another_machine_whose_heart_has_stopped_is_taken_over(run_dir: RunDir) -> None:
    write_json(run_dir.owner, ELSEWHERE)
    began = time.monotonic()
    lock = _lock(run_dir)
    lock.acquire()
    assert time.monotonic() - began > (STALE_BEATS - 1) * BEAT_SECONDS
    assert read_json(run_dir.owner)["host"] == platform.node()
    lock.release()


@pytest.mark.parametrize("seconds", [3600, -3600])
def test_a_holder_whose_clock_is_wrong_is_refused_while_its_heart_beats_and_taken_over_when_it_has_stopped(
    run_dir: RunDir, seconds: int
) -> None:
    write_json(run_dir.owner, ELSEWHERE)
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(BEAT_SECONDS):
            os.utime(run_dir.owner, (0, time.time() + seconds))

    os.utime(run_dir.owner, (0, time.time() + seconds))
    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(UserError, match="with pid 7 on far works on this run folder") as refused:
            _patient_lock(run_dir).acquire()
        assert not isinstance(refused.value, MachineError)
    finally:
        stop.set()
        thread.join()
    assert not _lock(run_dir).has_fresh_owner_elsewhere()
    with while_nobody_trains(run_dir) as nobody:
        assert nobody
    lock = _lock(run_dir)
    lock.acquire()
    assert read_json(run_dir.owner)["pid"] == os.getpid()
    lock.release()


def test_when_the_one_before_was_seen_last_is_noted_by_this_machine_s_clock(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "file_clock", lambda _: time.time() + 3600)  # the file server's is ahead
    write_json(run_dir.owner, {})
    os.utime(run_dir.owner, (0, 1500 + 3600))
    lock = _lock(run_dir)
    lock.acquire()
    assert read_json(run_dir.owner)["before_seen"] == pytest.approx(1500, abs=60)
    lock.release()


def test_a_lock_is_released_by_another_thread_than_took_it(run_dir: RunDir) -> None:
    lock = _lock(run_dir)
    thread = threading.Thread(target=lock.acquire)
    thread.start()
    thread.join()
    lock.release()
    with while_nobody_trains(run_dir) as nobody:
        assert nobody


def test_a_holder_on_another_machine_that_releases_meanwhile_leaves_the_folder_free(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json(run_dir.owner, ELSEWHERE)
    lock, read = _lock(run_dir), RunLock._holder

    def released(self: RunLock) -> dict[str, object]:
        holder = read(self)
        run_dir.owner.unlink(missing_ok=True)
        return holder

    monkeypatch.setattr(RunLock, "_holder", released)
    lock.acquire()
    assert read_json(run_dir.owner)["pid"] == os.getpid()
    lock.release()


def test_a_lock_that_outlives_its_holder_says_since_when(run_dir: RunDir) -> None:
    first = _other_process(run_dir)
    _until(run_dir.owner.exists)
    os.kill(first.pid or 0, 19)  # frozen: it holds the lock, and its heart stands still
    now = run_dir.owner.stat().st_mtime
    os.utime(run_dir.owner, (now - 100, now - 100))
    with pytest.raises(MachineError, match=r"last sign of life is 1\d\d s old\): it is dead or frozen"):
        _lock(run_dir).acquire()
    first.kill()
    first.join()


def test_the_heart_beats_while_the_lock_is_held(run_dir: RunDir) -> None:
    lock = _lock(run_dir)
    lock.acquire()
    os.utime(run_dir.owner, (0, 0))
    _until(lambda: run_dir.owner.stat().st_mtime > 0)
    lock.release()


@pytest.mark.parametrize("standard_error", ["/dev/null", "/dev/full"])
def test_a_holder_that_was_taken_over_ends_at_once(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, standard_error: str
) -> None:
    with Path(standard_error).open("w") as file, monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", file)
        first = _other_process(run_dir)
    _until(run_dir.owner.exists)
    owner = run_dir.owner.with_name("new")
    owner.write_text(json.dumps(ELSEWHERE))
    owner.replace(run_dir.owner)
    first.join(120)
    first.kill()
    assert first.exitcode == 2  # its job is not requeued against the new one


def test_a_disk_that_goes_away_and_comes_back_ends_no_heartbeat(run_dir: RunDir) -> None:
    lock = _lock(run_dir)
    lock.acquire()
    away = run_dir.owner.with_name("away")
    run_dir.owner.rename(away)
    os.utime(away, (0, 0))
    threading.Event().wait(3 * BEAT_SECONDS)
    away.rename(run_dir.owner)
    _until(lambda: run_dir.owner.stat().st_mtime > 0)
    lock.release()


@pytest.mark.parametrize("content", [None, b"", b"{", b"{}", b"[]", b'{"pid": 7}', b"\xff"], ids=str)
def test_a_record_that_was_removed_or_damaged_comes_back_with_the_next_beat(
    run_dir: RunDir, content: bytes | None
) -> None:
    lock = _lock(run_dir)
    lock.acquire()
    mine = run_dir.owner.read_bytes()
    if content is None:
        run_dir.owner.unlink()
    else:
        run_dir.owner.write_bytes(content)
    _until(lambda: run_dir.owner.exists() and run_dir.owner.read_bytes() == mine)
    lock.release()
    assert not run_dir.owner.exists()


def test_a_damaged_record_of_a_dead_holder_keeps_nobody_from_starting(run_dir: RunDir) -> None:
    run_dir.owner.write_text('{"host": "far"}')
    lock = _lock(run_dir)
    lock.acquire()
    assert read_json(run_dir.owner)["pid"] == os.getpid()
    lock.release()


def test_a_run_folder_that_is_gone_is_not_made_anew_by_its_holder(run_dir: RunDir) -> None:
    folder = run_dir.path / "run"
    folder.mkdir()
    lock = _lock(RunDir(folder))
    lock.acquire()
    folder.rename(folder.with_name("moved"))
    with pytest.raises(FileNotFoundError):  # a beat of the heart, whose thread tries again with the next
        lock._touch({})
    assert not folder.exists()
    lock.release()


def test_one_that_was_taken_over_leaves_the_new_holders_record_alone(run_dir: RunDir) -> None:
    lock = RunLock(run_dir, beat_seconds=60)
    lock.acquire()
    write_json(run_dir.owner, ELSEWHERE)
    lock.release()
    assert read_json(run_dir.owner) == ELSEWHERE


def test_on_a_disk_without_locks_the_heartbeat_alone_decides(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, "no locks here")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    first = _lock(run_dir)
    first.acquire()
    with pytest.raises(UserError, match=f"with pid {os.getpid()}"):
        _patient_lock(run_dir).acquire()
    first.release()
    second = _lock(run_dir)
    second.acquire()
    second.release()
