"""status, list, logs, stacks, against a Slurm that answers from files."""

import json
import os
import platform
import re
import shlex
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from called_verbs import call, refusal
from fake_slurm import FakeSlurm, job_line
from watched_run import NOW, add_lines, beat, make_run, trained

from dist_transformer.cli import logs as logs_module
from dist_transformer.cluster.requeue import decide
from dist_transformer.cluster.run_ref import RunRef
from dist_transformer.decoding.search_settings import noting_tags
from dist_transformer.errors import UserError
from dist_transformer.files import write_json
from dist_transformer.format import duration
from dist_transformer.run.folder import RunDir


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "runs" / "a", job_id="5")


def test_the_page_of_mlflow_is_of_a_folder_of_runs(run_dir: RunDir) -> None:
    before = sorted(run_dir.path.rglob("*"))
    said = refusal("ui", run_dir.path)
    assert said == f"{run_dir.path}: is a run; expected the folder of runs: dist-transformer ui {run_dir.path.parent}"
    assert sorted(run_dir.path.rglob("*")) == before


def test_the_page_of_mlflow_on_a_port_that_is_taken_or_none_is_refused(run_dir: RunDir) -> None:
    runs = run_dir.path.parent
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = call("ui", runs, "--port", port)
    assert str(result.exception) == f"port {port}: Address already in use; give another with --port"
    assert result.output == ""
    assert isinstance(result.exception, UserError)
    for none in ("0", "-1", "99999"):
        refused = call("ui", runs, f"--port={none}")
        assert refused.exit_code == 2
        assert "Invalid value for '--port'" in refused.output


@pytest.mark.parametrize(
    ("corpora", "lines", "is_told"),
    [
        (({"tags": ["<2de>", "<x>"]}, {"tags": ["<2en>"]}), ["a", "x <2de> b"], True),
        (({"tags": ["<2de>"]}, {"tags": ["<2en>"]}), ["a", "<2en> b"], False),
        (({"tags": ["<2de>"]}, {}), ["a"], False),
        (({}, {}), ["a"], False),
    ],
)
def test_text_without_the_tags_that_all_training_text_had_is_noted(
    corpora: Any, lines: list[str], is_told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mixture = {f"c{number}": {"demo": "train", **corpus} for number, corpus in enumerate(corpora)}
    write_json(tmp_path / "config.yaml", {"data": {"mixture": {"corpora": mixture}}})
    assert [*noting_tags(tmp_path, iter(lines))] == lines
    expected = "warning: no line begins with <2de> or <2en>, as every training sentence did\n"
    assert capsys.readouterr().err == (expected if is_told else "")
    assert [*noting_tags(tmp_path / "a_model_folder", lines)] == lines


# ---------------------------------------------------------------------------------------------------- status and list
def test_status_is_lines_of_key_and_value_for_a_program(slurm: FakeSlurm, run_dir: RunDir) -> None:
    slurm.answers("squeue", job_line("5", "PENDING", "AssocGrpGRES"))
    lines = call("status", run_dir.path).stdout.splitlines()
    assert "job: 5 PENDING (AssocGrpGRES)" in lines
    assert "waits: all who share the account together use as much as it allows, or it alone asks for more" in lines
    assert "step: 40 of 1000 (4 %)" in lines
    config = run_dir.config.read_text(encoding="utf-8")
    run_dir.config.write_text(re.sub(r"max_steps\W+\d+", "max_steps: 20", config), encoding="utf-8")
    assert "step: 40 of 20 (100 %)" in call("status", run_dir.path).stdout.splitlines()


def test_a_failed_run_says_why_until_it_trains_again(slurm: FakeSlurm, tmp_path: Path) -> None:
    by_hand, end = make_run(tmp_path / "b", "failed"), {"event": "end", "step": 1, "state": "failed"}
    assert "state: failed" in call("status", by_hand.path).stdout.splitlines()
    add_lines(by_hand.history, *({**end, "reason": each} for each in ("a first one", "OSError: no disk")))
    assert "state: failed; OSError: no disk" in call("status", by_hand.path).stdout.splitlines()
    write_json(by_hand.state, {"state": "running", "step": 1})
    assert "state: running" in call("status", by_hand.path).stdout.splitlines()


def test_a_held_job_has_no_estimate_of_its_start(slurm: FakeSlurm, run_dir: RunDir) -> None:
    for reason, has_estimate in (("Priority", True), ("launch failed requeued held", False)):
        slurm.answers("squeue", job_line("5", "PENDING", reason).replace("N/A", "4000000000"))
        assert ("as Slurm estimates" in call("status", run_dir.path).stdout) == has_estimate


def ended(run_dir: RunDir, exit_code: int, reason: str) -> str:
    record = {"event": "ended", "time": 1.0, "job": "5", "attempt": 0, "exit_code": exit_code, "reason": reason}
    add_lines(run_dir.attempts, {**record, "event": "began"}, record)
    rows = dict(line.split(": ", 1) for line in call("status", run_dir.path).stdout.splitlines())
    return re.sub(r", \d+ d \d+ h ago", "", rows["last end"])


def test_the_last_end_says_each_thing_once(slurm: FakeSlurm, run_dir: RunDir) -> None:
    slurm.answers("squeue", job_line("5", "COMPLETED"))
    assert ended(run_dir, 0, "done") == "finished (exit code 0)"
    assert ended(run_dir, 9, "goes on") == "exit code 9; goes on"
    assert ended(run_dir, 2, decide(run_dir, 2, 3).reason) == "a mistake that somebody must fix (exit code 2)"
    assert ended(run_dir, 75, "stopped by the file x") == "saved on request (exit code 75); stopped by the file x"


def test_a_job_whose_setup_failed_points_to_its_log(slurm: FakeSlurm, run_dir: RunDir) -> None:
    slurm.answers("squeue", job_line("5", "FAILED", "NonZeroExitCode"))
    (run_dir.slurm / "job-5.log").touch()
    lines = call("status", run_dir.path).stdout.splitlines()
    assert f"last end: before its ranks started; see dist-transformer logs {run_dir.path}" in lines
    assert f"log: {run_dir.slurm}/job-5.log" in lines
    look = f"dist-transformer logs {run_dir.path}"
    assert f"next: {look}, then dist-transformer resume {run_dir.path}" in lines


def test_what_is_to_be_typed_next_can_be_pasted_whatever_the_folder_is_called(slurm: FakeSlurm, tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "it's my run", job_id="5")
    slurm.answers("squeue", job_line("5", "FAILED", "NonZeroExitCode"))
    (run_dir.slurm / "job-5.log").touch()
    out = call("status", run_dir.path).stdout
    slurm.answers("squeue", job_line("5", "RUNNING"))
    slurm.answers("scancel")
    out += call("stop", run_dir.path).stdout + call("cancel", run_dir.path).stdout
    commands = re.findall(r"dist-transformer (logs|resume) (.*?)(?:, then .*)?$", out, re.MULTILINE)
    assert [verb for verb, _ in commands] == ["logs", "logs", "resume", "resume"]
    assert {shlex.split(folder)[0] for _, folder in commands} == {str(run_dir.path)}


def test_an_attempt_that_has_begun_is_starting(slurm: FakeSlurm, run_dir: RunDir) -> None:
    slurm.answers("squeue", job_line("5", "RUNNING").replace("|2|n[1-2]|", "|1|n1|"))
    add_lines(run_dir.attempts, {"event": "began", "time": NOW, "job": "5", "attempt": 3})
    lines = call("status", run_dir.path).stdout.splitlines()
    assert "state: starting (attempt 3)" in lines
    assert "nodes: n1 (1 node), partition main" in lines


def test_slurms_estimate_has_a_name_of_its_own(slurm: FakeSlurm, run_dir: RunDir) -> None:
    slurm.answers("squeue", job_line("5", "PENDING", "Priority").replace("|N/A|", "|1795307143|"))
    names = [line.split(": ")[0] for line in call("status", run_dir.path).stdout.splitlines()]
    assert (names.count("begins"), names.count("starts")) == (1, 1)


def test_status_as_json_is_one_document(slurm: FakeSlurm, run_dir: RunDir) -> None:
    slurm.answers("squeue", job_line("5", "RUNNING"))
    document = json.loads(call("status", run_dir.path, "--json").stdout)
    assert document["job"]["state"] == "RUNNING"
    assert document["folder"] == str(run_dir.path)


def test_status_of_a_run_that_was_never_submitted_needs_no_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    result = call("status", make_run(tmp_path / "a", state="finished").path)
    assert result.exit_code == 0
    assert "job: none: it was not given to Slurm" in result.stdout


def test_list_is_a_line_for_each_run_with_tabs_between(slurm: FakeSlurm, run_dir: RunDir) -> None:
    slurm.answers("squeue", job_line("5", "RUNNING"))
    add_lines(run_dir.metrics, trained(50, 1.0))
    head, line = call("list", run_dir.path.parent).stdout.splitlines()
    assert head.split("\t") == ["run", "state", "job", "step", "loss", "last record", "checkpoint"]
    assert line.split("\t")[:5] == ["a", "running", "5 RUNNING", "50/1000", "2.5000"]


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_list_says_once_that_slurm_does_not_answer(slurm: FakeSlurm, run_dir: RunDir, form: tuple[str, ...]) -> None:
    """The states of the runs are then those of their folders alone."""
    make_run(run_dir.path.parent / "b", job_id="6")
    slurm.answers("squeue", code=1, stderr="Unable to contact slurm controller")
    result = call("list", run_dir.path.parent, *form)
    assert result.exit_code == 0
    assert result.stderr == "Slurm was not asked: squeue refused: Unable to contact slurm controller\n"


def test_list_of_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert "no such folder; expected the folder of runs" in refusal("list", tmp_path / "none")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3, "0 s"), (59.4, "59 s"), (200, "3 min 20 s"), (7500, "2 h 05 min"), (273_600, "3 d 4 h")],
)
def test_durations_are_said_in_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# ------------------------------------------------------------------------------------------------------ logs and stacks
def test_logs_prints_the_last_lines_of_a_rank(slurm: FakeSlurm, run_dir: RunDir) -> None:
    slurm.answers("squeue", job_line("5", "RUNNING"))
    (run_dir.slurm / "job-5.log").write_text("0: a\n1: b\n1: c\n0: d\n")
    assert call("logs", run_dir.path, "--rank", 1, "--lines", 1).stdout == "c\n"
    result = call("logs", run_dir.path, "--rank", 9)
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == f"no line of rank 9 in the last part of {run_dir.slurm}/job-5.log\n"


def test_an_empty_log_is_said_to_be_empty(slurm: FakeSlurm, run_dir: RunDir) -> None:
    slurm.answers("squeue", job_line("5", "FAILED"))
    (run_dir.slurm / "job-5.log").touch()
    for options in ([], ["--follow"], ["--rank", 3]):
        result = call("logs", run_dir.path, *options)
        assert (result.exit_code, result.stdout) == (0, "")
        assert result.stderr == f"{run_dir.slurm}/job-5.log: is empty so far\n"


def test_following_a_job_that_waits_begins_as_soon_as_it_has_a_log(
    slurm: FakeSlurm, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begins(find: Callable[[], Path | None], is_over: Callable[[], bool]) -> Path | None:
        assert not is_over()
        (run_dir.slurm / "job-5.log").write_text("a\n")
        slurm.answers("squeue", job_line("5", "COMPLETED"))
        return find()

    monkeypatch.setattr(logs_module, "wait_for_log", begins)
    slurm.answers("squeue", job_line("5", "PENDING", "Priority"))
    result = call("logs", run_dir.path, "--follow")
    assert result.stderr == "job 5 waits: other jobs come first; its log is followed as soon as there is one\n"
    assert result.stdout == "a\n"


def test_without_a_log_it_is_said_why(slurm: FakeSlurm, run_dir: RunDir) -> None:
    slurm.answers("squeue", job_line("5", "PENDING", "Priority"))
    why = f"{run_dir.path}: has no log yet: job 5 is PENDING: other jobs come first"
    assert refusal("logs", run_dir.path) == why
    slurm.answers("squeue", job_line("5", "CANCELLED"))
    for options in ([], ["--follow"]):
        assert "has no log: job 5 is over (CANCELLED) and wrote none" in refusal("logs", run_dir.path, *options)
    bare = make_run(run_dir.path.parent / "bare").path
    assert "has no log yet: its job has not started, or nothing was ever started here" in refusal("logs", bare)


def test_logs_of_a_job_are_no_other_jobs(slurm: FakeSlurm, run_dir: RunDir) -> None:
    slurm.has_forgotten()
    add_lines(
        run_dir.attempts, {"event": "began", "time": 1.0, "job": "3"}, {"event": "began", "time": 1.0, "job": "4"}
    )
    (run_dir.slurm / "prepare-4.log").write_text("prepared\n")
    (run_dir.slurm / "job-5.log").write_text("trained\n")
    root = ("--root", run_dir.path.parent)
    assert call("logs", "4", *root).stdout == "prepared\n"
    assert call("logs", "4", "--follow", *root).stdout == "prepared\n"
    assert call("logs", "5", *root).stdout == "trained\n"
    assert refusal("logs", "3", *root) == (
        f"job 3 wrote no log in {run_dir.slurm}; a script started by hand writes slurm-3.out where sbatch was called"
    )


def test_following_ends_when_the_job_is_over(slurm: FakeSlurm, run_dir: RunDir) -> None:
    slurm.answers("squeue", job_line("5", "COMPLETED"))
    (run_dir.slurm / "job-5.log").write_text("a\nb\n")
    assert call("logs", run_dir.path, "--follow").stdout == "a\nb\n"


def test_following_a_forgotten_job_of_another_user_ends_unless_it_trains(
    slurm: FakeSlurm, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only training records its end. Without accounts a job that waits, hidden, looks the same."""
    slurm.has_forgotten()
    run_dir.attempts.unlink(missing_ok=True)
    run_dir.job.write_text(json.dumps({"job_id": "5", "stages": {"prepare": "4", "train": "5"}}))
    owner = run_dir.job.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    assert [logs_module.is_over(RunRef(run_dir, job_id)) for job_id in ("4", "5")] == [True, False]


def test_ctrl_c_ends_following_without_a_word(
    slurm: FakeSlurm, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    (run_dir.slurm / "job-5.log").write_text("a\n")
    monkeypatch.setattr(logs_module, "follow", interrupted)
    result = call("logs", run_dir.path, "--follow")
    assert (result.exit_code, result.output) == (0, "")


def test_following_a_run_without_a_job_ends_by_its_own_word(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "a", state="stopped")
    run_dir.log.write_text("a\n")
    assert call("logs", run_dir.path, "-f").stdout == "a\n"


def test_following_a_run_without_a_job_ends_when_it_was_killed(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "a", state="running")
    run_dir.log.write_text("a\n")
    beat(run_dir, NOW - 10**9, job=None)
    assert call("logs", run_dir.path, "-f").stdout == "a\n"
    for beats, is_over in ((time.time(), False), (time.time() - 3600, True)):
        beat(run_dir, beats, job=None)
        assert logs_module.is_over(RunRef(run_dir, None)) is is_over


def test_stacks_asks_each_node_beside_the_ranks(slurm: FakeSlurm, run_dir: RunDir) -> None:
    slurm.answers("squeue", job_line("5_2", "RUNNING").replace("5_2|5|", "5_2|7|"))
    slurm.answers("scontrol", "n1\nn2\nn3")
    rank = {"rank": 0, "host": "n1", "pid": 8, "text": "File here"}
    answers = [{"node": "n2", "ranks": 0}, {"node": "n1", "ranks": 2}, {**rank, "rank": 1}, rank]
    slurm.answers("srun", "\n".join(["srun: a warning", *map(json.dumps, answers)]), code=1, stderr="n3 is gone")
    text = call("stacks", run_dir.path).stdout
    assert text.index("rank 0 on n1, process 8\nFile here") < text.index("rank 1 on n1")
    assert "node n2: no rank here has registered" in text
    assert "node n3: it did not answer: is it alive" in text
    asked = slurm.arguments("srun")
    assert {"--overlap", "--jobid=7", "--nodes=2", "--ntasks-per-node=1"} <= set(asked)
    assert asked[-3:] == ["-m", "dist_transformer.processes.stacks", "7"]


def test_stacks_of_a_job_that_srun_refuses_says_its_words(slurm: FakeSlurm, run_dir: RunDir) -> None:
    slurm.answers("squeue", job_line("5", "RUNNING"))
    slurm.answers("srun", code=1, stderr="srun: error: Unable to create step: Access denied")
    assert "srun refused: srun: error: Unable to create step: Access denied" in refusal("stacks", run_dir.path)


def test_stacks_of_a_job_that_is_over_are_those_of_its_last_hang(slurm: FakeSlurm, run_dir: RunDir) -> None:
    slurm.answers("squeue", job_line("5", "FAILED"))
    log = run_dir.slurm / "job-5.log"
    log.write_text("0: step 1\n")
    assert f"no rank to ask, and {log} tells of no rank that hung" in refusal("stacks", run_dir.path)
    log.write_text("0: rank 0: no progress; where each thread stands:\n0:   File x\n")
    text = call("stacks", run_dir.path).stdout
    assert "job 5 is FAILED" in text
    assert "0:   File x" in text


def test_stacks_of_a_local_run_are_asked_on_its_own_machine(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "a")
    beat(run_dir, 1.0, host="elsewhere", job=None)
    assert f"is trained on elsewhere, this is {platform.node()}; ask there" in refusal("stacks", run_dir.path)
    beat(run_dir, 1.0, host=platform.node(), pid=os.getpid())
    assert "does not run here as a rank of yours" in refusal("stacks", run_dir.path)
