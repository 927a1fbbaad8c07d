"""Slurm's commands as small programs on PATH (tests/slurm has real ones), and a group of one rank."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import fake_slurm as answering
import pytest
from cluster_helpers import SBATCH, FakeSlurm

from dist_transformer.run.folder import RunDir

if TYPE_CHECKING:
    from dist_transformer.distributed.group import Ranks


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
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> answering.FakeSlurm:
    """One that answers with what real ones have said."""
    fake = answering.make_fake_slurm(tmp_path / "bin")
    monkeypatch.setenv("PATH", fake.path)
    return fake


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


@pytest.fixture(scope="session")
def ranks() -> Iterator["Ranks"]:
    """The group of this process alone."""
    from dist_transformer.distributed import group

    yield group.join(60)
    group.leave()
