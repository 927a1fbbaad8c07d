"""Reading squeue. (The words are those of Slurm 22.05; tests/slurm asks a real one.)"""

from collections.abc import Callable
from pathlib import Path

import pytest

from dist_transformer.cluster.slurm import SlurmError
from dist_transformer.cluster.status import JobState, job_state


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes `squeue` a program with this shell body."""

    def becomes(body: str) -> None:
        program = tmp_path / "squeue"
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return becomes


def test_a_waiting_job_has_its_reason(squeue: Callable[[str], None]) -> None:
    squeue("echo 'PENDING|BeginTime'")
    assert job_state("5") == JobState("PENDING", "BeginTime")
    assert not job_state("5").is_over


def test_an_array_is_over_when_all_its_parts_are(squeue: Callable[[str], None]) -> None:
    squeue("echo 'COMPLETED|None'; echo 'RUNNING|None'")
    assert job_state("5").state == "RUNNING"
    squeue("echo 'COMPLETED|None'; echo 'FAILED|NonZeroExitCode'")
    assert job_state("5").is_over


def test_a_pre_empted_job_comes_back(squeue: Callable[[str], None]) -> None:
    squeue("echo 'PREEMPTED|None'")
    assert not job_state("5").is_over


def test_a_forgotten_job_is_unknown_and_over(squeue: Callable[[str], None]) -> None:
    squeue("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert job_state("5").state == "UNKNOWN"
    assert job_state("5").is_over


def test_an_unreachable_controller_is_an_error_not_an_unknown_job(squeue: Callable[[str], None]) -> None:
    squeue("echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(SlurmError, match=r"squeue refused: .*Unable to contact slurm controller"):
        job_state("5")


def test_without_slurm_the_missing_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(SlurmError, match="squeue: not found; expected Slurm's commands on PATH"):
        job_state("5")
