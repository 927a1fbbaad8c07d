"""Real loader processes that die, hang, meet bad rows, are signalled, or have no shared memory to start with."""

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from faulty_builders import FaultyBuilder, request, stream
from running import Command, records

from dist_transformer.errors import DataError, MachineError
from dist_transformer.stop_request import STOP_SIGNALS

pytestmark = pytest.mark.slow


def loader_processes() -> list[int]:
    return [process.pid for process in multiprocessing.active_children() if process.pid is not None]


def test_a_killed_process_is_named_in_a_fault_of_the_machine():
    windows = stream(FaultyBuilder(3, "kill_itself"))
    assert windows.take(request(0)).request == request(0)
    (killed,) = loader_processes()
    with pytest.raises(MachineError, match=rf"a loader process ended .*{killed}.* for want of memory.*loader_workers"):
        for number in range(1, 4):
            windows.take(request(number))


def test_a_process_that_hangs_prints_where_it_stands_and_ends_in_a_message():
    program = "from faulty_builders import hang_in_window_one; hang_in_window_one()"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert (
        "no window within data.stall_seconds = 1 s (waiting for WindowKey(epoch=0, segment=0, lane=0, window=1))"
        in (done.stdout)
    )
    assert "raise data.stall_seconds" in done.stdout
    assert "does not deliver; its threads:" in done.stderr
    assert "in wait_for_a_dead_disk" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_error_in_a_window_that_came_early_is_raised_when_its_turn_comes():
    windows = stream(FaultyBuilder(9, "meet_a_bad_row_group"), order=[9, 0, 1, 2])
    for number in (0, 1, 2):
        assert windows.take(request(number)).row_ids.tolist() == [number]
    with pytest.raises(DataError, match=r"^train-00007.parquet: row group 3 cannot be read$"):
        windows.take(request(9))
    assert windows.take(request(10)).row_ids.tolist() == [10]


def test_stop_signals_change_nothing():
    windows = stream(FaultyBuilder(0, "no_fault"))
    windows.take(request(0))
    processes = loader_processes()
    for number in STOP_SIGNALS:
        for process in processes:
            os.kill(process, number)
    for number in range(1, 20):
        assert windows.take(request(number)).row_ids.tolist() == [number]
    assert loader_processes() == processes


def train_with_shared_memory(command: Command, name: str, pages: int) -> "subprocess.CompletedProcess[str]":
    """Trains in a mount namespace of its own, where /dev/shm has so many free pages of 4 KiB."""
    mount = f"mount -t tmpfs -o size={4 * (pages + 1)}k tmpfs /dev/shm && head -c 4096 /dev/zero > /dev/shm/taken"
    train = [
        sys.executable,
        "-m",
        "dist_transformer",
        "train",
        "small.yaml",
        f"run.name={name}",
        "data.loader_workers=1",
    ]
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh", *train],
        cwd=command.folder, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip


needs_mounts = pytest.mark.skipif(
    os.geteuid() != 0
    or subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode != 0,
    reason="needs root and a mount namespace",
)


@needs_mounts
def test_full_shared_memory_is_a_fault_of_the_machine_that_says_what_to_do(command):
    done = train_with_shared_memory(command, "shared-memory-full", pages=0)
    assert done.returncode == MachineError.exit_code
    assert "the loader processes cannot be started ([Errno 28] No space left on device)" in done.stderr
    assert "Free it, or set data.loader_workers=0" in done.stderr
    assert "Traceback" not in done.stderr


@needs_mounts
def test_a_little_shared_memory_is_enough_however_large_the_windows(command, train_small):
    """Windows come through pipes."""
    done = train_with_shared_memory(command, "shared-memory-little", pages=16)
    assert done.returncode == 0, done.stderr
    expected = records(train_small("shared-memory-none"))
    found = records(command.folder / "runs" / "shared-memory-little")
    assert [r["batch_digest"] for r in found] == [r["batch_digest"] for r in expected]
