"""Runs whose ranks, nodes, loader processes, launchers and controller are killed at random: what is lost, and is it foretold?

    python benchmarks/random_kills.py          # as root: starts a Slurm of seven nodes on this machine (Debian); about an hour

A tiny run, with `training.same_bits`, on three nodes of a real cluster and a spare one; each start of ranks lives for a
random, exponential time and then loses what the table of kinds says. Nodes that died return later, and a requeued job has
all its nodes again; without a spare node (`--spare-nodes 0`) the number of ranks goes down and up. Each series of kills is
one run, from `submit` to its end. All of them must end with the global batches and the weights, bit by bit, of a run that
nothing disturbed; the classes of goodput must add up to the time since `submit`; the checkpoints must be undamaged.

The simulation of `dist-transformer simulate` uses the means of the same run: of a step, of a save and its write, from
the start of an attempt to its first step, from a kill to the next attempt. *These kills*: it also uses the times of the
kills, so that only the model is tested. *Expected*: the closed form for kills with that mean; *8 of 10 series*: the
range of chance with so few kills.
"""

import argparse
import contextlib
import hashlib
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import common
import numpy as np
import psutil
from slurm_recovery import Cluster, Run, until

from dist_transformer.files import read_json
from dist_transformer.planning.failures import Conditions, expected_attempt
from dist_transformer.run.attempts import newest_checkpoint
from dist_transformer.run.goodput import CLASSES, goodput_of

NUM_NODES = 7
"""Four for the job, and others: a node that died returns once the job has started without it."""
NUM_SERIES = 2000
KINDS = {
    "rank": 24,
    "rank during a save": 16,
    "loader process": 16,
    "launcher": 12,
    "node": 14,
    "node of the batch script": 4,
    "controller": 8,
    "told to save": 6,
}
"""Kinds of kills with their weights. Launcher: the srun that started the ranks. Told to save: no kill, but a requeue."""
SETTINGS = (
    "slurm.nodes=3",
    "slurm.max_restarts_without_progress=1000",
    "data.lanes=6",
    "data.max_tokens=384",
    "data.filters.max_tokens=96",
    "data.loader_workers=1",
    "training.same_bits=true",
    "schedule.warmup_steps=100",
)


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


@dataclass
class Series:
    """One run that is disturbed again and again: its attempts that another one followed, and the kills by kind."""

    run: Run
    every_steps: int
    attempts: list[Killed] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)
    killed_at: float | None = None
    start: int = 0
    released: int = 0
    asked_at: float = 0.0

    def look(self) -> None:
        """Notes the attempt before the newest one, whose ranks have not yet cut the records of its lost steps."""
        attempts = self.run.attempts()
        if len(attempts) < len(self.attempts) + 2:
            return
        began, after = (attempts[len(self.attempts) + number]["time"] for number in (0, 1))
        killed = self.killed_at
        if killed is None or killed < began:  # it ended by itself: as Slurm or the batch script recorded
            ends = [end["time"] for end in self.run.ends() if began < end["time"] <= after]
            killed = min(ends, default=after)
        records = [r for r in self.run.records(self.run.run_dir.metrics) if r["event"] == "train" and r["time"] > began]
        saves = [record["save_seconds"] for record in records if record["save_seconds"]]
        newest = newest_step(self.run)
        self.attempts.append(
            Killed(
                life=killed - began,
                is_killed=killed == self.killed_at,
                until_first_step=records[0]["time"] - began if records else None,
                training_seconds=records[-1]["time"] - records[0]["time"] - sum(saves) if records else 0.0,
                saves_seconds=saves,
                steps_made=records[-1]["step"] - self.start if records else 0,
                steps_kept=newest - self.start,
                delay=after - killed,
            )
        )
        self.start, self.killed_at = newest, None

    def is_over(self) -> bool:
        return bool(self.run.run_dir.state.exists() and read_json(self.run.run_dir.state)["state"] == "finished")

    def release(self) -> None:
        """Does what a person does with a job that Slurm holds as a node has the folder of an earlier batch script."""
        if time.monotonic() < self.asked_at + 5.0:
            return
        self.asked_at = time.monotonic()
        with contextlib.suppress(subprocess.CalledProcessError):  # the controller is away
            queue = self.run.cluster.run("squeue", "--noheader", f"--jobs={self.run.job_id}", "--format=%r")
            if "launch failed" in queue:
                self.run.cluster.run("scontrol", "release", self.run.job_id)
                self.released += 1

    def wait(self, condition: Callable[[], bool], seconds: float = 300) -> None:
        """Waits for the condition, or for the end of the run."""

        def holds() -> bool:
            self.look()
            self.release()
            return self.is_over() or condition()

        until(holds, seconds)


def newest_step(run: Run) -> int:
    """Returns the step of the checkpoint that the run resumes from."""
    return int((newest_checkpoint(run.run_dir) or "step_0").removeprefix("step_"))


def ranks_of(run: Run) -> list[psutil.Process]:
    """Returns the processes of the ranks of a run on all nodes."""
    wanted = ["-m", "dist_transformer", "train", str(run.run_dir.path)]
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[-4:] == wanted and "RANK" in process.environ():
                found.append(process)
    return [process for process in found if process.parent() not in found]


def loader_processes(run: Run) -> Iterator[psutil.Process]:
    """Yields the processes that build windows: children of each rank's server that forks them."""
    for rank in ranks_of(run):
        with contextlib.suppress(psutil.Error):
            for server in rank.children():
                yield from server.children()


def launchers(run: Run) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if process.name() == "srun" and "train" in words and str(run.run_dir.path) in words:
                yield process


def kill_one(processes: list[psutil.Process], drawn: random.Random) -> bool:
    """Kills one of the processes. False: there is none, as in an attempt that has only just begun."""
    if not processes:
        return False
    with contextlib.suppress(psutil.NoSuchProcess):
        drawn.choice(processes).send_signal(signal.SIGKILL)
    return True


def kill_node(series: Series, drawn: random.Random, of_batch_script: bool) -> bool:
    """Kills a node on which ranks run, as if its power went."""
    run, cluster = series.run, series.run.cluster
    nodes = cluster.run("scontrol", "show", "hostnames", run.attempts()[-1]["nodes"]).split()
    host = re.search(r"BatchHost=(\S+)", cluster.run("scontrol", "show", "job", run.job_id))
    chosen = [node for node in nodes if host and (node == host[1]) is of_batch_script]
    if not chosen or not ranks_of(run):
        return False
    cluster.node("kill", drawn.choice(chosen))
    return True


def kill_during_a_save(series: Series, drawn: random.Random) -> bool:
    """Kills a rank while a checkpoint that is not finished lies in the folder."""
    folder = series.run.run_dir.checkpoints

    def is_saving() -> bool:
        return folder.exists() and any(not re.fullmatch(r"step_\d+", path.name) for path in folder.iterdir())

    deadline = time.monotonic() + 60
    while not is_saving():
        series.look()
        if series.is_over() or time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return kill_one(ranks_of(series.run), drawn)


def disturb(series: Series, kind: str, drawn: random.Random) -> bool:
    """Does what the kind says. False: it was not possible now."""
    run, cluster = series.run, series.run.cluster
    match kind:
        case "rank":
            return kill_one(ranks_of(run), drawn)
        case "rank during a save":
            return kill_during_a_save(series, drawn)
        case "loader process":
            return kill_one([*loader_processes(run)], drawn)
        case "launcher":
            return kill_one([*launchers(run)], drawn)
        case "node" | "node of the batch script":
            return kill_node(series, drawn, kind != "node")
        case "controller":
            cluster.node("kill", "controller")
            time.sleep(drawn.uniform(0.0, 10.0))
            cluster.node("start", "controller")
            return True
        case _:
            with contextlib.suppress(subprocess.CalledProcessError):  # the job waits in the queue
                cluster.run("scancel", "--signal=USR1", run.job_id)
                return True
            return False


def disturbed(series: Series, mean_seconds: float, drawn: random.Random) -> None:
    """Disturbs a run until it is finished; nodes that died return after a while."""
    run = series.run
    series.wait(lambda: newest_step(run) > 0)
    while not series.is_over():
        due = run.attempts()[-1]["time"] + drawn.expovariate(1 / mean_seconds)
        [kind] = drawn.choices([*KINDS], [*KINDS.values()])
        attempts = len(run.attempts())
        series.wait(lambda due=due, attempts=attempts: time.time() >= due or len(run.attempts()) > attempts)
        if series.is_over() or len(run.attempts()) > attempts:
            continue
        at, step = time.time(), run.steps()
        if not disturb(series, kind, drawn):
            time.sleep(0.2)
            continue
        series.killed_at = time.time() if kind == "rank during a save" else at
        series.kills[kind] += 1
        print(f"{run.run_dir.name}: {kind} at step {step}", flush=True)
        # Where nothing ends, the attempt goes on: it has made more steps than one that ends can still make.
        series.wait(lambda attempts=attempts, step=step: len(run.attempts()) > attempts or run.steps() >= step + 40)
        for number in range(NUM_NODES if kind.startswith("node") else 0):
            run.cluster.node("start", f"n{number + 1}")
        if len(run.attempts()) == attempts:
            series.killed_at = None


def written_seconds(run: Run) -> float:
    """Returns the mean time from the beginning of a save to the complete checkpoint, by the log."""
    found = re.findall(r"saved step_\d+ in ([\d.]+) s", run.run_dir.log.read_text(encoding="utf-8"))
    return statistics.mean(float(seconds) for seconds in found)


def conditions_of(series: Series, written: float, mean_life: float) -> tuple[Conditions, float]:
    """Returns the means of the run, and the seconds of a step."""
    attempts = series.attempts
    spans = max(1, sum(max(0, each.steps_made - 1) for each in attempts))
    step = sum(each.training_seconds for each in attempts) / spans
    saves = max(1, sum(each.steps_made // series.every_steps for each in attempts))
    save = sum(sum(each.saves_seconds) for each in attempts) / saves
    first = statistics.mean(each.until_first_step for each in attempts if each.until_first_step is not None)
    delay = statistics.mean(each.delay for each in attempts)
    conditions = Conditions(mean_life, 0.0, delay, max(0.0, first - step), save, max(0.0, written - save))
    return conditions, step


def shares(conditions: Conditions, interval: float, lives: np.ndarray) -> np.ndarray:
    """Returns the kept share of the wall time of each row of attempts, all of which fail: what is in complete checkpoints."""
    saving = lives - conditions.restart_seconds - conditions.write_seconds
    kept = interval * np.maximum(0, np.floor(saving / conditions.period_seconds(interval)))
    return kept.sum(axis=-1) / (lives + conditions.requeue_seconds).sum(axis=-1)


def figures_of(series: Series, seed: int) -> common.Figures:
    """Returns the kept share of a series as measured and as foretold, and what the simulation was fed with."""
    mean_life = statistics.mean(each.life for each in series.attempts)
    conditions, step = conditions_of(series, written_seconds(series.run), mean_life)
    interval = series.every_steps * step
    lives = np.array([each.life for each in series.attempts])
    drawn = np.random.default_rng(seed).exponential(mean_life, (NUM_SERIES, len(lives)))
    expected = expected_attempt(conditions, interval)
    wall = sum(each.life + each.delay for each in series.attempts)
    low, high = np.quantile(shares(conditions, interval, drawn), [0.1, 0.9])
    return {
        "measured": sum(each.steps_kept for each in series.attempts) * step / wall,
        "these_kills": float(shares(conditions, interval, lives)),
        "expected": expected.kept / expected.wall,
        "low": float(low),
        "high": float(high),
        "life_seconds": mean_life,
        "step_seconds": step,
        "save_seconds": conditions.save_seconds,
        "write_seconds": conditions.write_seconds,
        "restart_seconds": conditions.restart_seconds,
        "to_the_next_seconds": conditions.requeue_seconds,
    }


def digests(run: Run) -> list[tuple[int, str]]:
    return [(r["step"], r["batch_digest"]) for r in run.records(run.run_dir.metrics) if r["event"] == "train"]


def weights_digest(run: Run) -> str:
    """Returns the SHA-256 of the weights of the final model."""
    [path] = run.run_dir.model.glob("*.safetensors")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def checked(series: Series, undisturbed: Run) -> list[str]:
    """Returns a row of the table of promises."""
    run = series.run
    time.sleep(2.0)  # the batch script records the end
    goodput = goodput_of(run.run_dir, time.time())
    submitted = datetime.fromisoformat(read_json(run.run_dir.job)["submitted_at"]).timestamp()
    wall = max(record["time"] for record in run.records(run.run_dir.history) if record["event"] == "end") - submitted
    assert goodput is not None
    rows = digests(run)
    verified = subprocess.run([sys.executable, "-m", "dist_transformer", "verify", str(run.run_dir.path)], check=False)
    starts = [record for record in run.records(run.run_dir.history) if record["event"] == "start"]
    ranks = Counter(record["num_ranks"] for record in starts)
    return [
        run.run_dir.name,
        str(series.kills.total()),
        str(len(run.attempts())),
        ", ".join(f"{number}: {count}" for number, count in sorted(ranks.items())),
        "equal" if rows == digests(undisturbed) else "DIFFER",
        "equal" if weights_digest(run) == weights_digest(undisturbed) else "DIFFER",
        "undamaged" if verified.returncode == 0 else "DAMAGED",
        str(series.released),
        f"{goodput.total / wall:.1%}",
        *(f"{goodput.shares()[name]:.1%}" for name in CLASSES),
    ]


def print_tables(all_series: list[Series], undisturbed: Run, arguments: argparse.Namespace) -> list[common.Figures]:
    promised = [checked(series, undisturbed) for series in all_series]
    header = ["series", "kills", "attempts", "starts by ranks", "batches", "weights", "checkpoints", "released by hand"]
    print(f"\n{common.markdown_table([*header, 'goodput of wall time', *CLASSES], promised)}")
    rows = [[kind, *(str(each.kills[kind]) for each in all_series)] for kind in KINDS]
    print(f"\n{common.markdown_table(['killed', *(each.run.run_dir.name for each in all_series)], rows)}")
    found = [figures_of(series, arguments.seed) for series in all_series]
    shown = ("measured", "these_kills", "expected")
    rows = [
        [
            series.run.run_dir.name,
            *(f"{figures[name]:.1%}" for name in shown),
            f"{figures['low']:.1%} to {figures['high']:.1%}",
            *(f"{figures[name]:.2f}" for name in figures if name.endswith("seconds")),
        ]
        for series, figures in zip(all_series, found, strict=True)
    ]
    fed = [name.replace("_seconds", " s").replace("_", " ") for name in found[0] if name.endswith("seconds")]
    header = ["kept of the wall time", "measured", "these kills", "expected", "8 of 10 series", *fed]
    print(f"\n{common.markdown_table(header, rows)}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="in all series together")
    parser.add_argument("--mean-seconds", type=float, default=16, help="of an attempt's life")
    parser.add_argument("--steps", type=int, default=600, help="of a run")
    parser.add_argument("--every-steps", type=int, default=10)
    parser.add_argument(
        "--spare-nodes", type=int, default=1, help="0: the job goes on with fewer ranks when it loses a node"
    )
    parser.add_argument("--seed", type=int, default=1)
    arguments = common.arguments_of(parser, rounds=1)
    found = common.begin(threads=1)
    cluster, folder = Cluster(NUM_NODES), Path(tempfile.mkdtemp(prefix="random-kills-"))
    os.environ["OMP_NUM_THREADS"] = "1"
    settings = [
        *SETTINGS,
        f"slurm.spare_nodes={arguments.spare_nodes}",
        f"training.max_steps={arguments.steps}",
        f"checkpoints.every_steps={arguments.every_steps}",
    ]
    drawn, all_series = random.Random(arguments.seed), list[Series]()
    try:
        undisturbed = Series(Run(cluster, folder, "undisturbed", *settings), arguments.every_steps)
        undisturbed.wait(lambda: False, 1800)
        while sum(series.kills.total() for series in all_series) < arguments.kills:
            run = Run(cluster, folder, f"series_{len(all_series) + 1}", *settings)
            all_series.append(Series(run, arguments.every_steps))
            disturbed(all_series[-1], arguments.mean_seconds, drawn)
        figures = print_tables(all_series, undisturbed.run, arguments)
    finally:
        cluster.close()
        shutil.rmtree(folder, ignore_errors=True)
    common.finish(
        arguments, found, {"series": figures, "attempts": [[vars(a) for a in s.attempts] for s in all_series]}
    )


if __name__ == "__main__":
    main()
