"""Speaking to the Slurm cluster of the tests."""

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
PATIENCE_SECONDS = 600.0
"""Longest wait for what takes seconds: the machine may be busy, and a node that was lost is noticed after some more."""


@dataclass(frozen=True)
class SlurmCluster:
    """`environment` makes sbatch, squeue, scontrol and scancel speak to this cluster."""

    folder: Path
    environment: dict[str, str]

    def run(self, *command: str, cwd: Path | None = None) -> str:
        """Standard output of a command that must succeed."""
        done = subprocess.run(command, env=self.environment, cwd=cwd, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def state(self, job_id: str) -> str:
        return self.run("squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%T").strip()

    def wait_for_idle_nodes(self, count: int) -> None:
        def idle() -> int:
            return self.run("sinfo", "--noheader", "--Node", "--partition=main", "--format=%T").split().count("idle")

        wait_until(lambda: idle() == count, PATIENCE_SECONDS, lambda: self.run("sinfo", "--Node", "--long"))

    def node(self, action: str, name: str) -> None:
        """start, kill (as if the power went), cut or heal (its network), slow a node; see cluster_node.sh."""
        self.run(str(HERE / "cluster_node.sh"), str(self.folder), action, name)


def wait_until(condition: Callable[[], bool], seconds: float, what: Callable[[], str]) -> None:
    """Asks again until it holds; fails with `what()` when the time is over."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what()}"
        time.sleep(0.2)
