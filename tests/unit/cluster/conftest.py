"""Slurm's commands as small programs on PATH; tests/slurm has real ones."""

import os
from pathlib import Path

import pytest
from cluster_helpers import SBATCH, FakeSlurm

from dist_transformer.run_dir import RunDir


@pytest.fixture
def fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    slurm = FakeSlurm(tmp_path / "fake_bin")
    slurm.folder.mkdir()
    slurm.program("sbatch", SBATCH)
    slurm.program("squeue", 'cat "$(dirname "$0")/jobs"')
    slurm.set_jobs("")
    monkeypatch.setenv("PATH", f"{slurm.folder}:{os.environ['PATH']}")
    return slurm


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")
