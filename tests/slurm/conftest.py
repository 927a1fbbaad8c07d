"""A real Slurm of four nodes on this machine, started once for all tests that ask for it, and always taken down."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import NOT_INHERITED
from slurm_test_cluster import HERE, SlurmCluster

REQUIRED = "DIST_TRANSFORMER_REQUIRE_SLURM"
"""With this variable set to 1 a cluster that cannot be started is a failure; without it the tests are skipped."""


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmCluster]:
    # Not pytest's own folder: unix sockets allow only short paths.
    folder = Path(tempfile.mkdtemp(prefix="slurm-test-"))
    settings = {**os.environ, "SLURM_TEST_NODES": "4", "SLURM_TEST_DISK": "1"}
    try:
        started = subprocess.run(
            [HERE / "cluster_up.sh", folder], env=settings, capture_output=True, text=True, check=False
        )
        if started.returncode != 0:
            reason = f"no Slurm could be started here: {started.stderr.strip()}"
            pytest.fail(reason) if os.environ.get(REQUIRED) == "1" else pytest.skip(reason)
        clean = {
            name: value
            for name, value in os.environ.items()
            if name not in NOT_INHERITED and not name.startswith(("SLURM_", "SBATCH_"))
        }
        path = f"{clean.get('PATH', '')}:/usr/sbin:/sbin"
        yield SlurmCluster(folder, {**clean, "PATH": path, "SLURM_CONF": str(folder / "slurm.conf")})
    finally:
        subprocess.run([HERE / "cluster_down.sh", folder], capture_output=True, check=False)
        shutil.rmtree(folder, ignore_errors=True)
