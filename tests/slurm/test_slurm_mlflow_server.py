"""slurm/mlflow_server.sbatch on a real cluster: runs on other nodes reach the server by its node's name."""

import json
import shlex
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from slurm_runs import SubmittedRun, read_lines, submit
from slurm_test_cluster import HERE, PATIENCE_SECONDS, SlurmCluster, wait_until

from dist_transformer.files import read_json

REPOSITORY = HERE.parents[1]
STEPS = 6
SHORT = (f"training.max_steps={STEPS}", f"schedule.warmup_steps={STEPS}", "tracking.enabled=true")
OVER = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"}


@dataclass(frozen=True)
class TeamServer:
    """Jobs of mlflow_server.sbatch, one after the other, on one folder."""

    cluster: SlurmCluster
    folder: Path

    @property
    def address(self) -> str:
        return (self.folder / "address").read_text().strip()

    def log(self, job_id: str) -> str:
        return (self.folder / f"server-{job_id}.log").read_text()

    def submit(self, node: str) -> str:
        log = f"--output={self.folder}/server-%j.log"
        job = ("sbatch", "--parsable", f"--nodelist={node}", log, "slurm/mlflow_server.sbatch", str(self.folder))
        return self.cluster.run(*job, cwd=REPOSITORY).strip()

    def start(self, node: str) -> str:
        """Starts it on a node, waits until it listens; the job's id."""
        job_id = self.submit(node)
        wait_until(
            lambda: (self.folder / f"server-{job_id}.log").exists() and "listens at" in self.log(job_id),
            PATIENCE_SECONDS,
            lambda: f"a server on {node}: {self.cluster.state(job_id)}",
        )
        return job_id

    def ask(self, path: str, question: dict[str, Any] | None = None, **headers: str) -> Any:
        """The answer to a request from the login node, which knows the nodes by their addresses alone."""
        addresses = {name: ip for ip, name in map(str.split, (self.cluster.folder / "hosts").read_text().splitlines())}
        node, port = self.address.removeprefix("http://").split(":")
        body = None if question is None else json.dumps(question).encode()
        headers = {"Content-Type": "application/json", **headers}
        request = urllib.request.Request(f"http://{addresses[node]}:{port}/api/2.0/mlflow/{path}", body, headers)
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.load(answer)

    def refusal(self, **headers: str) -> int:
        """The status code of a search with these headers, which is refused."""
        with pytest.raises(urllib.error.HTTPError) as refused:
            self.ask("experiments/search", {"max_results": 1}, **headers)
        return refused.value.code

    def tracked(self, run: SubmittedRun) -> dict[str, Any]:
        return dict(self.ask(f"runs/get?run_id={read_json(run.run_dir.tracking)['run_id']}")["run"])

    def curve(self, run: SubmittedRun, key: str) -> list[tuple[int, float]]:
        run_id = read_json(run.run_dir.tracking)["run_id"]
        points = self.ask(f"metrics/get-history?run_id={run_id}&metric_key={key}")["metrics"]
        return sorted((int(point["step"]), point["value"]) for point in points)

    def must_have(self, run: SubmittedRun) -> None:
        """The run is there, finished, with every point of its loss once."""
        assert self.tracked(run)["info"]["status"] == "FINISHED"
        local = [(r["step"], r["loss"]) for r in read_lines(run.run_dir.metrics) if r["event"] == "train"]
        assert len(local) == STEPS
        assert self.curve(run, "train/loss") == pytest.approx(local)


def end(cluster: SlurmCluster, job_id: str) -> None:
    cluster.run("scancel", job_id)
    wait_until(lambda: cluster.state(job_id) in OVER, PATIENCE_SECONDS, lambda: cluster.state(job_id))


@pytest.mark.slurm
@pytest.mark.slow
def test_runs_reach_the_server_by_the_name_of_its_node_and_find_it_again_when_it_has_moved(
    slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    cluster = SlurmCluster(
        slurm_cluster.folder, {**slurm_cluster.environment, "DIST_TRANSFORMER_PYTHON": sys.executable}
    )
    server = TeamServer(cluster, tmp_path / "team server")
    server.folder.mkdir()
    address = shlex.quote(str(server.folder / "address"))
    setup = f'export MLFLOW_TRACKING_URI="$(cat {address})"'
    places = (f"slurm.setup={json.dumps([setup])}", "slurm.sbatch.exclude=n1")

    job_id = server.start("n1")
    assert server.address.startswith("http://n1:")
    assert server.refusal(Host="elsewhere") == 403
    assert server.refusal(Origin="http://elsewhere") == 403
    assert server.ask("experiments/search", {"max_results": 1}, Origin=server.address)["experiments"]
    second = server.submit("n3")

    def reason() -> str:
        return cluster.run("squeue", "--noheader", f"--jobs={second}", "--format=%r").strip()

    wait_until(lambda: reason() == "Dependency", PATIENCE_SECONDS, reason)  # one server at a time
    end(cluster, second)

    tracked = submit(cluster, tmp_path / "runs", "tracked", *SHORT, *places)
    tracked.wait_for_end()
    server.must_have(tracked)
    end(cluster, job_id)
    assert "the server has ended with exit code 0" in server.log(job_id)

    # The address leads nowhere now.
    untracked = submit(cluster, tmp_path / "runs", "meanwhile", *SHORT, *places)
    untracked.wait_for_end()
    assert f"dist-transformer track sync {untracked.run_dir.path}" in untracked.log()
    job_id = server.start("n2")
    assert server.address.startswith("http://n2:")
    before = server.tracked(tracked)["info"]["run_id"]
    environment = {**cluster.environment, "MLFLOW_TRACKING_URI": server.address}
    on_a_node = SlurmCluster(cluster.folder, environment)
    for run in (untracked, tracked):
        log = tmp_path / f"sync-{run.run_dir.name}.log"
        job = ("sbatch", "--wait", f"--output={log}", "slurm/command.sbatch", "track", "sync", str(run.run_dir.path))
        on_a_node.run(*job, cwd=REPOSITORY)
        server.must_have(run)
    assert server.tracked(tracked)["info"]["run_id"] == before

    cluster.run("scancel", "--signal=USR1", "--batch", job_id)  # as Slurm does before the time limit
    wait_until(lambda: cluster.state(job_id) == "PENDING", PATIENCE_SECONDS, lambda: server.log(job_id))
    assert "the server has ended with exit code 0" in server.log(job_id)
    end(cluster, job_id)
