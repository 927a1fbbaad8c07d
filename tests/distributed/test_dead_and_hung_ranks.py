"""P7 on real ranks: when one rank dies or hangs, all leave within a set time, with a named cause."""

import os
import signal
import time
from pathlib import Path

import pytest
from running import Command, records

from dist_transformer.errors import EXIT_FAILED, EXIT_HANG

pytestmark = pytest.mark.slow

HANG_SECONDS = 6
LAUNCHER_GRACE_SECONDS = 30


def start_and_strike(command: Command, name: str, number: signal.Signals, stage: int) -> tuple[int, str, float]:
    """Trains on two ranks, sends a signal to rank 1 in the middle; exit code, what was said, seconds until the end."""
    arguments = ("training.max_steps=100000", f"training.hang_seconds={HANG_SECONDS}", f"training.zero_stage={stage}")
    process = command.start("train", "small.yaml", f"run.name={name}", *arguments, "--ranks", 2)
    metrics = command.folder / "runs" / name / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and len(metrics.read_text(encoding="utf-8").splitlines()) > 3):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    children = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    second = next(
        pid for pid in children if b"RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes().replace(b"LOCAL_", b"_")
    )
    struck = time.monotonic()
    os.kill(second, number)
    out, err = process.communicate(timeout=120)
    return process.returncode, out + err, time.monotonic() - struck


def test_when_a_rank_dies_the_other_leaves_at_once_and_says_so(command):
    code, said, seconds = start_and_strike(command, "dead-rank", signal.SIGKILL, 1)
    assert code == EXIT_FAILED
    assert "rank 1" in said
    assert "SIGKILL" in said
    assert seconds < HANG_SECONDS + LAUNCHER_GRACE_SECONDS


@pytest.mark.parametrize("stage", [1, 3])
def test_when_a_rank_hangs_the_other_leaves_within_the_time_limit_in_both_kinds_of_stage(command, stage):
    code, said, seconds = start_and_strike(command, f"hung-rank-{stage}", signal.SIGSTOP, stage)
    assert code in (EXIT_FAILED, EXIT_HANG)
    assert "rank 0" in said
    assert "imed out" in said or "no progress" in said
    assert seconds < 3 * HANG_SECONDS + LAUNCHER_GRACE_SECONDS


def test_records_of_a_killed_run_are_whole_lines(command):
    assert all(record["step"] for record in records(command.folder / "runs" / "dead-rank"))
