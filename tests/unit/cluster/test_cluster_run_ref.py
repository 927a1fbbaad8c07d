"""From a run folder to its job, and from a job to its run folder."""

import time
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm, job_line, make_fake_slurm
from watched_run import NOW, add_lines, make_run

from dist_transformer.cluster.run_ref import RunRef, find_run, newest_job_id
from dist_transformer.cluster.submit import note_job
from dist_transformer.errors import UserError
from dist_transformer.files import read_json, write_json
from dist_transformer.run.folder import RunDir


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = make_fake_slurm(tmp_path / "bin")
    monkeypatch.setenv("PATH", fake.path)
    fake.has_forgotten()
    return fake


def test_a_run_folder_knows_its_newest_submission(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "a", job_id="12")
    assert find_run(str(run_dir.path), tmp_path) == RunRef(run_dir, "12")


def test_a_run_that_was_never_submitted_has_no_job(tmp_path: Path) -> None:
    assert find_run(str(make_run(tmp_path / "a").path), tmp_path).job_id is None


def test_a_job_started_by_hand_after_the_submission_is_the_newest(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "a", job_id="12")
    add_lines(run_dir.attempts, {"event": "began", "time": 1.0, "job": "11"})
    assert newest_job_id(run_dir) == "12"
    add_lines(run_dir.attempts, {"event": "began", "time": NOW, "job": "13"})
    assert newest_job_id(run_dir) == "13"


def test_a_job_is_found_by_its_comment(slurm: FakeSlurm, tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "odd | name")
    slurm.answers("squeue", job_line("5", "RUNNING", comment=f"dist-transformer:{run_dir.path}"))
    assert find_run("5", tmp_path / "none") == RunRef(run_dir, "5")


def test_a_task_of_an_array_is_found_by_its_comment(slurm: FakeSlurm, tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "seeds" / "seed_2")
    slurm.answers("squeue", job_line("5_2", "RUNNING", comment=f"dist-transformer:{tmp_path}/seeds/seed_%a"))
    assert find_run("5_2", tmp_path / "none") == RunRef(run_dir, "5_2")


def test_a_job_that_slurm_has_forgotten_is_found_in_the_folder_of_runs(slurm: FakeSlurm, tmp_path: Path) -> None:
    make_run(tmp_path / "a", job_id="4")
    run_dir = make_run(tmp_path / "b", job_id="5")
    task = make_run(tmp_path / "c", job_id="5_3")
    assert find_run("5", tmp_path) == RunRef(run_dir, "5")
    assert find_run("5_3", tmp_path) == RunRef(task, "5_3")


def test_a_job_of_another_stage_belongs_to_the_same_run(slurm: FakeSlurm, tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "a")
    note = {"job_id": "5", "submitted_at": "2027-01-01T00:00:00+00:00", "stages": {"prepare": "4", "train": "5"}}
    write_json(run_dir.job, note)
    assert find_run("4", tmp_path).run_dir == run_dir


def test_an_earlier_job_is_found_by_its_attempts_also_without_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    run_dir = make_run(tmp_path / "a", job_id="12")
    add_lines(run_dir.attempts, {"event": "began", "time": 1.0, "job": "11"})
    assert find_run("11", tmp_path) == RunRef(run_dir, "11")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "nothing",
            r"nothing: no such folder, and no job id; expected a run folder \(run.root/run.name\), or a job id like 123",
        ),
        (__file__, r"is a file; expected a run folder"),
        (
            "77",
            "job 77: squeue and sacct show no run folder of it, and no run in .* was submitted as it; give its folder, or --root",
        ),
    ],
)
def test_what_is_no_run_is_refused(slurm: FakeSlurm, tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        find_run(text, tmp_path)


def test_a_folder_that_is_no_run_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not a run folder: it has no config.yaml; `list` shows"):
        find_run(str(tmp_path), tmp_path)


def test_a_slurm_that_is_not_there_is_not_said_to_know_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(UserError, match=r"^job 3: Slurm could not be asked \(squeue: not found\), and no run in "):
        find_run("3", tmp_path)


def test_an_array_as_a_whole_is_no_run(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.answers("squeue", "\n".join([job_line("5_[2-3]", "PENDING"), job_line("5_1", "RUNNING")]))
    with pytest.raises(UserError, match=r"job 5: is an array of tasks: name one of them, like 5_1"):
        find_run("5", tmp_path)


def test_a_run_folder_that_was_moved_is_found_where_runs_are_or_is_said_to_be_gone(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
    slurm.answers("squeue", job_line("5", "RUNNING", comment="dist-transformer:/gone/away"))
    with pytest.raises(UserError, match="job 5: its run folder /gone/away is not there; was it moved or removed"):
        find_run("5", tmp_path)
    make_run(tmp_path / "of_another_cluster", job_id="5")  # which has the same file system, and counts alike
    with pytest.raises(UserError, match="job 5: its run folder /gone/away is not there; was it moved or removed"):
        find_run("5", tmp_path)
    run_dir = make_run(tmp_path / "away", job_id="5")
    assert find_run("5", tmp_path) == RunRef(run_dir, "5")


@pytest.mark.parametrize("job_id", ["", None, "12;x", [5]])
def test_a_note_without_a_job_id_is_as_none(tmp_path: Path, job_id: object) -> None:
    run_dir = make_run(tmp_path / "a", job_id="5")
    write_json(run_dir.job, {**read_json(run_dir.job), "job_id": job_id})
    assert find_run(str(run_dir.path), tmp_path).job_id is None


def test_a_damaged_note_of_the_job_is_as_none(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "a", job_id="5")
    run_dir.job.write_text("{")
    assert find_run(str(run_dir.path), tmp_path) == RunRef(RunDir(tmp_path / "a"), None)


def test_attempts_are_after_a_submission_by_their_number_as_the_clocks_of_nodes_differ(tmp_path: Path) -> None:
    """The job before ran on a node whose clock is an hour ahead of that where the next one was submitted."""
    run_dir = make_run(tmp_path / "a", job_id="10")
    began, ended = ({"event": event, "time": time.time() + 3600, "job": "10"} for event in ("began", "ended"))
    add_lines(run_dir.attempts, began)
    note_job(run_dir, {"train": "11"}, "sbatch")
    add_lines(run_dir.attempts, ended)  # by a script that was slow to end
    assert newest_job_id(run_dir) == "11"
    add_lines(run_dir.attempts, {**began, "job": "12", "time": 1.0})
    assert newest_job_id(run_dir) == "12"
