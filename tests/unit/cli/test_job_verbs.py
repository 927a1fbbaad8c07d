"""stop, cancel, resume, against a Slurm that answers from files."""

import json
import os
import time
from pathlib import Path

import pytest
from called_verbs import call, refusal
from fake_slurm import FakeSlurm, job_line
from watched_run import beat, make_run

from dist_transformer.cli import submit as submit_module
from dist_transformer.cluster.checks import busy_problems
from dist_transformer.cluster.submit import note_job
from dist_transformer.run.folder import RunDir


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "runs" / "a", job_id="5")


# ------------------------------------------------------------------------------------------------------------- steering
def test_stop_asks_a_running_job_by_a_file(slurm: FakeSlurm, run_dir: RunDir) -> None:
    slurm.answers("squeue", job_line("5", "RUNNING"))
    slurm.answers("scancel")
    assert "asked to save and end" in call("stop", run_dir.path).stdout
    assert run_dir.stop_file.exists()
    assert slurm.arguments("scancel") == []


def test_stop_takes_a_waiting_job_out_of_the_queue(slurm: FakeSlurm, run_dir: RunDir) -> None:
    slurm.answers("squeue", job_line("5", "PENDING", "BeginTime"))
    slurm.answers("scancel")
    assert "job 5 was waiting" in call("stop", run_dir.path).stdout
    assert slurm.arguments("scancel") == ["5"]


def test_stop_of_a_waiting_task_takes_no_other_task_out_of_the_queue(slurm: FakeSlurm, tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "seeds" / "seed_3", job_id="12_3")
    slurm.answers("squeue", job_line("12_[1-4%1]", "PENDING", "JobArrayTaskLimit"))
    slurm.answers("scancel")
    assert "job 12_3 was waiting" in call("stop", run_dir.path).stdout
    assert slurm.arguments("scancel") == ["12_3"]  # with --state=PENDING Slurm 22.05 ends all four


@pytest.mark.parametrize("state", ["PREEMPTED", "NODE_FAIL"])
def test_what_slurm_would_have_requeued_is_resumed_once_squeue_has_forgotten_it(
    slurm: FakeSlurm, run_dir: RunDir, submitted: list[tuple[Path, list[str]]], state: str
) -> None:
    slurm.has_forgotten()
    slurm.answers("sacct", f"5|5|{state}|1795307143|1|n1|main|1795307143|0:0|0|")
    assert call("resume", run_dir.path).exit_code == 0
    assert submitted == [(run_dir.path, [])]


def test_a_job_of_another_user_that_squeue_hides_is_not_submitted_again(
    slurm: FakeSlurm, run_dir: RunDir, submitted: list[tuple[Path, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.has_forgotten()
    owner = run_dir.job.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    slurm.answers("sacct", f"5|5|PENDING|Unknown|1|None assigned|main|1795307143|0:0|{owner}|")
    assert "its job 5 is not over, it is PENDING: Slurm hides the jobs of other users" in refusal(
        "resume", run_dir.path
    )
    shown = call("status", run_dir.path).stdout
    assert "job: 5 PENDING (PrivateData)" in shown
    assert "next: " not in shown
    slurm.answers("sbatch")
    [problem] = busy_problems(run_dir)
    assert "job 5 already works on it (PENDING)" in problem
    assert submitted == []
    slurm.answers("sacct", f"5|5|RUNNING|1795307143|1|n1|main|1795307143|0:0|{owner}|")  # accounts have missed its end
    ended = {"event": "ended", "time": 0, "job": "5", "attempt": 0, "how": "decide", "requeued": False}
    run_dir.attempts.write_text(json.dumps(ended) + "\n")
    assert busy_problems(run_dir) == []
    assert call("resume", run_dir.path).exit_code == 0
    assert submitted == [(run_dir.path, [])]


def test_stop_of_a_waiting_job_that_slurm_refuses_leaves_no_file(slurm: FakeSlurm, run_dir: RunDir) -> None:
    """It is a colleague's, and would end as soon as it starts."""
    slurm.answers("squeue", job_line("5", "PENDING", "Priority"))
    slurm.answers("scancel", code=1, stderr="scancel: error: Kill job error on job id 5: Access/permission denied")
    assert "Access/permission denied" in refusal("stop", run_dir.path)
    assert not run_dir.stop_file.exists()


def test_cancel_says_that_slurm_may_hide_a_colleagues_job(
    slurm: FakeSlurm, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.has_forgotten()
    owner = run_dir.job.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    said = "nothing is cancelled: Slurm shows no job 5: it is over, or hidden from you: ask its owner"
    assert said in refusal("cancel", run_dir.path)


def test_stop_leaves_no_file_where_nothing_runs(slurm: FakeSlurm, run_dir: RunDir) -> None:
    make_run(run_dir.path, state="stopped")
    slurm.answers("squeue", job_line("5", "COMPLETED"))
    assert "nothing to stop: job 5 is over (COMPLETED)" in refusal("stop", run_dir.path)
    slurm.has_forgotten()
    assert "nothing to stop: Slurm does not know job 5 (any more)" in refusal("stop", run_dir.path)
    assert "nothing to stop: it does not run" in refusal("stop", make_run(run_dir.path.parent / "b", "failed").path)
    assert not run_dir.stop_file.exists()


def test_stop_of_a_finished_run_leaves_no_file_also_without_slurm(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    make_run(run_dir.path, state="finished")
    assert refusal("stop", run_dir.path) == f"{run_dir.path}: is finished; nothing to stop"
    assert not run_dir.stop_file.exists()


def test_stop_works_without_slurm(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    result = call("stop", run_dir.path)
    assert result.exit_code == 0
    assert run_dir.stop_file.exists()
    assert "Slurm was not asked about job 5" in result.stderr


def test_stop_of_a_run_without_a_job_names_train_which_resumes_it(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "runs" / "by-hand")
    assert f"to resume:  dist-transformer train {run_dir.path}\n" in call("stop", run_dir.path).stdout


def test_cancel_ends_the_job(slurm: FakeSlurm, run_dir: RunDir) -> None:
    slurm.answers("squeue", job_line("5", "RUNNING"))
    slurm.answers("scancel")
    assert "job 5 is cancelled" in call("cancel", run_dir.path).stdout
    assert slurm.arguments("scancel") == ["5"]


@pytest.mark.parametrize(
    ("job_id", "rest"),
    [("4", "prepare,train,average,evaluate"), ("5", "train,average,evaluate"), ("7", "evaluate")],
)
def test_what_brings_a_run_back_names_the_stages_that_waited_for_it(
    slurm: FakeSlurm, run_dir: RunDir, job_id: str, rest: str
) -> None:
    """Slurm takes them out of the queue."""
    comment = f"dist-transformer:{run_dir.path}"
    note_job(run_dir, {"prepare": "4", "train": "5", "average": "6", "evaluate": "7"}, "sbatch")
    slurm.answers("squeue", job_line(job_id, "RUNNING", comment=comment))
    slurm.answers("scancel")
    again = f"dist-transformer submit {run_dir.path} --stages {rest}"
    for verb in ("stop", "cancel"):
        assert f"to resume:  {again}\n" in call(verb, job_id).stdout
    if job_id == "5":  # that `status` looks at
        slurm.answers("squeue", job_line("5", "CANCELLED", comment=comment))
        assert f"next: {again}\n" in call("status", run_dir.path).stdout


def test_what_brings_a_node_of_a_pipeline_back_is_its_pipeline(slurm: FakeSlurm, run_dir: RunDir) -> None:
    """`resume` would leave the nodes that waited for it."""
    (run_dir.path / "node.json").write_text("{}")
    slurm.answers("squeue", job_line("5", "RUNNING"))
    slurm.answers("scancel")
    for verb in ("stop", "cancel"):
        assert "to resume:  dist-transformer submit --pipeline FILE\n" in call(verb, run_dir.path).stdout
    run_dir.job.unlink()
    assert "to resume:  dist-transformer pipeline run FILE\n" in call("stop", run_dir.path).stdout


def test_cancel_says_what_there_is_not_to_cancel(slurm: FakeSlurm, run_dir: RunDir) -> None:
    slurm.answers("squeue", job_line("5", "FAILED"))
    assert "nothing is cancelled: job 5 is over (FAILED)" in refusal("cancel", run_dir.path)
    alone = make_run(run_dir.path.parent / "alone")
    assert "has no job to cancel: it was not given to Slurm; `stop` works on it" in refusal("cancel", alone.path)


def test_cancel_of_somebody_elses_job_says_slurms_words(slurm: FakeSlurm, run_dir: RunDir) -> None:
    slurm.answers("squeue", job_line("5", "RUNNING"))
    slurm.answers("scancel", code=1, stderr="scancel: error: Kill job error on job id 5: Access/permission denied")
    assert "scancel refused: scancel: error: Kill job error on job id 5: Access/permission denied" in refusal(
        "cancel", run_dir.path
    )


@pytest.fixture
def foreign(slurm: FakeSlurm, run_dir: RunDir) -> RunDir:
    """The run of a job 5 on another cluster with the same disk; the job 5 of this cluster is another one."""
    other = make_run(run_dir.path.with_name("other_1")).path
    note_job(run_dir, {"train": "5"}, f"sbatch --comment=dist-transformer:{run_dir.path}")
    slurm.answers("squeue", job_line("5", "PENDING", comment=f"dist-transformer:{other}"))
    slurm.answers("scancel")
    return run_dir


def test_another_job_with_the_id_of_a_runs_job_is_left_alone(
    slurm: FakeSlurm, foreign: RunDir, submitted: list[tuple[Path, list[str]]]
) -> None:
    beat(foreign, time.time())
    why = "job 5 of this Slurm is not this run's: look on the cluster that has it"
    document = json.loads(call("status", foreign.path, "--json").stdout)
    assert (document["job"], document["state"], document["warnings"]) == (None, "running", [why])
    assert "PENDING" not in call("list", foreign.path.parent).stdout
    assert f"nothing is cancelled: {why}" in refusal("cancel", foreign.path)
    assert why in call("stop", foreign.path).stderr
    assert foreign.stop_file.exists()
    assert slurm.arguments("scancel") == []
    assert call("resume", foreign.path).exit_code == 0
    assert submitted == [(foreign.path, [])]


def test_the_job_of_a_run_folder_that_was_moved_is_still_its_own(slurm: FakeSlurm, run_dir: RunDir) -> None:
    note_job(run_dir, {"train": "5"}, "sbatch --comment=dist-transformer:/gone/away")
    slurm.answers("scancel")
    for comment in ("/gone/away", f"{run_dir.path}/../{run_dir.name}"):
        slurm.answers("squeue", job_line("5", "RUNNING", comment=f"dist-transformer:{comment}"))
        assert "job 5 is cancelled" in call("cancel", run_dir.path).stdout


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, list[str]]]:
    calls: list[tuple[Path, list[str]]] = []
    monkeypatch.setattr(submit_module, "submit_run", lambda run, overrides: calls.append((run, overrides)))
    return calls


def test_resume_submits_the_run_folder_again(
    slurm: FakeSlurm, run_dir: RunDir, submitted: list[tuple[Path, list[str]]]
) -> None:
    slurm.answers("squeue", job_line("5", "TIMEOUT"))
    assert call("resume", run_dir.path, "training.max_steps=9").exit_code == 0
    assert submitted == [(run_dir.path, ["training.max_steps=9"])]


@pytest.mark.parametrize(
    ("state", "reason", "why"),
    [
        ("RUNNING", "None", "it is RUNNING; wait for it"),
        ("PENDING", "BeginTime", "it is PENDING: its time has not come"),
    ],
)
def test_resume_refuses_while_a_job_is_not_over(
    slurm: FakeSlurm, run_dir: RunDir, submitted: list[object], state: str, reason: str, why: str
) -> None:
    slurm.answers("squeue", job_line("5", state, reason))
    assert why in refusal("resume", run_dir.path)
    assert submitted == []


def test_resume_releases_a_held_job(slurm: FakeSlurm, run_dir: RunDir, submitted: list[object]) -> None:
    slurm.answers("squeue", job_line("5", "PENDING", "launch failed requeued held"))
    slurm.answers("scontrol")
    assert "job 5 is held, and released without a.b=1; `cancel` it first" in refusal("resume", run_dir.path, "a.b=1")
    assert "released" in call("resume", run_dir.path).stdout
    assert slurm.arguments("scontrol") == ["release", "5"]
    assert submitted == []


@pytest.mark.parametrize("reason", ["launch failed requeued held", "BeginTime"])
def test_a_job_whose_run_was_moved_is_not_released_but_said_to_have_lost_its_script(
    slurm: FakeSlurm, run_dir: RunDir, submitted: list[tuple[Path, list[str]]], reason: str
) -> None:
    gone = run_dir.path.parent / "before"
    slurm.answers("squeue", job_line("5", "PENDING", reason, comment=f"dist-transformer:{gone}"))
    for program in ("scontrol", "scancel"):
        slurm.answers(program)
    said = refusal("resume", run_dir.path)
    assert f"its job 5 is not over, it is PENDING; its script is in {gone}, which is not there" in said
    assert "if the run was moved, `stop` it first" in said
    assert slurm.arguments("scontrol") == []
    call("stop", run_dir.path)
    assert slurm.arguments("scancel") == ["5"]
    slurm.answers("squeue", job_line("5", "CANCELLED", comment=f"dist-transformer:{gone}"))
    call("resume", run_dir.path)
    assert submitted == [(run_dir.path, [])]


def test_a_job_that_an_administrator_holds_is_refused_in_slurms_words(slurm: FakeSlurm, run_dir: RunDir) -> None:
    slurm.answers("squeue", job_line("5", "PENDING", "JobHeldAdmin"))
    slurm.answers("scontrol", code=1, stderr="Access/permission denied for job 5")
    assert "scontrol refused: Access/permission denied for job 5" in refusal("resume", run_dir.path)
