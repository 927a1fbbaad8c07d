"""What MLflow says of a run while its job is requeued, goes on, is cancelled, and loses its node: always the truth."""

import os
import shlex
import signal
import time
from pathlib import Path

import pytest
from mlflow import MlflowClient
from running import with_constants
from slurm_runs import SubmittedRun, program, signal_ranks, submit
from slurm_test_cluster import PATIENCE_SECONDS, SlurmCluster, wait_until

from dist_transformer.files import read_json
from dist_transformer.run.status import SILENT_SECONDS

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

ENDLESS = ("tracking.enabled=true", "training.max_steps=1000000", "checkpoints.every_steps=20")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs with MLflow's store: runs without an end would train on while its migrations take seconds."""
    folder = tmp_path_factory.mktemp("tracking")
    MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db").search_experiments()
    return folder


def wait_for_status(run: SubmittedRun, status: str, seconds: float = PATIENCE_SECONDS) -> None:
    def said() -> str:
        memory = read_json(run.run_dir.tracking) if run.run_dir.tracking.is_file() else {"run_id": None}
        if memory["run_id"] is None:
            return "nothing yet"
        return str(MlflowClient(tracking_uri=memory["uri"]).get_run(memory["run_id"]).info.status)

    wait_until(lambda: said() == status, seconds, lambda: f"{status} in MLflow, which says {said()}\n{run.log()}")


def test_a_killed_rank_a_requeue_and_a_cancelled_job_show_as_what_they_are(
    slurm_cluster: SlurmCluster, root: Path
) -> None:
    run = submit(slurm_cluster, root, "told", *ENDLESS)
    run.wait_for_step(30)
    wait_for_status(run, "RUNNING")
    run_id = read_json(run.run_dir.tracking)["run_id"]
    signal_ranks(signal.SIGKILL, run, [0])
    run.wait_for_attempt(1)
    assert run.attempts("began")[1]["attempt"] == 0  # in the same allocation
    run.wait_for_step(max(run.steps()) + 1)
    wait_for_status(run, "RUNNING")
    drain = ("scontrol", "update", "NodeName=n[1-4]")  # no node is free for the job until its status was seen
    slurm_cluster.run(*drain, "State=DRAIN", "Reason=test")
    try:
        slurm_cluster.run("scancel", "--signal=USR1", run.job_id)
        wait_for_status(run, "SCHEDULED")
    finally:
        slurm_cluster.run(*drain, "State=RESUME")
    run.wait_for_attempt(2)
    wait_for_status(run, "RUNNING")
    slurm_cluster.run(*program("cancel", run.job_id, "--root", str(root)))
    wait_until(lambda: slurm_cluster.state(run.job_id) == "CANCELLED", PATIENCE_SECONDS, run.log)
    look(run)  # where Slurm left the batch script too little time to reach MLflow (KillWait)
    wait_for_status(run, "KILLED")
    assert read_json(run.run_dir.tracking)["run_id"] == run_id


def test_a_run_whose_node_died_says_that_it_waits_once_somebody_looks(slurm_cluster: SlurmCluster, root: Path) -> None:
    run = submit(slurm_cluster, root, "lost", *ENDLESS)
    run.wait_for_step(30)
    wait_for_status(run, "RUNNING")
    node = run.attempts("began")[0]["nodes"].replace("[", "").split("-")[0]
    slurm_cluster.node("kill", node)
    try:
        wait_until(lambda: slurm_cluster.state(run.job_id) == "PENDING", PATIENCE_SECONDS, run.log)
        slurm_cluster.run("scontrol", "hold", run.job_id)
        assert "it is SCHEDULED now" in look(run)
        wait_for_status(run, "SCHEDULED")
        slurm_cluster.run("scancel", run.job_id)
        assert "it is KILLED now" in look(run)
        wait_for_status(run, "KILLED")
    finally:
        slurm_cluster.node("start", node)
        slurm_cluster.wait_for_idle_nodes(4)


def look(run: SubmittedRun) -> str:
    """What `status` says a good while after the last sign of life."""
    if run.run_dir.owner.exists():
        silent = time.time() - 2 * SILENT_SECONDS
        os.utime(run.run_dir.owner, (silent, silent))
    patient = with_constants({"cli.status.CORRECTION_SECONDS": 240})
    cluster = SlurmCluster(run.cluster.folder, {**run.cluster.environment, **patient})
    return cluster.run("bash", "-c", shlex.join(program("status", str(run.run_dir.path))) + " 2>&1")
