"""The document of `status --json`: what Slurm says and what the run says, brought together."""

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from fake_slurm import FakeSlurm, answer, job_line
from watched_run import NOW, add_lines, beat, make_run, trained

from dist_transformer.cli.status import _progress_rows
from dist_transformer.cluster import job_status as module
from dist_transformer.cluster.job_status import report, report_all
from dist_transformer.cluster.run_ref import RunRef
from dist_transformer.config.loading import load_config, to_yaml
from dist_transformer.files import write_json
from dist_transformer.run import status
from dist_transformer.run.folder import RunDir
from dist_transformer.run.status import look_at

KEYS = [
    *("run", "folder", "time", "state", "step"),
    *("max_steps", "loss", "learning_rate", "tokens_per_second", "record_time"),
    *("seconds_to_last_step", "heartbeat_time", "owner", "validation", "checkpoint", "checkpoint_time"),
    *("checkpoint_age_seconds", "set_aside", "attempt", "failure_reason"),
    *("last_end_time", "last_exit_code", "last_exit_text"),
    *("last_end_reason", "last_end_requeued", "starts", "excluded_nodes", "divergences", "last_divergence"),
    *("goodput", "log", "next"),
    *("mlflow_run_id", "mlflow_uri", "job_id", "job", "warnings"),
]


@pytest.fixture(autouse=True)
def now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "time", lambda: NOW)
    monkeypatch.setattr("dist_transformer.files.file_clock", lambda folder: NOW)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "runs" / "a", job_id="5")


def of(run_dir: RunDir, job_id: str | None = "5") -> dict[str, Any]:
    return report(RunRef(run_dir, job_id))


def test_the_keys_are_always_the_same(slurm: FakeSlurm, run_dir: RunDir, tmp_path: Path) -> None:
    slurm.answers("squeue", job_line("5", "RUNNING"))
    bare = RunDir(tmp_path / "bare")
    bare.slurm.mkdir(parents=True)
    assert list(of(run_dir)) == KEYS
    assert list(of(bare, None)) == KEYS


def test_the_newest_scores_are_those_of_the_last_validation(slurm: FakeSlurm, run_dir: RunDir) -> None:
    slurm.answers("squeue", job_line("5", "RUNNING"))
    assert of(run_dir)["validation"] is None
    scores = [{"event": "validation", "step": step, "loss": 3.0 - step / 100, "bleu": 20.0} for step in (10, 20)]
    scores[-1]["perplexity"] = "inf"
    add_lines(run_dir.metrics, *scores, trained(30, NOW - 5))
    found = of(run_dir)
    assert found["validation"] == scores[-1]
    json.dumps(found, allow_nan=False)
    assert ("validation", "loss 2.8000, perplexity -, BLEU 20.00 at step 20") in list(_progress_rows(found, NOW))


def test_records_that_cannot_be_read_now_hide_nothing_else(
    slurm: FakeSlurm, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.answers("squeue", job_line("5", "RUNNING"))
    monkeypatch.setattr(module, "newest_record", Mock(side_effect=OSError(116, "Stale file handle")))
    found = of(run_dir)
    assert (found["validation"], found["goodput"], found["job"]["state"]) == (None, None, "RUNNING")
    assert any("Stale file handle" in said for said in found["warnings"])


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


@pytest.mark.parametrize(("pauses", "seconds"), [([7200], 58), ([100, 100], 249), ([100, 7200], 249)])
def test_a_single_long_pause_does_not_count_as_the_speed(
    slurm: FakeSlurm, run_dir: RunDir, pauses: list[int], seconds: int
) -> None:
    slurm.answers("squeue", job_line("5", "RUNNING"))
    later = [sum(pauses[: step // 10]) - sum(pauses) for step in range(1, 51)]
    add_lines(run_dir.metrics, *(trained(step, NOW - 60 + step + later[step - 1]) for step in range(1, 51)))
    beat(run_dir, NOW - 3, started=NOW - 8000)
    assert of(run_dir)["seconds_to_last_step"] == pytest.approx((1000 - 50) * seconds / 49)


@pytest.mark.parametrize(("first", "seconds"), [(1, 1000 - 50), (49, None)])
def test_a_clock_that_is_behind_that_of_the_node_before_leaves_the_time_to_the_end(
    slurm: FakeSlurm, run_dir: RunDir, first: int, seconds: int | None
) -> None:
    slurm.answers("squeue", job_line("5", "RUNNING"))
    records = (trained(step, NOW - 60 + step + 90 * (step < 50)) for step in range(first, 51))  # a step a second
    add_lines(run_dir.metrics, *records)
    beat(run_dir, NOW - 3, started=NOW - 8000)
    assert of(run_dir)["seconds_to_last_step"] == (seconds and pytest.approx(seconds))


def test_suspensions_do_not_count_for_the_time_to_the_end(slurm: FakeSlurm, run_dir: RunDir) -> None:
    slurm.answers("squeue", job_line("5", "RUNNING"))
    records = (trained(step, NOW - 2000 + 100 * step, stop_seconds=99.0) for step in range(1, 11))
    add_lines(run_dir.metrics, *records)
    beat(run_dir, NOW - 3, started=NOW - 8000)
    assert of(run_dir)["seconds_to_last_step"] == pytest.approx(1000 - 40)  # run.json has step 40


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
    aside = ["step_00000045.damaged", "step_00000050.diverged"]
    for name in ("step_00000050.tmp", *aside):
        (run_dir.checkpoints / name).mkdir()
    found = of(run_dir)
    assert found["set_aside"] == aside
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
    earlier = {**ended, "exit_code": 75, "reason": "earlier"}
    add_lines(
        run_dir.attempts, earlier, ended, {"event": "began", "time": NOW - 9, "job": "5", "attempt": 1, "nodes": "n1"}
    )
    found = of(run_dir)
    assert (found["last_exit_code"], found["last_end_requeued"], found["last_end_reason"]) == (70, True, "r")
    assert "no progress" in found["last_exit_text"]


def attempt(event: str, ago: float, **values: Any) -> dict[str, Any]:
    return {"event": event, "time": NOW - ago, "job": "5", "attempt": 1, **values}


def test_what_an_earlier_attempt_left_is_not_shown_as_if_it_were_now(slurm: FakeSlurm, run_dir: RunDir) -> None:
    slurm.answers("squeue", job_line("5", "RUNNING"))
    write_json(run_dir.state, {"state": "stopped", "step": 40, "time": NOW - 30})
    beat(run_dir, NOW - 20, started=NOW - 90)
    assert (of(run_dir)["state"], of(run_dir)["attempt"]) == ("stopped", None)
    assert of(run_dir)["heartbeat_time"] == NOW - 20
    add_lines(run_dir.attempts, attempt("began", 10))
    found = of(run_dir)
    assert (found["state"], found["attempt"]) == ("starting", 1)
    assert (found["heartbeat_time"], found["owner"]) == (None, None)
    assert found["step"] == 40
    assert [row["state"] for row in report_all(run_dir.path.parent)] == ["starting"]
    beat(run_dir, NOW - 2, started=NOW - 5)
    assert of(run_dir)["heartbeat_time"] == NOW - 2
    write_json(run_dir.state, {"state": "running", "step": 40, "time": NOW - 1})
    assert of(run_dir)["state"] == "running"


def test_an_attempt_that_has_ended_does_not_start(slurm: FakeSlurm, run_dir: RunDir) -> None:
    slurm.answers("squeue", job_line("5", "PENDING", "BeginTime"))
    write_json(run_dir.state, {"state": "stopped", "step": 40, "time": NOW - 30})
    add_lines(run_dir.attempts, attempt("began", 10), attempt("ended", 5, exit_code=75))
    assert (of(run_dir)["state"], of(run_dir)["attempt"]) == ("stopped", None)


@pytest.mark.parametrize("state", ["PENDING", "REQUEUED", "REQUEUE_HOLD"])
@pytest.mark.parametrize("ends", [(), (attempt("ended", 5, exit_code=1),)])
def test_a_run_whose_job_went_back_to_the_queue_is_pending_and_not_running(
    slurm: FakeSlurm, run_dir: RunDir, state: str, ends: tuple[dict[str, Any], ...]
) -> None:
    """Its ranks were killed, so that run.json still says running, and the heartbeat is fresh; no end is noted when the
    node died."""
    slurm.answers("squeue", job_line("5", state, "BeginTime"))
    write_json(run_dir.state, {"state": "running", "step": 40, "time": NOW - 8})
    add_lines(run_dir.attempts, attempt("began", 10), *ends)
    beat(run_dir, NOW - 2, started=NOW - 9)
    found = of(run_dir)
    assert (found["state"], found["attempt"], found["heartbeat_time"]) == ("pending", None, None)
    assert found["warnings"] == []
    assert [row["state"] for row in report_all(run_dir.path.parent)] == ["pending"]
    beat(run_dir, NOW - 2, job=None)  # somebody trains it by hand meanwhile
    assert of(run_dir)["state"] == "running"
    assert [row["state"] for row in report_all(run_dir.path.parent)] == ["running"]


def test_a_job_that_is_over_has_no_heartbeat_and_one_that_trains_by_hand_has(slurm: FakeSlurm, run_dir: RunDir) -> None:
    slurm.answers("squeue", job_line("5", "TIMEOUT"))
    beat(run_dir, NOW - 2)
    found = of(run_dir)
    assert (found["heartbeat_time"], found["owner"]) == (None, None)
    assert found["next"] is not None
    beat(run_dir, NOW - 2, job=None)
    assert (of(run_dir)["heartbeat_time"], of(run_dir)["next"]) == (NOW - 2, None)


def test_a_job_that_ended_before_its_ranks_started_is_said_so(slurm: FakeSlurm, run_dir: RunDir) -> None:
    of_job_4 = attempt("ended", 80, job="4", exit_code=75)
    add_lines(run_dir.attempts, {**of_job_4, "time": 1.0})
    slurm.answers("squeue", job_line("5", "PENDING"))
    assert of(run_dir)["last_exit_code"] == 75
    slurm.answers("squeue", job_line("5", "FAILED"))
    found = of(run_dir)
    assert (found["last_exit_code"], found["last_exit_text"]) == (None, "before its ranks started")
    add_lines(run_dir.attempts, attempt("began", 70), attempt("ended", 60, exit_code=1))
    assert (of(run_dir)["last_exit_code"], of(run_dir)["last_exit_text"]) == (1, "failed")


def test_what_follows_a_stage_that_ended_well_is_the_training(slurm: FakeSlurm, tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "a", None, job_id="5")
    write_json(run_dir.job, {"job_id": "5", "attempts": 0, "stages": {"prepare": "5"}})
    (run_dir.slurm / "prepare-5.log").touch()
    logs, train = f"dist-transformer logs {run_dir.path}, then ", f"dist-transformer resume {run_dir.path}"
    again = f"{logs}dist-transformer submit {run_dir.path} --stages prepare"
    for state, expected in (("COMPLETED", (None, train)), ("FAILED", ("before its ranks started", again))):
        slurm.answers("squeue", job_line("5", state))
        assert (of(run_dir)["last_exit_text"], of(run_dir)["next"]) == expected
    slurm.has_forgotten()  # stages record no end
    assert (of(run_dir)["last_exit_text"], of(run_dir)["next"]) == (None, logs + train)


def test_a_job_that_is_over_without_having_finished_the_run_says_what_to_do_next(
    slurm: FakeSlurm, run_dir: RunDir
) -> None:
    log = run_dir.slurm / "job-5.log"
    slurm.answers("squeue", job_line("5", "RUNNING"))
    assert (of(run_dir)["log"], of(run_dir)["next"]) == (None, None)
    slurm.answers("squeue", job_line("5", "FAILED"))
    assert of(run_dir)["next"] == f"dist-transformer resume {run_dir.path}"
    log.touch()
    logs = f"dist-transformer logs {run_dir.path}, then "
    assert (of(run_dir)["log"], of(run_dir)["next"]) == (str(log), f"{logs}dist-transformer resume {run_dir.path}")
    assert of(run_dir, "4")["next"] is None  # an earlier job, or that of another stage
    make_run(run_dir.path, state="finished")
    assert of(run_dir)["next"] is None
    make_run(run_dir.path)
    run_dir.config.unlink()  # as a node of a pipeline that does not train
    write_json(run_dir.path / "node.json", {})
    assert of(run_dir)["next"] == f"{logs}dist-transformer submit --pipeline FILE"
    add_lines(run_dir.attempts, attempt("began", 70), attempt("ended", 60, exit_code=2))
    run_dir.job.unlink()  # by hand
    (run_dir.path / "node.json").unlink()
    assert of(run_dir)["next"] == f"{logs}submit it again"


@pytest.mark.parametrize("state", ["running", "stopped", "failed"])
def test_a_run_without_a_job_that_nobody_trains_is_trained_again_and_not_submitted(tmp_path: Path, state: str) -> None:
    run_dir = make_run(tmp_path / "runs" / "by hand", state)
    assert of(run_dir, None)["next"] == f"dist-transformer train '{run_dir.path}'"
    run_dir.log.touch()
    assert (
        of(run_dir, None)["next"]
        == f"dist-transformer logs '{run_dir.path}', then dist-transformer train '{run_dir.path}'"
    )
    beat(run_dir, NOW - 2, job=None)
    assert of(run_dir, None)["next"] is None
    make_run(run_dir.path, "finished")
    run_dir.owner.unlink()
    assert of(run_dir, None)["next"] is None


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


def test_a_job_that_slurm_does_not_show_is_over_only_if_it_was_ones_own_or_recorded_that(
    slurm: FakeSlurm, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without accounts nobody tells a job of another user, hidden by PrivateData, from one that was forgotten."""
    slurm.has_forgotten()
    run_dir.attempts.unlink(missing_ok=True)
    assert "has ended" in of(run_dir)["warnings"][0]
    assert of(run_dir)["next"] is not None
    owner = run_dir.job.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    for record, may_wait in (
        (None, True),
        ({"event": "began"}, True),
        ({"event": "ended", "requeued": True, "how": "decide"}, True),
        ({"event": "ended", "requeued": False, "how": "ended"}, True),
        ({"event": "ended", "requeued": False, "how": "decide"}, False),
    ):
        if record:
            add_lines(run_dir.attempts, {"time": NOW, "job": "5", "attempt": 0, **record})
        found = of(run_dir)
        assert ("it is over, or hidden from you: ask its owner" in found["warnings"][0]) is may_wait
        assert (found["next"] is None) is may_wait


def test_all_runs_of_a_folder_are_one_question_to_slurm(slurm: FakeSlurm, run_dir: RunDir) -> None:
    slurm.answers("squeue", f"{job_line('5', 'RUNNING')}\n{job_line('6', 'PENDING')}")
    other = make_run(run_dir.path.parent / "b", job_id="6")
    make_run(run_dir.path.parent / "c", state="finished", job_id="4")
    (run_dir.path.parent / "mlartifacts").mkdir()
    add_lines(other.metrics, trained(10, NOW))
    rows = report_all(run_dir.path.parent)
    assert [(row["run"], row["job_state"]) for row in rows] == [("b", "PENDING"), ("a", "RUNNING"), ("c", None)]


def test_a_list_of_runs_works_without_slurm(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert [row["job_state"] for row in report_all(run_dir.path.parent)] == [None]


def test_a_checkpoint_and_an_owner_that_go_while_one_looks_are_no_error(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "newest_checkpoint", lambda _: "step_00000009")  # rotated since it was listed
    monkeypatch.setattr(status, "read_record", lambda path: {"host": "n1"} if path == run_dir.owner else {})
    view = look_at(run_dir)
    assert (view.checkpoint, view.checkpoint_time) == ("step_00000009", None)
    assert (view.owner, view.heartbeat_time) == ({"host": "n1"}, None)


def test_a_history_that_cannot_be_read_costs_the_goodput_alone(run_dir: RunDir) -> None:
    run_dir.history.unlink(missing_ok=True)
    run_dir.history.symlink_to("/proc/self/mem")  # opens, and answers EIO
    document = report(RunRef(run_dir, None))
    assert document["goodput"] is None
    assert document["step"] == look_at(run_dir).step > 0
    told = f"{run_dir.path}: its records cannot be read now ([Errno 5] Input/output error"
    assert [text for text in document["warnings"] if text.startswith(told)]


@pytest.mark.parametrize("max_steps", ["70000", "null"])
def test_the_last_step_is_found_without_reading_all_settings(run_dir: RunDir, max_steps: str) -> None:
    run_dir.config.write_text(
        f"training: {{max_steps: {max_steps}, max_epochs: 9}}\ndata: {{train: {{demo: train}}}}\n"
    )
    expected = look_at(run_dir).max_steps  # as a user wrote it
    written = to_yaml(load_config(run_dir.config))
    run_dir.config.write_text(f"{written}of_another_version: 1\n")
    assert look_at(run_dir).max_steps == expected == (70_000 if max_steps == "70000" else None)


def test_a_configuration_that_cannot_be_read_costs_the_number_of_steps_alone(run_dir: RunDir) -> None:
    run_dir.config.write_text("nonsense: [")
    assert look_at(run_dir).max_steps is None
    assert look_at(run_dir).step == 40
