"""Runs submitted to the Slurm cluster of the tests, and what they leave behind."""

import contextlib
import json
import os
import shlex
import signal
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from slurm_test_cluster import PATIENCE_SECONDS, SlurmCluster, wait_until

from dist_transformer.files import read_json
from dist_transformer.run.folder import RunDir
from dist_transformer.training.checkpoint.tensor_files import Weights

MAX_STEPS = 120
CONFIG = f"""
data:
  train: {{demo: validation}}
  filters: {{max_tokens: 96}}
  lanes: 2
  max_tokens: 1024
  window_rows: 100
  audit: true
tokenizer: {{vocabulary_size: 500}}
model: {{preset: tiny, num_encoder_layers: 1, num_decoder_layers: 1, dropout: 0.1}}
optimizer: {{learning_rate: 0.001}}
schedule: {{warmup_steps: 20}}
training: {{max_steps: {MAX_STEPS}, precision: fp32, log_every_steps: 1}}
checkpoints: {{every_steps: 30, keep_last: 3, average_last: 2}}
tracking: {{enabled: false}}
slurm: {{nodes: 2, ranks_per_node: 1, time_limit: "30:00", signal_seconds: 60, srun: {{cpu-bind: null}}}}
"""
OVER = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"}


@dataclass(frozen=True)
class SubmittedRun:
    cluster: SlurmCluster
    run_dir: RunDir

    @property
    def job_id(self) -> str:
        return str(read_json(self.run_dir.job)["job_id"])

    def log(self) -> str:
        """The logs of its jobs, and the end of train.log."""
        logs = [path.read_text() for path in sorted(self.run_dir.slurm.glob("job-*.log"))]
        return "\n".join([*logs, f"{self.run_dir.path}: {self.cluster.state(self.job_id)}"])

    def steps(self) -> list[int]:
        return [record["step"] for record in read_lines(self.run_dir.metrics) if record["event"] == "train"]

    def digests(self) -> list[str]:
        """Of the global batch of each step."""
        return [r["batch_digest"] for r in read_lines(self.run_dir.metrics) if r["event"] == "train"]

    def attempts(self, event: str) -> list[dict[str, Any]]:
        return [record for record in read_lines(self.run_dir.attempts) if record["event"] == event]

    def history(self, event: str) -> list[dict[str, Any]]:
        return [record for record in read_lines(self.run_dir.history) if record["event"] == event]

    def weights(self) -> dict[str, torch.Tensor]:
        """Of the last checkpoint."""
        weights = Weights(self.run_dir.checkpoints / f"step_{MAX_STEPS:08d}")
        return {name: weights[name] for name in weights}

    def wait_for_step(self, step: int, seconds: float = PATIENCE_SECONDS) -> None:
        wait_until(lambda: max(self.steps(), default=0) >= step, seconds, lambda: f"step {step}\n{self.log()}")

    def wait_for_words(self, words: str, seconds: float = PATIENCE_SECONDS) -> None:
        wait_until(lambda: words in self.log(), seconds, lambda: f"{words!r} in\n{self.log()}")

    def wait_for_attempt(self, number: int, seconds: float = PATIENCE_SECONDS) -> None:
        wait_until(lambda: len(self.attempts("began")) > number, seconds, lambda: f"attempt {number}\n{self.log()}")

    def wait_for_end(self, state: str = "COMPLETED", seconds: float = PATIENCE_SECONDS) -> None:
        wait_until(lambda: self.cluster.state(self.job_id) in OVER, seconds, lambda: f"an end\n{self.log()}")
        assert self.cluster.state(self.job_id) == state, self.log()

    def must_equal(self, undisturbed: "SubmittedRun") -> None:
        """The same batches at the same steps, each once, and the same weights, bit by bit."""
        assert self.steps() == list(range(1, MAX_STEPS + 1))
        assert self.digests() == undisturbed.digests()
        assert read_json(self.run_dir.state)["state"] == "finished"
        ours, theirs = self.weights(), undisturbed.weights()
        assert ours.keys() == theirs.keys()
        assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def program(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "dist_transformer", *arguments]


def submit(cluster: SlurmCluster, root: Path, name: str, *overrides: str) -> SubmittedRun:
    """Submits CONFIG as a user does."""
    root.mkdir(exist_ok=True)
    config = root / "config.yaml"
    config.write_text(CONFIG)
    cluster.run(*program("submit", str(config), f"run.root={root}", f"run.name={name}", *overrides))
    return SubmittedRun(cluster, RunDir(root / name))


def submit_by_hand(cluster: SlurmCluster, run: SubmittedRun) -> str:
    """Once more what `submit` has submitted; the job's id."""
    command = shlex.split(read_json(run.run_dir.job)["command"])
    return cluster.run(*command).strip()


def read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    # The last line may be under work while the job runs.
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def signal_ranks(number: signal.Signals, run: SubmittedRun, ranks: Collection[int] = (0, 1)) -> None:
    """Sends a signal to ranks of the run without asking Slurm."""
    command = b"\0".join([b"-m", b"dist_transformer", b"train", str(run.run_dir.path).encode()])
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (process / "environ").read_bytes().split(b"\0")
            if command in (process / "cmdline").read_bytes() and {b"RANK=%d" % rank for rank in ranks} & set(variables):
                found.append(int(process.name))
    assert len(found) == len(ranks)
    for pid in found:
        os.kill(pid, number)
