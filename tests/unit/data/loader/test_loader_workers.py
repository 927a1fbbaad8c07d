"""Real loader processes that die, hang, meet bad rows, are signalled, or have no shared memory to start with."""

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import Mock

import pytest
from faulty_builders import PATIENT, FaultyBuilder, request, stream
from running import NOT_INHERITED, Command, records, without

from dist_transformer.data.loader import workers
from dist_transformer.data.loader.workers import LoaderSettings, WindowStream
from dist_transformer.errors import DataError, MachineError
from dist_transformer.processes.stop_request import STOP_SIGNALS

pytestmark = pytest.mark.slow


def started(builder: FaultyBuilder, settings: LoaderSettings = PATIENT) -> tuple[WindowStream, list[int]]:
    """A stream that has delivered window 0, and its processes, of which one may have died of the fault already."""
    windows = stream(builder, settings=settings)
    take(windows, [0])
    return windows, [process.pid for process in windows._processes]


def loader_processes() -> set[int]:
    return {process.pid for process in multiprocessing.active_children() if process.pid is not None}


def take(windows: WindowStream, numbers: Iterable[int]) -> list[int]:
    """The numbers of these windows, as they say themselves."""
    return [int(windows.take(request(number)).row_ids[0]) for number in numbers]


@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_killed_process_is_named_in_a_fault_of_the_machine(num_workers):
    windows, processes = started(FaultyBuilder(0, "no_fault"), LoaderSettings(1, num_workers, 60))
    os.kill(processes[0], signal.SIGKILL)
    with pytest.raises(
        MachineError, match=rf"^loader process {processes[0]} was killed by SIGKILL.*memory.*data.loader_workers$"
    ):
        take(windows, range(1, 100))


def test_a_process_that_is_killed_while_it_hands_over_a_window_does_not_leave_the_trainer_waiting_for_the_rest():
    windows, (process,) = started(FaultyBuilder(2, "kill_itself"))
    with pytest.raises(MachineError, match=f"loader process {process} was killed by SIGKILL"):
        take(windows, [1, 2])


def test_a_window_for_which_this_process_has_no_memory_is_named_at_once(monkeypatch):
    monkeypatch.setattr(Connection, "recv", Mock(side_effect=MemoryError))
    monkeypatch.setattr(workers, "EXIT_SECONDS", 0.0)
    windows = stream(FaultyBuilder(0, "no_fault"))
    with pytest.raises(MachineError, match=r"is silent \(exit code None\), perhaps for want of memory"):
        take(windows, range(1))


def test_an_error_of_our_own_in_a_process_is_no_fault_of_the_machine():
    windows, (process,) = started(FaultyBuilder(1, "divide_by_zero"))
    with pytest.raises(RuntimeError, match=f"loader process {process} failed; its traceback is printed above"):
        take(windows, [1])


def test_too_few_open_files_to_start_with_are_a_fault_of_the_machine_that_says_what_to_do():
    windows, _ = started(FaultyBuilder(0, "no_fault"))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))  # those that are open stay open
    try:
        with pytest.raises(MachineError, match=r"cannot be started \(.*Too many open files.*set data.loader_workers=0"):
            stream(FaultyBuilder(0, "no_fault"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert take(windows, [1, 2]) == [1, 2]


def program(name: str) -> "subprocess.CompletedProcess[str]":
    """Runs a function of faulty_builders.py as a program of its own."""
    return subprocess.run(
        [sys.executable, "-c", f"import faulty_builders; faulty_builders.{name}()"],
        cwd=Path(__file__).parents[3] / "helpers",
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )


def test_a_process_is_not_said_to_hang_after_the_whole_job_was_suspended():
    done = program("be_stopped_in_window_one")
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_a_process_that_hangs_prints_where_it_stands_and_ends_in_a_message():
    done = program("hang_in_window_one")
    assert (
        "no window within 1 s, half of training.hang_seconds (waiting for window 1 of lane 0 of epoch 0)" in done.stdout
    )
    assert "raise training.hang_seconds" in done.stdout
    assert "does not deliver; its threads:" in done.stderr
    assert "in wait_for_a_dead_disk" in done.stderr
    assert "the loader process ended with -9" in done.stdout
    assert "Traceback" not in done.stderr


def test_an_error_in_a_window_that_came_early_is_raised_when_its_turn_comes():
    windows = stream(FaultyBuilder(9, "meet_a_bad_row_group"), order=[9, 0, 1, 2])
    assert take(windows, [0, 1, 2]) == [0, 1, 2]
    with pytest.raises(DataError, match=r"^train-00007.parquet: row group 3 cannot be read$"):
        windows.take(request(9))
    assert take(windows, [10]) == [10]


def test_stop_signals_change_nothing():
    windows, processes = started(FaultyBuilder(0, "no_fault"))
    for number in STOP_SIGNALS:
        for process in processes:
            os.kill(process, number)
    assert take(windows, range(1, 20)) == list(range(1, 20))
    assert set(processes) <= loader_processes()


@pytest.mark.skipif(
    os.geteuid() != 0
    or subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode != 0,
    reason="needs root and a mount namespace",
)
def test_a_full_shared_memory_mount_hinders_no_loader_process(command: Command, train_small):
    mount = "mount -t tmpfs -o size=64k tmpfs /dev/shm && ! cp /dev/zero /dev/shm/full"
    train = [sys.executable, "-m", "dist_transformer", "train", "small.yaml", "run.name=shared-memory-full"]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh", *train, "data.loader_workers=1"],
        cwd=command.folder, env=without(NOT_INHERITED), capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found, expected = records(command.folder / "runs" / "shared-memory-full"), records(train_small("shared-memory"))
    assert [r["batch_digest"] for r in found] == [r["batch_digest"] for r in expected]
