"""Time that a Slurm job takes to save and requeue itself, and to train again after one of its nodes has died.

    python benchmarks/slurm_recovery.py            # as root: starts a Slurm of four nodes on this machine (Debian)

It is a tiny run on two nodes of a real cluster (tests/slurm/cluster_up.sh), each round submitted anew. Told to save:
from `scancel --signal=USR1` to the checkpoint under its final name, and to the job being back in the queue. Node
killed: from the death of the second node, as in a power failure, to the next start of ranks, in the same allocation,
and to their first step; the same for the node of the batch script, after which the job is requeued. Slurm's own times
bound the requeues; the table names them with the values of this cluster and Slurm's defaults.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
from common import Figures

from dist_transformer.files import read_json
from dist_transformer.run.folder import RunDir

TESTS = Path(__file__).resolve().parents[1] / "tests" / "slurm"
CONFIG = """
data: {train: {demo: train}, lanes: 2, max_tokens: 1024}
tokenizer: {vocabulary_size: 500}
model: {preset: tiny}
training: {max_steps: 1000000, precision: fp32, log_every_steps: 1}
checkpoints: {every_steps: 20, keep_last: 2, average_last: 2}
tracking: {enabled: false}
slurm: {nodes: 2, time_limit: "1:00:00", signal_seconds: 60, srun: {cpu-bind: null}}
"""
SETTINGS = {"SlurmdTimeout": "300 s", "KillWait": "30 s", "AuthInfo": "cred_expire 120 s"}
"""Settings of Slurm that bound these times, with its defaults."""


class Cluster:
    """The tests' cluster in a folder of its own."""

    def __init__(self, num_nodes: int = 4) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-bench-"))
        started = {**os.environ, "SLURM_TEST_NODES": str(num_nodes)}
        try:
            subprocess.run([TESTS / "cluster_up.sh", self.folder], env=started, check=True)
        except BaseException:
            self.close()
            raise
        path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
        self.environment = {**os.environ, "SLURM_CONF": f"{self.folder}/slurm.conf", "PATH": path}

    def run(self, *command: str) -> str:
        return subprocess.run(command, env=self.environment, stdout=subprocess.PIPE, text=True, check=True).stdout

    def node(self, action: str, name: str) -> None:
        subprocess.run([TESTS / "cluster_node.sh", self.folder, action, name], check=True)

    def close(self) -> None:
        subprocess.run([TESTS / "cluster_down.sh", self.folder], check=False)
        shutil.rmtree(self.folder, ignore_errors=True)


class Run:
    """One submitted run."""

    def __init__(self, cluster: Cluster, folder: Path, name: str, *overrides: str) -> None:
        self.cluster, self.run_dir = cluster, RunDir(folder / name)
        config = folder / "config.yaml"
        config.write_text(CONFIG, encoding="utf-8")
        submit = [sys.executable, "-m", "dist_transformer", "submit", str(config)]
        cluster.run(*submit, f"run.root={folder}", f"run.name={name}", *overrides)
        self.job_id = str(read_json(self.run_dir.job)["job_id"])

    def records(self, path: Path) -> list[dict[str, Any]]:
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def steps(self) -> int:
        return max((record["step"] for record in self.records(self.run_dir.metrics)), default=0)

    def attempts(self) -> list[dict[str, Any]]:
        return [record for record in self.records(self.run_dir.attempts) if record["event"] == "began"]

    def ends(self) -> list[dict[str, Any]]:
        """Returns the ends of attempts, as far as their batch script lived to record them."""
        return [record for record in self.records(self.run_dir.attempts) if record["event"] == "ended"]

    def is_pending(self) -> bool:
        return "PENDING" in self.cluster.run("squeue", "--noheader", f"--jobs={self.job_id}", "--format=%T")

    def cancel(self) -> None:
        self.cluster.run("scancel", self.job_id)
        until(lambda: not self.cluster.run("squeue", "--noheader", "--format=%i").strip())


def until(condition: Callable[[], bool], seconds: float = 300) -> float:
    """Waits until the condition holds, and returns the time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.05)
    return time.time()


def told_to_save(cluster: Cluster, folder: Path, name: str) -> Figures:
    """Measures from the signal on."""
    run = Run(cluster, folder, name)
    until(lambda: run.steps() >= 25)
    began = time.time()
    cluster.run("scancel", "--signal=USR1", run.job_id)
    saved = until(lambda: any(int(p.name[5:]) % 20 for p in run.run_dir.checkpoints.glob("step_????????")))
    queued = until(run.is_pending)
    run.cancel()
    return {"saved_seconds": saved - began, "queued_seconds": queued - began}


def node_killed(cluster: Cluster, folder: Path, name: str, node: str) -> Figures:
    """Measures from the node's death on."""
    run = Run(cluster, folder, name)
    until(lambda: run.steps() >= 25)
    began = time.time()
    cluster.node("kill", node)
    attempt = until(lambda: len(run.attempts()) == 2)
    trains = until(
        lambda: bool(run.records(run.run_dir.metrics)) and run.records(run.run_dir.metrics)[-1]["time"] > attempt
    )
    run.cancel()
    cluster.node("start", node)
    until(
        lambda: cluster.run("sinfo", "--noheader", "--Node", "--partition=main", "--format=%T").split() == ["idle"] * 4
    )
    return {"attempt_seconds": attempt - began, "training_seconds": trains - began}


def settings_of(cluster: Cluster) -> list[list[str]]:
    lines = cluster.run("scontrol", "show", "config").splitlines()
    values = {name.strip(): value.strip() for name, _, value in (line.partition("=") for line in lines)}
    return [[name, values[name].split(",")[-1], default] for name, default in SETTINGS.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    arguments = common.arguments_of(parser, rounds=3)
    found = common.begin(threads=1)
    cluster = Cluster()
    folder = Path(tempfile.mkdtemp(prefix="slurm-recovery-"))
    try:
        names = iter(range(1000))
        cases = {
            "told to save": lambda: told_to_save(cluster, folder, f"told_{next(names)}"),
            "node killed": lambda: node_killed(cluster, folder, f"killed_{next(names)}", "n2"),
            "node of the batch script killed": lambda: node_killed(cluster, folder, f"killed_{next(names)}", "n1"),
        }
        rounds = common.interleaved(cases, arguments.rounds)
        bounds = settings_of(cluster)
    finally:
        cluster.close()
        shutil.rmtree(folder, ignore_errors=True)
    rows = [
        [case, figure.removesuffix("_seconds"), f"{common.median(samples, figure):.1f}",
         f"{min(s[figure] for s in samples):.1f} to {max(s[figure] for s in samples):.1f}"]
        for case, samples in rounds.items() for figure in samples[0]
    ]  # fmt: skip
    print(f"\n{common.markdown_table(['from', 'to', 'median s', 'range s'], rows)}")
    print(f"\n{common.markdown_table(['Slurm setting', 'here', 'default'], bounds)}")
    common.finish(arguments, found, rounds)


if __name__ == "__main__":
    main()
