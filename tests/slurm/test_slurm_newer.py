"""The Slurm of Debian 13 under this machine's Python; `SLURM_TEST_ROOT` runs all tests of this folder on it."""

import json
from pathlib import Path

import pytest
from slurm_runs import program, submit
from slurm_test_cluster import SlurmCluster

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def test_a_run_that_is_told_to_save_and_loses_a_node_ends_as_the_undisturbed_one(
    newer_slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    assert newer_slurm_cluster.run("srun", "--version").startswith("slurm-wlm 24.11")

    def nodes_of_attempt() -> list[str]:
        return newer_slurm_cluster.run("scontrol", "show", "hostnames", run.attempts("began")[-1]["nodes"]).split()

    undisturbed = submit(newer_slurm_cluster, tmp_path / "runs", "undisturbed")
    undisturbed.wait_for_end()
    run = submit(newer_slurm_cluster, tmp_path / "runs", "disturbed")
    run.wait_for_step(10)
    found = json.loads(newer_slurm_cluster.run(*program("status", str(run.run_dir.path), "--json")))
    assert (found["job"]["id"], found["job"]["state"], found["job"]["nodes"]) == (run.job_id, "RUNNING", "n[1-2]")
    newer_slurm_cluster.run("scancel", "--signal=USR1", run.job_id)
    run.wait_for_attempt(1)
    run.wait_for_step(40)  # there is a checkpoint
    dead = nodes_of_attempt()[-1]
    newer_slurm_cluster.node("kill", dead)
    run.wait_for_attempt(2)
    assert dead not in nodes_of_attempt()
    run.wait_for_end()
    assert run.attempts("ended")[0]["exit_code"] == 75
    run.must_equal(undisturbed)
