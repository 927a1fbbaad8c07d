"""launch/slurm_task.sh, which starts a rank as a task of Slurm: its place, its exit code, the node of the first failure."""

import os
import subprocess
from pathlib import Path

import pytest

from dist_transformer.cluster.requeue import first_failure
from dist_transformer.distributed.causes import exit_code_of_victim
from dist_transformer.package_data import share_folder


def _task(tmp_path: Path, trainer: str = "exec env", **environment: str) -> "subprocess.CompletedProcess[str]":
    """launch/slurm_task.sh with a shell command in place of the trainer."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{trainer}\n")
    python.chmod(0o755)
    task = {
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "1",
        "SLURM_LOCALID": "0",
        "SLURM_NNODES": "1",
        "PATH": os.environ["PATH"],
    }
    return subprocess.run(
        ["bash", str(share_folder("launch") / "slurm_task.sh"), "train", "config.yaml"],
        env={**task, "DIST_TRANSFORMER_PYTHON": str(python), **environment},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def _environment_of_task(tmp_path: Path, **environment: str) -> dict[str, str]:
    """Returns the environment that launch/slurm_task.sh gives the trainer."""
    done = _task(tmp_path, **environment)
    assert done.returncode == 0, done.stderr
    return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)


@pytest.mark.parametrize("code", [1, 2, 70, 137])
def test_a_task_names_the_node_of_the_first_rank_that_failed(tmp_path: Path, code: int) -> None:
    first = {"DIST_TRANSFORMER_FIRST_EXIT": str(tmp_path / "first")}
    assert _task(tmp_path, f"exit {code}", SLURMD_NODENAME="n1", **first).returncode == code
    assert _task(tmp_path, "exit 1", SLURMD_NODENAME="n2", **first).returncode == 1
    assert first_failure(tmp_path / "first") == (code, "n1")


@pytest.mark.parametrize("code", [1, 70])
def test_a_task_names_no_node_for_a_rank_that_only_lost_another(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert exit_code_of_victim(code) == code  # no Slurm
    monkeypatch.setenv("DIST_TRANSFORMER_FIRST_EXIT", str(tmp_path / "first"))
    left_with = exit_code_of_victim(code)
    environment = {"DIST_TRANSFORMER_FIRST_EXIT": str(tmp_path / "first"), "SLURMD_NODENAME": "n1"}
    assert _task(tmp_path, f"exit {left_with}", **environment).returncode == code
    assert first_failure(tmp_path / "first") == (code, "")


@pytest.mark.parametrize(
    ("tasks", "ranks_of_nodes"),
    [("2(x3)", [2, 2, 2]), ("2(x2),1", [2, 2, 1]), ("1,3,2(x2)", [1, 3, 2, 2]), ("8", [8])],
)
def test_a_task_knows_the_ranks_of_its_node_also_where_nodes_differ(
    tmp_path: Path, tasks: str, ranks_of_nodes: list[int]
) -> None:
    found = [
        _environment_of_task(tmp_path, SLURM_STEP_TASKS_PER_NODE=tasks, SLURM_NODEID=str(node))["LOCAL_WORLD_SIZE"]
        for node in range(len(ranks_of_nodes))
    ]
    assert found == list(map(str, ranks_of_nodes))
