"""The document of `status --json`: what Slurm says and what the run says, brought together."""

import os
from pathlib import Path
from typing import Any

import pytest
from fake_slurm import FakeSlurm, answer, job_line, make_fake_slurm
from watched_run import NOW, add_lines, beat, make_run, trained

from dist_transformer.cluster import report as module
from dist_transformer.cluster.report import report, report_all
from dist_transformer.cluster.run_view import look_at
from dist_transformer.cluster.targets import Target
from dist_transformer.run_dir import RunDir, write_json

KEYS = [
    *("run", "folder", "time", "state", "step"),
    *("max_steps", "loss", "learning_rate", "tokens_per_second", "record_time"),
    *("seconds_to_last_step", "heartbeat_time", "owner", "checkpoint", "checkpoint_time"),
    *("checkpoint_age_seconds", "starts", "last_end_time", "last_exit_code", "last_exit_text"),
    *("last_end_reason", "last_end_requeued", "excluded_nodes", "divergences", "last_divergence"),
    *("mlflow_run_id", "mlflow_uri", "job_id", "job", "warnings"),
]


@pytest.fixture(autouse=True)
def now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "time", lambda: NOW)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = make_fake_slurm(tmp_path / "bin")
    monkeypatch.setenv("PATH", fake.path)
    return fake


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "runs" / "a", job_id="5")


def of(run_dir: RunDir, job_id: str | None = "5") -> dict[str, Any]:
    return report(Target(run_dir, job_id))


def test_the_keys_are_always_the_same(slurm: FakeSlurm, run_dir: RunDir, tmp_path: Path) -> None:
    slurm.answers("squeue", job_line("5", "RUNNING"))
    bare = RunDir(tmp_path / "bare")
    bare.slurm.mkdir(parents=True)
    assert list(of(run_dir)) == KEYS
    assert list(of(bare, None)) == KEYS


def test_speed_and_time_to_the_end_come_from_the_records_of_this_start(slurm: FakeSlurm, run_dir: RunDir) -> None:
    slurm.answers("squeue", job_line("5", "RUNNING"))
    add_lines(run_dir.metrics, trained(10, NOW - 90_000), trained(20, NOW - 80_000))
    add_lines(run_dir.metrics, *(trained(step, NOW - 60 + step) for step in range(30, 51, 10)))
    beat(run_dir, NOW - 3, started=NOW - 100)
    found = of(run_dir)
    assert (found["step"], found["max_steps"], found["loss"]) == (50, 1000, 2.5)
    assert found["seconds_to_last_step"] == pytest.approx(1000 - 50)  # a step a second
    assert found["record_time"] == NOW - 10
    assert found["heartbeat_time"] == NOW - 3
    assert found["warnings"] == []


def test_a_run_that_does_not_go_on_has_no_time_to_the_end(slurm: FakeSlurm, run_dir: RunDir) -> None:
    slurm.answers("squeue", job_line("5", "PENDING", "BeginTime"))
    add_lines(run_dir.metrics, trained(10, NOW - 90), trained(20, NOW - 80))
    found = of(run_dir)
    assert found["seconds_to_last_step"] is None
    assert found["job"]["reason"] == "BeginTime"
    assert "2 minutes" in found["job"]["reason_text"]
    assert found["job"]["seconds_left"] is None
    assert found["job"]["nodes"] is None


def test_a_loss_that_is_not_a_number_is_shown_as_the_run_wrote_it(slurm: FakeSlurm, run_dir: RunDir) -> None:
    slurm.answers("squeue", job_line("5", "RUNNING"))
    add_lines(run_dir.metrics, trained(10, NOW, loss="nan"))
    assert of(run_dir)["loss"] == "nan"


def test_a_line_that_is_being_written_is_left_out(slurm: FakeSlurm, run_dir: RunDir) -> None:
    slurm.answers("squeue", job_line("5", "RUNNING"))
    add_lines(run_dir.metrics, trained(60, NOW))
    with run_dir.metrics.open("a") as file:
        file.write('{"event": "train", "step": 61, "ti')
    assert of(run_dir)["step"] == 60


def test_the_newest_checkpoint_has_its_age(slurm: FakeSlurm, run_dir: RunDir) -> None:
    slurm.answers("squeue", job_line("5", "RUNNING"))
    for step in (30, 40):
        folder = run_dir.checkpoints / f"step_{step:08d}"
        folder.mkdir(parents=True)
        os.utime(folder, (NOW - 100 + step, NOW - 100 + step))
    (run_dir.checkpoints / "step_00000050.tmp").mkdir()
    found = of(run_dir)
    assert (found["checkpoint"], found["checkpoint_age_seconds"]) == ("step_00000040", 60)


def test_how_the_last_attempt_ended_is_said_in_words(slurm: FakeSlurm, run_dir: RunDir) -> None:
    slurm.answers("squeue", job_line("5", "RUNNING"))
    ended = {
        "event": "ended",
        "time": NOW - 50,
        "job": "5",
        "attempt": 0,
        "exit_code": 70,
        "requeued": True,
        "reason": "r",
    }
    add_lines(run_dir.attempts, ended, {"event": "began", "time": NOW - 9, "job": "5", "attempt": 1, "nodes": "n1"})
    found = of(run_dir)
    assert (found["last_exit_code"], found["last_end_requeued"], found["last_end_reason"]) == (70, True, "r")
    assert "no progress" in found["last_exit_text"]


def test_excluded_nodes_divergences_and_mlflow_are_told_without_credentials(slurm: FakeSlurm, run_dir: RunDir) -> None:
    slurm.answers("squeue", job_line("5", "RUNNING"))
    write_json(run_dir.excluded, {"n3": "slow"})
    write_json(run_dir.divergence, [{"reason": "first"}, {"reason": "second"}])
    write_json(run_dir.tracking, {"run_id": "abc", "uri": "https://me:secret@tracking.example/x"})
    found = of(run_dir)
    assert found["excluded_nodes"] == {"n3": "slow"}
    assert (found["divergences"], found["last_divergence"]) == (2, "second")
    assert (found["mlflow_run_id"], found["mlflow_uri"]) == ("abc", "https://tracking.example/x")


def test_a_running_job_without_a_heartbeat_is_said_so(slurm: FakeSlurm, run_dir: RunDir) -> None:
    slurm.answers("squeue", job_line("5", "RUNNING"))
    assert "the job is RUNNING, but no rank works on the run folder" in of(run_dir)["warnings"][0]
    beat(run_dir, NOW - 61)
    assert "the job is RUNNING, but its last sign of life is 61 s old" in of(run_dir)["warnings"][0]
    beat(run_dir, NOW - 59)
    assert of(run_dir)["warnings"] == []


def test_a_job_that_has_just_begun_needs_no_heartbeat_yet(slurm: FakeSlurm, run_dir: RunDir) -> None:
    slurm.answers("squeue", job_line("5", "RUNNING").replace("1795307143", str(int(NOW) - 30)))
    assert of(run_dir)["warnings"] == []


def test_a_local_run_that_was_killed_is_said_so(run_dir: RunDir) -> None:
    beat(run_dir, NOW - 600)
    assert "run.json says running, but its last sign of life is 600 s old" in of(run_dir, None)["warnings"][0]


def test_a_run_whose_job_is_over_without_a_word_is_said_so(slurm: FakeSlurm, run_dir: RunDir) -> None:
    slurm.answers("squeue", job_line("5", "TIMEOUT"))
    assert "run.json says running, but the job is over" in of(run_dir)["warnings"][0]


def test_without_slurm_the_run_still_tells(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    found = of(run_dir)
    assert found["job"] is None
    assert found["step"] == 40
    assert found["warnings"][0].startswith("Slurm was not asked about job 5: squeue: not found")


def test_a_forgotten_job_is_told_by_the_accounts_where_there_are_some(slurm: FakeSlurm, run_dir: RunDir) -> None:
    slurm.has_forgotten()
    assert of(run_dir)["warnings"][0] == "Slurm does not know job 5 (any more): it has ended"
    slurm.answers("sacct", answer("sacct_25.05"))
    job = of(run_dir)["job"]
    assert (job["state"], job["reason"], job["source"]) == ("OUT_OF_MEMORY", "exit code 0:125", "sacct")


def test_all_runs_of_a_folder_are_one_question_to_slurm(slurm: FakeSlurm, run_dir: RunDir) -> None:
    slurm.answers("squeue", "5|RUNNING\n6|PENDING")
    other = make_run(run_dir.path.parent / "b", job_id="6")
    make_run(run_dir.path.parent / "c", state="finished", job_id="4")
    (run_dir.path.parent / "mlartifacts").mkdir()
    add_lines(other.metrics, trained(10, NOW))
    rows = report_all(run_dir.path.parent)
    assert [(row["run"], row["job_state"]) for row in rows] == [("b", "PENDING"), ("a", "RUNNING"), ("c", None)]


def test_a_list_of_runs_works_without_slurm(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert [row["job_state"] for row in report_all(run_dir.path.parent)] == [None]


def test_a_configuration_that_cannot_be_read_costs_the_number_of_steps_alone(run_dir: RunDir) -> None:
    run_dir.config.write_text("nonsense: [")
    assert look_at(run_dir).max_steps is None
    assert look_at(run_dir).step == 40
