"""Programs that answer like Slurm's, and a batch script among them."""

import os
import site
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from running import with_constants

from dist_transformer.files import write_json
from dist_transformer.run.folder import RunDir
from dist_transformer.run.records import records_of

RECORD = (
    "JobId=7 JobName=a Restarts=9 b UserId=u(0) JobState=RUNNING Reason=None Restarts=0 NodeList=n[1-2] BatchHost=n1 "
    "ExcNodeList=(null)"
)
SCONTROL = """case "$*" in
*hostnames*) for node in {nodes}; do echo $node; done ;;
*"show job"*) cat {folder}/job ;;
*config*) echo "SlurmdPort = 6818" ;;
*"show node"*) cat {folder}/nodes ;;
esac"""
SRUN = """case "$*" in *batch_host*) exec sleep 60 ;; esac
echo "$*" >> {folder}/steps
exec bash {folder}/step_$(wc -l < {folder}/steps)"""


class SilentPort:
    """A port that gives no answer, as if its machine were gone: the queue of those who wait for it is full."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0), backlog=0)
        self.address = self._server.getsockname()
        self._waiting = []
        for _ in range(4):
            client = socket.socket()
            client.setblocking(False)
            client.connect_ex(self.address)
            self._waiting.append(client)

    def close(self) -> None:
        for each in (*self._waiting, self._server):
            each.close()


class Slurm:
    """Two nodes, n1 and n2; the job is 7. What srun does the first time, the second ... is in files step_1, step_2. The
    ranks have recorded that they finished; only an exit code of 0 asks for it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run_dir = folder, RunDir(folder / "run")
        self.run_dir.path.mkdir()
        self.run_dir.config.write_text("data: {train: {demo: train}}\n")
        write_json(self.run_dir.state, {"state": "finished"})
        self.listening, self.silent = socket.create_server(("127.0.0.1", 0)), SilentPort()
        self.programs = {"scontrol": SCONTROL.format(nodes="n1 n2", folder=folder), "srun": SRUN.format(folder=folder),
                         "squeue": "cat {folder}/reason", "sinfo": ""}  # fmt: skip
        self.variables: dict[str, str] = {}  # more of the batch script's
        self.waits = {"batch_job.RETRY_SECONDS": 0.1, "batch_job.WATCH_SECONDS": 0.1, "silent_nodes.SILENT_SECONDS": 1}
        self.answers("n1", "n2")
        (folder / "job").write_text(RECORD)

    def close(self) -> None:
        self.listening.close()
        self.silent.close()

    def answers(self, *nodes: str) -> None:
        """Their daemons accept connections; those of the other nodes give no answer."""
        up, down = self.listening.getsockname()[1], self.silent.address[1]
        lines = [f"NodeName={n} NodeAddr=127.0.0.1 Port={up if n in nodes else down}\n" for n in ("n1", "n2")]
        (self.folder / "nodes").write_text("".join(lines))

    def start(
        self, *steps: str, spare: int = 0, log: int = subprocess.PIPE, python: Path = Path(sys.executable),
        programs: str = "/usr/bin:/bin",
    ) -> "subprocess.Popen[str]":  # fmt: skip
        for number, step in enumerate(steps, 1):
            (self.folder / f"step_{number}").write_text(step)
        for name, body in self.programs.items():
            path = self.folder / name
            path.write_text(
                f'#!/bin/bash\necho "{name} $*" >> {self.folder}/calls\n{body}\n'.replace("{folder}", str(self.folder))
            )
            path.chmod(0o755)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "4", "SLURMD_NODENAME": "n1"}
        constants = with_constants({f"cluster.{name}": seconds for name, seconds in self.waits.items()})
        if python != Path(sys.executable):
            constants["PYTHONPATH"] += os.pathsep + os.pathsep.join(site.getsitepackages())
        main = "import sys; from dist_transformer.cluster.batch_job import main; sys.exit(main(sys.argv[1:]))"
        settings = ["off", "180", "0.8", str(spare), "1", "--mpi=none", "0"]
        return subprocess.Popen(
            [python, "-u", "-c", main, *settings, str(self.run_dir.path)],
            env={**kept, **slurm, **self.variables, **constants, "PATH": f"{self.folder}:{programs}"},
            stdout=log, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def run(self, *steps: str, spare: int = 0) -> tuple[int, str]:
        """Exit code and output."""
        process = self.start(*steps, spare=spare)
        said = process.communicate(timeout=240)[0]
        assert "Traceback" not in said
        return process.returncode, said

    def calls(self, words: str) -> int:
        return sum(words in line for line in (self.folder / "calls").read_text().splitlines())

    def steps(self) -> list[str]:
        return [line.split(" /")[0] for line in (self.folder / "steps").read_text().splitlines()]

    def ends(self) -> list[tuple[Any, ...]]:
        records = [*records_of(self.run_dir.attempts.read_text().splitlines())]
        return [(r.get("exit_code"), r["how"], r["requeued"]) for r in records if r["event"] == "ended"]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
