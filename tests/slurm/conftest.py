"""A real Slurm of four nodes on this machine, started once for all tests that ask for it, and always taken down."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from running import NOT_INHERITED
from slurm_test_cluster import HERE, SlurmCluster

REQUIRED = "DIST_TRANSFORMER_REQUIRE_SLURM"
"""With this variable set to 1 a cluster that cannot be started is a failure; without it the tests are skipped."""
ROOT = "SLURM_TEST_ROOT"
"""Folder of another Slurm for all tests, made by newer_slurm.sh; without it they use the installed one."""


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmCluster]:
    with started_cluster(os.environ.get(ROOT, "")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def newer_slurm_cluster() -> Iterator[SlurmCluster]:
    """The Slurm of the Debian after Debian 12."""
    with started_cluster(output_of(HERE / "newer_slurm.sh").strip()) as cluster:
        yield cluster


@contextmanager
def started_cluster(root: str) -> Iterator[SlurmCluster]:
    """A cluster of the Slurm in the folder `root`, or of the installed one."""
    # Not pytest's own folder: unix sockets allow only short paths.
    folder = Path(tempfile.mkdtemp(prefix="slurm-test-"))
    try:
        output_of(HERE / "cluster_up.sh", folder, SLURM_TEST_NODES="4", SLURM_TEST_DISK="1", SLURM_TEST_ROOT=root)
        clean = {
            name: value
            for name, value in os.environ.items()
            if name not in NOT_INHERITED and not name.startswith(("SLURM_", "SBATCH_"))
        }
        path = f"{root}/bin:" * bool(root) + f"{clean.get('PATH', '')}:/usr/sbin:/sbin"
        yield SlurmCluster(folder, {**clean, "PATH": path, "SLURM_CONF": str(folder / "slurm.conf")})
    finally:
        subprocess.run([HERE / "cluster_down.sh", folder], capture_output=True, check=False)
        shutil.rmtree(folder, ignore_errors=True)


def output_of(*command: Path, **variables: str) -> str:
    """Of a script without which there is no cluster."""
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = f"no Slurm could be started here: {done.stderr.strip()}"
        pytest.fail(reason) if os.environ.get(REQUIRED) == "1" else pytest.skip(reason)
    return done.stdout
