"""What MLflow should say of a run that could not say it itself, from its records and from Slurm."""

import time
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm, job_line
from watched_run import add_lines, beat, make_run

from dist_transformer.cluster.job_status import report, status_after_attempt, status_found
from dist_transformer.cluster.requeue import end
from dist_transformer.cluster.run_ref import RunRef
from dist_transformer.run.folder import RunDir


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = make_run(tmp_path / "runs" / "a", job_id="5")
    made.slurm.mkdir(exist_ok=True)
    return made


def found(run_dir: RunDir, said: str, job_id: str | None = "5") -> str | None:
    return status_found(report(RunRef(run_dir, job_id)), said)


@pytest.mark.parametrize(
    ("exit_code", "how", "status"),
    [(0, "decide", "FINISHED"), (75, "decide", "SCHEDULED"), (1, "decide", "SCHEDULED"), (2, "decide", "FAILED"),
     (75, "preflight", "SCHEDULED")],
)  # fmt: skip
def test_after_an_attempt_the_status_is_what_becomes_of_the_job(
    run_dir: RunDir, exit_code: int, how: str, status: str
) -> None:
    end(run_dir, "5", 0, exit_code, how)
    assert status_after_attempt(run_dir, "5", 0) == status


@pytest.mark.parametrize("exit_code", [1, 75])
def test_a_run_that_is_given_up_has_failed(run_dir: RunDir, exit_code: int) -> None:
    for attempt in range(4):
        end(run_dir, "5", attempt, exit_code, "decide")
    assert [status_after_attempt(run_dir, "5", attempt) for attempt in range(4)] == [*["SCHEDULED"] * 3, "FAILED"]


def test_a_person_who_asked_for_the_stop_has_ended_the_run(run_dir: RunDir) -> None:
    run_dir.stop_file.touch()
    end(run_dir, "5", 0, 75, "decide")
    assert status_after_attempt(run_dir, "5", 0) == "KILLED"


@pytest.mark.parametrize(("how", "status"), [("cancelled", "KILLED"), ("ended", "SCHEDULED")])
@pytest.mark.parametrize("exit_code", [75, 143])
def test_a_cancelled_job_is_over_and_one_that_slurm_ended_comes_back(
    run_dir: RunDir, how: str, status: str, exit_code: int
) -> None:
    end(run_dir, "5", 0, exit_code, how)
    assert status_after_attempt(run_dir, "5", 0) == status


def test_without_a_note_of_this_attempt_nothing_is_known(run_dir: RunDir) -> None:
    end(run_dir, "5", 1, 1, "decide")
    end(run_dir, "4", 0, 1, "decide")
    assert status_after_attempt(run_dir, "5", 0) is None


@pytest.mark.parametrize("said", ["RUNNING", "SCHEDULED"])
def test_a_job_that_is_over_has_killed_its_run(slurm: FakeSlurm, run_dir: RunDir, said: str) -> None:
    slurm.answers("squeue", job_line("5", "CANCELLED"))
    assert found(run_dir, said) == "KILLED"


def test_a_job_that_gave_up_has_failed(slurm: FakeSlurm, run_dir: RunDir) -> None:
    slurm.answers("squeue", job_line("5", "FAILED"))
    add_lines(run_dir.attempts, {"event": "began", "job": "5", "attempt": 0, "newest": None, "time": 1.0})
    end(run_dir, "5", 0, 2, "decide")
    assert found(run_dir, "RUNNING") == "FAILED"


def test_a_job_that_waits_again_will_go_on_with_its_run(slurm: FakeSlurm, run_dir: RunDir) -> None:
    slurm.answers("squeue", job_line("5", "PENDING", "BeginTime"))
    assert found(run_dir, "RUNNING") == "SCHEDULED"
    assert found(run_dir, "SCHEDULED") is None


def test_of_a_run_that_gives_signs_of_life_what_was_said_is_true(slurm: FakeSlurm, run_dir: RunDir) -> None:
    slurm.answers("squeue", job_line("5", "RUNNING"))
    beat(run_dir, time.time())
    assert found(run_dir, "RUNNING") is None


def test_when_slurm_does_not_answer_nobody_can_know(slurm: FakeSlurm, run_dir: RunDir) -> None:
    slurm.answers("squeue", code=1, stderr="slurm_load_jobs error: Unable to contact slurm controller")
    assert found(run_dir, "RUNNING") is None


def test_a_run_without_a_job_was_killed_if_it_did_not_stop_in_order(run_dir: RunDir) -> None:
    assert found(run_dir, "RUNNING", None) == "KILLED"
    assert found(run_dir, "SCHEDULED", None) is None


def test_a_run_started_by_hand_has_nothing_to_do_with_an_old_job_of_its_folder(
    slurm: FakeSlurm, run_dir: RunDir
) -> None:
    slurm.answers("squeue", job_line("5", "FAILED"))
    document = report(RunRef(run_dir, "5"))
    assert status_found(document, "SCHEDULED", is_by_hand=True) is None
    assert status_found(document, "RUNNING", is_by_hand=True) == "KILLED"


@pytest.mark.parametrize("job_id", ["5", None])
def test_a_run_that_was_killed_after_its_end_is_finished(slurm: FakeSlurm, tmp_path: Path, job_id: str | None) -> None:
    slurm.answers("squeue", job_line("5", "FAILED"))
    assert found(make_run(tmp_path / "runs" / "b", "finished", job_id), "RUNNING", job_id) == "FINISHED"


def test_a_failure_before_anything_could_be_said_is_found(tmp_path: Path) -> None:
    assert found(make_run(tmp_path / "runs" / "b", "failed"), "SCHEDULED", None) == "FAILED"


@pytest.mark.parametrize("said", ["FINISHED", "FAILED", "KILLED"])
def test_an_end_that_was_said_stays(slurm: FakeSlurm, run_dir: RunDir, said: str) -> None:
    slurm.answers("squeue", job_line("5", "CANCELLED"))
    assert found(run_dir, said) is None
