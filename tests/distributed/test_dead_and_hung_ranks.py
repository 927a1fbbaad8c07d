"""P7 on real ranks: when one rank dies or hangs, all leave within a set time, with a named cause."""

import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from running import NOT_INHERITED, Command, records, wait_for_step, without

from dist_transformer.errors import EXIT_FAILED, EXIT_HANG
from dist_transformer.processes.stacks import rank_processes

pytestmark = pytest.mark.slow

HANG_SECONDS = 6
LONG_SECONDS = 200
"""Half of it is more than a busy machine needs for what takes seconds."""


def start_and_strike(
    command: Command, name: str, number: signal.Signals, stage: int, hang_seconds: int
) -> tuple[int, str, float]:
    """Trains on two ranks, sends a signal to rank 1 in the middle; exit code, what was said, seconds until rank 0 left."""
    arguments = ("training.max_steps=100000", f"training.hang_seconds={hang_seconds}", f"training.zero_stage={stage}")
    process = command.start("train", "small.yaml", f"run.name={name}", *arguments, "--ranks", 2)
    wait_for_step(command.folder / "runs" / name, 4)
    first, second = (rank_of(process.pid, rank) for rank in (0, 1))
    struck = time.monotonic()
    second.send_signal(number)
    first.wait(timeout=240)
    seconds = time.monotonic() - struck
    with suppress(psutil.NoSuchProcess):
        second.kill()  # a stopped one would only be ended after the launcher's patience
    out, err = process.communicate(timeout=240)
    return process.returncode, out + err, seconds


def rank_of(launcher: int, rank: int) -> psutil.Process:
    """By what it says of itself: its environment, as seen from outside, is that of the launcher."""
    children = {child.pid: child for child in psutil.Process(launcher).children()}
    return next(children[found.pid] for found in rank_processes() if found.pid in children and found.rank == rank)


def test_when_a_rank_dies_the_other_leaves_at_once_and_says_so(command):
    code, said, seconds = start_and_strike(command, "dead-rank", signal.SIGKILL, 1, LONG_SECONDS)
    assert code == EXIT_FAILED
    assert "rank 1" in said
    assert "SIGKILL" in said
    assert "another rank has left in the middle of a collective" in said
    assert seconds < LONG_SECONDS / 2


@pytest.mark.parametrize("stage", [1, 3])  # collectives of ours, and DeepSpeed's own
def test_when_a_rank_hangs_the_other_leaves_within_the_time_limit(command, stage):
    code, said, seconds = start_and_strike(command, f"hung-rank-{stage}", signal.SIGSTOP, stage, HANG_SECONDS)
    assert code in (EXIT_FAILED, EXIT_HANG)
    assert "rank 0: no progress for" in said or "failed: a rank did not come to a collective" in said
    assert seconds < LONG_SECONDS / 2


def train_with(command: Command, fault: str, name: str, *overrides: str) -> None:
    program = [sys.executable, str(Path(__file__).with_name("faulty_train.py")), fault, "all", "small.yaml"]
    done = subprocess.run(
        [*program, f"run.name={name}", *overrides, "2"],
        cwd=command.folder, env=without(NOT_INHERITED), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_two_pieces_of_work_come_without_progress_between_them(command):
    """Micro-batches, windows, tokens of a search, tensors of a checkpoint: a step may be longer than the time limit."""
    settings = ("data.max_tokens=auto", "data.filters.max_tokens=24", "data.window_rows=20")
    often = "validation={every_steps: 2, translate: true, max_sentences: 8, beam_size: 2}"
    for steps in (4, 6):  # from the beginning, and from a checkpoint
        train_with(command, "needs a word", "told", *settings, often, f"training.max_steps={steps}")


def test_all_ranks_hear_that_the_first_one_cuts_back_the_records(command, train_small):
    train_small("long-records", "training.max_steps=4", "data.audit=true", ranks=2)
    train_with(command, "long records", "long-records", "training.max_steps=6", "data.audit=true")
    assert (command.folder / "heard_of_records").read_text(encoding="utf-8").startswith("..")


def test_records_of_a_killed_run_are_whole_lines(command):
    assert all(record["step"] for record in records(command.folder / "runs" / "dead-rank"))
