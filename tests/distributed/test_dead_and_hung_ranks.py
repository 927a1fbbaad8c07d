"""P7 on real ranks: when one rank dies or hangs, all leave within a set time, with a named cause."""

import signal
import time
from contextlib import suppress

import psutil
import pytest
from running import Command, records, wait_for_step

from dist_transformer.errors import EXIT_FAILED, EXIT_HANG
from dist_transformer.stacks import rank_processes

pytestmark = pytest.mark.slow

HANG_SECONDS = 6


def start_and_strike(command: Command, name: str, number: signal.Signals, stage: int) -> tuple[int, str, float]:
    """Trains on two ranks, sends a signal to rank 1 in the middle; exit code, what was said, seconds until rank 0 left."""
    arguments = ("training.max_steps=100000", f"training.hang_seconds={HANG_SECONDS}", f"training.zero_stage={stage}")
    process = command.start("train", "small.yaml", f"run.name={name}", *arguments, "--ranks", 2)
    wait_for_step(command.folder / "runs" / name, 4)
    first, second = (rank_of(process.pid, rank) for rank in (0, 1))
    struck = time.monotonic()
    second.send_signal(number)
    first.wait(timeout=120)
    seconds = time.monotonic() - struck
    with suppress(psutil.NoSuchProcess):
        second.kill()  # a stopped one would only be ended after the launcher's patience
    out, err = process.communicate(timeout=120)
    return process.returncode, out + err, seconds


def rank_of(launcher: int, rank: int) -> psutil.Process:
    """By what it says of itself: its environment, as seen from outside, is that of the launcher."""
    children = {child.pid: child for child in psutil.Process(launcher).children()}
    return next(children[found.pid] for found in rank_processes() if found.pid in children and found.rank == rank)


def test_when_a_rank_dies_the_other_leaves_at_once_and_says_so(command):
    code, said, seconds = start_and_strike(command, "dead-rank", signal.SIGKILL, 1)
    assert code == EXIT_FAILED
    assert "rank 1" in said
    assert "SIGKILL" in said
    assert seconds < HANG_SECONDS


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_when_a_rank_hangs_the_other_leaves_within_the_time_limit_in_every_stage(command, stage):
    code, said, seconds = start_and_strike(command, f"hung-rank-{stage}", signal.SIGSTOP, stage)
    assert code in (EXIT_FAILED, EXIT_HANG)
    assert "rank 0: no progress for" in said or "failed: a rank did not come to a collective" in said
    assert seconds < 3 * HANG_SECONDS


def test_records_of_a_killed_run_are_whole_lines(command):
    assert all(record["step"] for record in records(command.folder / "runs" / "dead-rank"))
