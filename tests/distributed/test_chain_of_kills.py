"""P2 and P3 at their hardest: killed again and again at random moments, a run ends as if nothing had happened."""

import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from running import Command, newest_step, records, wait_for_start, wait_for_step
from test_resume import assert_same_run

pytestmark = pytest.mark.slow

NUM_ROWS = 600
NUM_EPOCHS = 5
SETTINGS = (
    f"training.max_epochs={NUM_EPOCHS}", "training.max_steps=null", "checkpoints.every_steps=2", "data.audit=true",
    "data.window_rows=24", "schedule.warmup_steps=1", "optimizer.learning_rate=0.001",
)  # fmt: skip
MODIFIED = (
    "data.on_the_fly=true",
    "data.modifiers={upper_case: 0.2, no_final_punctuation: 0.2, typos: 0.2, noise: 0.1}",
)
END_SECONDS = 240


class Strikes:
    """Starts one run again and again, and kills one of its processes at a random moment of its training."""

    def __init__(self, command: Command, name: str, seed: int, *more: str) -> None:
        self._command, self._train = command, ("train", "small.yaml", f"run.name={name}", *SETTINGS, *more)
        self._random = random.Random(seed)
        self._starts = 0
        self.run = command.folder / "runs" / name

    def strike(self, victim: str, num_ranks: int) -> None:
        """`victim`: "rank" or "loader process"."""
        workers = f"data.loader_workers={victim == 'loader process':d}"
        process = self._command.start(*self._train, workers, "--ranks", num_ranks)
        self._starts += 1
        wait_for_start(process, self.run, self._starts)
        wait_for_step(self.run, newest_step(self.run) + self._random.randint(1, 4))
        time.sleep(self._random.uniform(0, 0.3))  # the random moment: within a step, a save, a read
        ranks = [process.pid] if num_ranks == 1 else ranks_of(process.pid)
        assert len(ranks) == num_ranks, process.poll()
        struck = self._random.choice(ranks)
        os.kill(struck if victim == "rank" else loader_process_of(struck), signal.SIGKILL)
        out, err = process.communicate(timeout=END_SECONDS)
        assert process.returncode == (-signal.SIGKILL if struck == process.pid and victim == "rank" else 1), out + err
        assert victim == "rank" or re.search(r"loader process \d+ was killed by SIGKILL", err)

    def finish(self, num_ranks: int) -> Path:
        self._command(*self._train, "--ranks", num_ranks)
        return self.run


def children_of(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            yield from map(int, (task / "children").read_text(encoding="utf-8").split())


def is_forked_by_server(pid: int) -> bool:
    return b"multiprocessing.forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes()


def ranks_of(launcher: int) -> list[int]:
    """The ranks that `train --ranks` started."""
    return [pid for pid in children_of(launcher) if b"dist_transformer" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def loader_process_of(rank: int) -> int:
    """The one loader process of a rank: a child of the server that it is forked from, with the same command line."""
    (server,) = [pid for pid in children_of(rank) if is_forked_by_server(pid)]
    (worker,) = children_of(server)
    return worker


@pytest.fixture(scope="module")
def undisturbed(train_small) -> Path:
    return train_small("chain-undisturbed", *SETTINGS)


def test_killed_again_and_again_on_1_2_3_and_4_ranks_in_turn_a_run_sees_the_same_batches_and_each_row_once(
    command: Command, undisturbed
):
    strikes = Strikes(command, "chain-other-ranks", seed=4)
    for victim, num_ranks in zip(("rank", "loader process") * 2, (2, 1, 3, 4), strict=True):
        strikes.strike(victim, num_ranks)
    run = strikes.finish(1)
    keys = ("step", "batch_digest", "total_target_tokens")
    assert [[r[k] for k in keys] for r in records(run)] == [[r[k] for k in keys] for r in records(undisturbed)]
    assert [r["loss"] for r in records(run)] == pytest.approx([r["loss"] for r in records(undisturbed)], rel=1e-5)
    assert not list((run / "checkpoints").glob("*.damaged"))
    for epoch in range(NUM_EPOCHS):
        audited = [r for r in records(run, "batch", "audit.jsonl") if r["epoch"] == epoch]
        rows = Counter(row for record in audited for ids in record["rows"].values() for row in ids)
        assert rows == dict.fromkeys(range(NUM_ROWS), 1)


def test_killed_four_times_on_two_ranks_a_run_ends_with_the_same_weights(command: Command, train_small):
    expected = train_small("chain-two-ranks", *SETTINGS, *MODIFIED, ranks=2)
    strikes = Strikes(command, "chain-same-ranks", 3, *MODIFIED)
    for victim in ("rank", "loader process") * 2:
        strikes.strike(victim, 2)
    assert_same_run(strikes.finish(2), expected)
