"""The Slurm of Debian 13 under this machine's Python; `SLURM_TEST_ROOT` runs all tests of this folder on it."""

import json
from pathlib import Path

import pytest
from slurm_runs import program, submit
from slurm_test_cluster import SlurmCluster

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def test_a_run_that_is_told_to_save_and_loses_its_nodes_ends_as_the_undisturbed_one(
    newer_slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    assert newer_slurm_cluster.run("srun", "--version").startswith("slurm-wlm 24.11")
    undisturbed = submit(newer_slurm_cluster, tmp_path / "runs", "undisturbed")
    run = submit(newer_slurm_cluster, tmp_path / "runs", "disturbed")
    run.wait_for_step(10)
    found = json.loads(newer_slurm_cluster.run(*program("status", str(run.run_dir.path), "--json")))
    assert (found["job"]["id"], found["job"]["state"], found["job"]["nodes"]) == (run.job_id, "RUNNING", "n[3-4]")
    newer_slurm_cluster.run("scancel", "--signal=USR1", run.job_id)
    run.wait_for_attempt(1)
    undisturbed.wait_for_end()
    run.wait_for_step(50)  # there is a checkpoint
    batch_node = newer_slurm_cluster.run("scontrol", "show", "hostnames", run.attempts("began")[-1]["nodes"]).split()[0]
    newer_slurm_cluster.node("kill", batch_node)
    run.wait_for_attempt(2)
    run.wait_for_end()
    assert [record["exit_code"] for record in run.attempts("ended")] == [75, 0]
    run.must_equal(undisturbed)
