"""Share of its time that a job keeps whose ranks are killed again and again, beside the prediction of `simulate`.

    python benchmarks/simulation.py            # as root: starts a Slurm on this machine (Debian), about five minutes

It is a tiny run on two nodes of a real cluster, as in slurm_recovery.py. Each attempt lives for a random, exponential
time, then one of its ranks, also drawn at random, is killed with SIGKILL; the batch script requeues the job. Steps up
to the checkpoint that the job resumes from count as kept. The first attempt, which also prepares the corpus, is not
counted. An attempt that ends otherwise counts as one that failed then.

The simulation uses the means of the same run: of a step, of a save and its write, from the start of an attempt to its
first step, from a kill to the next attempt. *These kills*: it also uses the times of the kills, so that only the model
is tested. *Expected*: the closed form for kills with that mean; *8 of 10 series*: the range of chance with so few
kills.
"""

import argparse
import contextlib
import os
import random
import re
import shutil
import signal
import statistics
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import common
import numpy as np
from slurm_recovery import Cluster, Run, until

from dist_transformer.planning.failures import Conditions, expected_attempt, simulated_attempts
from dist_transformer.run.attempts import newest_checkpoint

ENDLESS = 1e9
NUM_SERIES = 2000


@dataclass
class Killed:
    """An attempt, from its beginning to that of the next one; times in seconds."""

    life: float
    is_killed: bool
    until_first_step: float | None
    training_seconds: float
    saves_seconds: list[float]
    steps_made: int
    steps_kept: int
    delay: float


def has_another(run: Run, number: int) -> bool:
    """True if the attempt after this one has begun."""
    return len(run.attempts()) > number + 1


def kill_a_rank(run: Run, rank: int) -> bool:
    """Kills a rank. False: there is no such process, as in an attempt that has only just begun."""
    command = b"\0".join([b"-m", b"dist_transformer", b"train", str(run.run_dir.path).encode()])
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (process / "environ").read_bytes().split(b"\0")
            if command in (process / "cmdline").read_bytes() and b"RANK=%d" % rank in variables:
                os.kill(int(process.name), signal.SIGKILL)
                return True
    return False


def one_attempt(run: Run, number: int, life: float, rank: int) -> Killed:
    """Kills attempt `number`, which has begun, after `life` seconds; returns when the next one has begun."""
    began, start = run.attempts()[number]["time"], newest_step(run)
    has_ended = partial(has_another, run, number)
    while not (is_killed := time.time() >= began + life and kill_a_rank(run, rank)) and not has_ended():
        time.sleep(0.05)
    killed = time.time() if is_killed else run.ends()[number]["time"]
    records = [r for r in run.records(run.run_dir.metrics) if r["event"] == "train" and r["time"] > began]
    until(has_ended)
    after = run.attempts()[number + 1]["time"]
    saves = [record["save_seconds"] for record in records if record["save_seconds"]]
    training = records[-1]["time"] - records[0]["time"] - sum(saves) if records else 0.0
    return Killed(
        life=killed - began,
        is_killed=is_killed,
        until_first_step=records[0]["time"] - began if records else None,
        training_seconds=training,
        saves_seconds=saves,
        steps_made=records[-1]["step"] - start if records else 0,
        steps_kept=newest_step(run) - start,
        delay=after - killed,
    )


def newest_step(run: Run) -> int:
    """Returns the step of the checkpoint that the run resumes from."""
    return int((newest_checkpoint(run.run_dir) or "step_0").removeprefix("step_"))


def written_seconds(run: Run) -> float:
    """Returns the mean time from the beginning of a save to the complete checkpoint, by the log."""
    found = re.findall(r"saved step_\d+ in ([\d.]+) s", run.run_dir.log.read_text(encoding="utf-8"))
    return statistics.mean(float(seconds) for seconds in found)


def killed_again_and_again(run: Run, arguments: argparse.Namespace) -> list[Killed]:
    until(lambda: newest_step(run) > 0)
    drawn, attempts = random.Random(arguments.seed), []
    one_attempt(run, 0, 0.0, 1)
    for number in range(1, arguments.kills + 1):
        life = drawn.expovariate(1 / arguments.mean_seconds)
        attempts.append(one_attempt(run, number, life, drawn.randrange(2)))
        print(f"attempt {number}: {attempts[-1].life:.1f} s, {attempts[-1].steps_kept} steps kept", flush=True)
    return attempts


def conditions_of(
    attempts: list[Killed], written: float, mean_life: float, every_steps: int
) -> tuple[Conditions, float]:
    """Returns the means of the run, and the seconds of a step."""
    spans = max(1, sum(max(0, each.steps_made - 1) for each in attempts))
    step = sum(each.training_seconds for each in attempts) / spans
    saves = max(1, sum(each.steps_made // every_steps for each in attempts))
    save = sum(sum(each.saves_seconds) for each in attempts) / saves
    first = statistics.mean(each.until_first_step for each in attempts if each.until_first_step is not None)
    delay = statistics.mean(each.delay for each in attempts)
    conditions = Conditions(mean_life, 0.0, delay, max(0.0, first - step), save, max(0.0, written - save))
    return conditions, step


def shares(conditions: Conditions, interval: float, lives: np.ndarray) -> np.ndarray:
    """Returns the kept share of the wall time of each row of attempts."""
    kept, seconds, _ = simulated_attempts(conditions, interval, np.full(lives.shape, ENDLESS), lives)
    return kept.sum(axis=-1) / (seconds + conditions.requeue_seconds).sum(axis=-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--mean-seconds", type=float, default=35, help="of an attempt's life")
    parser.add_argument("--every-steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    arguments = common.arguments_of(parser, rounds=1)
    found = common.begin(threads=1)
    cluster, folder = Cluster(), Path(tempfile.mkdtemp(prefix="simulation-"))
    try:
        settings = [f"checkpoints.every_steps={arguments.every_steps}", "slurm.max_restarts_without_progress=1000"]
        run = Run(cluster, folder, "killed", *settings)
        attempts = killed_again_and_again(run, arguments)
        written = written_seconds(run)
        run.cancel()
    finally:
        cluster.close()
        shutil.rmtree(folder, ignore_errors=True)
    figures = report(attempts, written, arguments)
    common.finish(arguments, found, {**figures, "attempts": [vars(each) for each in attempts]})


def report(attempts: list[Killed], written: float, arguments: argparse.Namespace) -> common.Figures:
    """Prints the tables."""
    conditions, step = conditions_of(attempts, written, arguments.mean_seconds, arguments.every_steps)
    interval = arguments.every_steps * step
    lives = np.array([each.life for each in attempts])
    foretold, _, _ = simulated_attempts(conditions, interval, np.full(lives.shape, ENDLESS), lives)
    rows = [
        [
            *(f"{each.life:.1f}", "killed" if each.is_killed else "itself", f"{each.steps_made}"),
            *(f"{each.steps_kept}", f"{round(kept / step)}", f"{each.delay:.1f}"),
        ]
        for each, kept in zip(attempts, foretold, strict=True)
    ]
    header = ["attempt lived s", "ended", "steps", "kept", "foretold", "to the next s"]
    print(f"\n{common.markdown_table(header, rows)}")
    drawn = np.random.default_rng(arguments.seed)
    series = drawn.exponential(arguments.mean_seconds, (NUM_SERIES, len(attempts)))
    expected = expected_attempt(conditions, interval)
    wall = sum(each.life + each.delay for each in attempts)
    low, high = np.quantile(shares(conditions, interval, series), [0.1, 0.9])
    figures = {
        "measured": sum(each.steps_kept for each in attempts) * step / wall,
        "these_kills": float(shares(conditions, interval, lives)),
        "expected": expected.kept / expected.wall,
        "low": float(low),
        "high": float(high),
        "step_seconds": step,
        "save_seconds": conditions.save_seconds,
        "write_seconds": conditions.write_seconds,
        "restart_seconds": conditions.restart_seconds,
        "requeue_seconds": conditions.requeue_seconds,
    }
    shown = [f"{figures[name]:.1%}" for name in ("measured", "these_kills", "expected")]
    header = ["kept of the wall time", "measured", "these kills", "expected", "8 of 10 series"]
    print(f"\n{common.markdown_table(header, [[f'{len(attempts)} kills', *shown, f'{low:.1%} to {high:.1%}']])}")
    fed = [name for name in figures if name.endswith("seconds")]
    print(f"\n{common.markdown_table(['fed with', 's'], [[name, f'{figures[name]:.3f}'] for name in fed])}")
    return figures


if __name__ == "__main__":
    main()
