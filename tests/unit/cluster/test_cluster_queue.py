"""What squeue and sacct write, in every version, becomes the same thing."""

import os
import subprocess
from typing import Any

import pytest
from fake_slurm import FakeSlurm, answer, job_line

from dist_transformer.cluster.queue import QueuedJob, job_now, jobs_of, known_jobs
from dist_transformer.cluster.slurm import SlurmError, cancel_job, is_job_id, release_job, run_on_each_node

VERSIONS = ("22.05", "23.11", "24.11", "25.05")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_running_job_reads_the_same_in_every_version(slurm: FakeSlurm, version: str) -> None:
    slurm.answers("squeue", answer(f"squeue_{version}"))
    [job] = [job for job in jobs_of("1") if job.job_id == "1"]
    assert job == QueuedJob(
        job_id="1",
        number="1",
        state="RUNNING",
        reason="",
        submit_time=1795308477,
        start_time=1795308478,
        seconds_left=9 * 60 + 57,
        num_nodes=2,
        nodes="n[1-2]",
        partition="main",
        comment="dist-transformer:/data/a b|c/run",
        source="squeue",
    )
    assert job.folder == "/data/a b|c/run"
    assert not job.is_over


@pytest.mark.parametrize("version", VERSIONS)
def test_no_line_of_any_version_is_lost(slurm: FakeSlurm, version: str) -> None:
    slurm.answers("squeue", answer(f"squeue_{version}"))
    lines = [line for line in answer(f"squeue_{version}").splitlines() if not line.startswith("#")]
    assert [job.job_id for job in jobs_of("1")] == [line.split("|")[0] for line in lines]


def test_what_slurm_does_not_know_is_none(slurm: FakeSlurm) -> None:
    slurm.answers("squeue", answer("squeue_22.05"))
    jobs = {job.job_id: job for job in jobs_of("1")}
    assert jobs["5"].start_time is None
    assert jobs["6"].seconds_left is None  # UNLIMITED
    assert jobs["5"].comment == ""
    assert jobs["5"].folder is None
    assert jobs["5"].nodes == ""
    slurm.answers("squeue", answer("squeue_25.05"))
    assert next(job for job in jobs_of("1") if job.job_id == "12").seconds_left is None  # NOT_SET


def test_days_and_hours_of_the_time_left_count(slurm: FakeSlurm) -> None:
    slurm.answers("squeue", answer("squeue_22.05"))
    left = {job.job_id: job.seconds_left for job in jobs_of("1")}
    assert left["2_1"] == ((24 + 1) * 60 + 59) * 60 + 57
    assert left["3"] == 60 * 60


def test_a_task_of_an_array_has_its_own_folder_and_number(slurm: FakeSlurm) -> None:
    slurm.answers("squeue", answer("squeue_22.05"))
    jobs = {job.job_id: job for job in jobs_of("2")}
    assert (jobs["2_1"].task, jobs["2_1"].number, jobs["2_1"].folder) == ("1", "7", "/data/sweep/task_1")
    assert jobs["2_[3-4%2]"].task is None


def test_a_reason_with_spaces_and_commas_stays_whole(slurm: FakeSlurm) -> None:
    slurm.answers("squeue", answer("squeue_23.11"))
    assert [job.reason for job in jobs_of("1")][1:] == [
        "ReqNodeNotAvail, UnavailableNodes:n[3,7]",
        "launch failed requeued held",
    ]


def test_the_part_of_an_array_that_is_not_over_is_the_one_to_watch(slurm: FakeSlurm) -> None:
    slurm.answers("squeue", f"{job_line('5_1', 'COMPLETED')}\n{job_line('5_2', 'RUNNING')}")
    job = job_now("5")
    assert job is not None
    assert job.job_id == "5_2"


def test_the_users_own_settings_of_squeue_do_not_count(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SQUEUE_STATES", "SQUEUE_FORMAT", "SACCT_FORMAT", "SLURM_JOB_ID", "SLURM_TIME_FORMAT"):
        monkeypatch.setenv(name, "odd")
    monkeypatch.setenv("SLURM_CONF", "/somewhere")
    slurm.answers("squeue", answer("squeue_22.05"))
    jobs_of("1")
    seen = slurm.environment("squeue")
    assert "SLURM_TIME_FORMAT=%s" in seen
    assert "SLURM_CONF=/somewhere" in seen
    assert not [line for line in seen if line.endswith("=odd")]


@pytest.mark.parametrize(("version", "number"), [("22.05", "7"), ("24.11", "6")])
def test_what_squeue_has_forgotten_sacct_tells(slurm: FakeSlurm, version: str, number: str) -> None:
    slurm.has_forgotten()
    slurm.answers("sacct", answer(f"sacct_{version}"))
    jobs = {job.job_id: job for job in jobs_of("1")}
    assert jobs["1"].state == "COMPLETED"
    assert jobs["1"].is_over
    assert jobs["1"].nodes == "n[1-2]"
    assert (jobs["3"].state, jobs["3"].reason, jobs["3"].nodes) == ("CANCELLED", "by 0", "")
    assert (jobs["2_1"].number, jobs["2_1"].reason) == (number, "exit code 3:0")
    assert (jobs["1"].folder, jobs["2_1"].folder) == ("/data/a b|c/run", "/data/sweep/task_1")
    assert {job.source for job in jobs.values()} == {"sacct"}


def test_the_newest_sacct_reads_as_the_oldest(slurm: FakeSlurm) -> None:
    slurm.has_forgotten()
    slurm.answers("sacct", answer("sacct_25.05"))
    [job] = jobs_of("1")
    assert (job.state, job.folder) == ("OUT_OF_MEMORY", "/data/a b|c/run")


@pytest.mark.parametrize("words", ["sacct_disabled", "sacct_down"])
def test_without_accounting_a_forgotten_job_is_no_error(slurm: FakeSlurm, words: str) -> None:
    slurm.has_forgotten()
    slurm.answers("sacct", code=1, stderr=answer(words))
    assert jobs_of("1") == []
    assert job_now("1") is None


def test_without_sacct_a_forgotten_job_is_no_error(slurm: FakeSlurm) -> None:
    slurm.has_forgotten()
    assert jobs_of("1") == []


def test_sacct_is_not_asked_about_a_job_that_squeue_knows(slurm: FakeSlurm) -> None:
    slurm.answers("squeue", job_line("1", "RUNNING"))
    slurm.answers("sacct", answer("sacct_22.05"))
    jobs_of("1")
    assert slurm.arguments("sacct") == []


def test_a_controller_that_does_not_answer_is_an_error_and_not_an_ended_job(slurm: FakeSlurm) -> None:
    slurm.answers(
        "squeue", code=1, stderr="slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    )
    with pytest.raises(SlurmError, match=r"squeue refused: .*Unable to contact slurm controller"):
        jobs_of("1")


def states_of(job_ids: list[str]) -> dict[str, str]:
    return {job_id: job.state for job_id, job in known_jobs(job_ids).items()}


def test_the_states_of_many_jobs_are_one_question(slurm: FakeSlurm) -> None:
    lines = [job_line("1", "RUNNING"), job_line("2_1", "PENDING"), job_line("9", "FAILED")]
    slurm.answers("squeue", "\n".join(lines))
    assert states_of(["1", "2_1", "77"]) == {"1": "RUNNING", "2_1": "PENDING"}
    assert "--jobs=1,2_1,77" in slurm.arguments("squeue")
    assert states_of([]) == {}


def test_squeue_is_asked_for_each_task_that_waits(slurm: FakeSlurm) -> None:
    """Else they are one line, 2_[3-4%2], and none of them is found."""
    slurm.answers("squeue", job_line("2_3", "PENDING"))
    job_now("2_3")
    assert "--array" in slurm.arguments("squeue")


def test_a_pre_empted_job_is_over_unless_it_waits_again(slurm: FakeSlurm) -> None:
    """A real Slurm shows a job that it puts back as PENDING from the first moment on, and as PREEMPTED one that it ends."""
    for state, is_over in (("PREEMPTED", True), ("NODE_FAIL", True), ("PENDING", False), ("REQUEUE_HOLD", False)):
        slurm.answers("squeue", job_line("5", state))
        assert [job.is_over for job in jobs_of("5")] == [is_over]
    slurm.has_forgotten()
    slurm.answers("sacct", "5|5|PREEMPTED|1795307143|1|n1|main|1795307143|0:0|0|")
    assert [job.is_over for job in jobs_of("5")] == [True]


def test_a_job_that_squeue_hides_is_over_only_if_the_accounts_say_so_and_ones_own_always_is(slurm: FakeSlurm) -> None:
    """PrivateData=jobs: squeue answers as for a forgotten job. Accounts are late, or have missed the end of one's own."""
    slurm.has_forgotten()
    for state, uid, is_over, reason in (
        ("PENDING", os.getuid() + 1, False, "PrivateData"),
        ("RUNNING", os.getuid() + 1, False, "PrivateData"),
        ("TIMEOUT", os.getuid() + 1, True, "exit code 0:0"),
        ("RUNNING", os.getuid(), True, "exit code 0:0"),
    ):
        slurm.answers("sacct", f"5|5|{state}|Unknown|1|None assigned|main|1795307143|0:0|{uid}|")
        assert [(job.is_over, job.reason) for job in jobs_of("5")] == [(is_over, reason)]


def test_accounts_that_hang_are_not_waited_for(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm.has_forgotten()
    run = subprocess.run

    def hangs(command: list[str], **how: Any) -> Any:
        if command[0] != "sacct":
            return run(command, **how)
        assert how["timeout"] is not None, "sacct is waited for"
        raise subprocess.TimeoutExpired(command, how["timeout"])

    monkeypatch.setattr(subprocess, "run", hangs)
    assert jobs_of("5") == []


def test_without_slurm_the_missing_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(SlurmError, match="squeue: not found; run this where Slurm's commands are on PATH"):
        job_now("5")


@pytest.mark.parametrize("odd", ["", " ", "None", "12+1", "--all", "12,", "٣"])
def test_no_command_of_slurm_is_asked_about_what_is_no_job_id(slurm: FakeSlurm, odd: str) -> None:
    """`squeue --jobs=` tells of everybody's jobs, and scancel would take an option."""
    for program in ("squeue", "sacct", "scancel", "scontrol", "srun"):
        slurm.answers(program, job_line("12", "RUNNING"))
    assert (jobs_of(odd), states_of([odd])) == ([], {})
    assert slurm.arguments("squeue") == slurm.arguments("sacct") == []
    assert states_of([odd, "12"]) == {"12": "RUNNING"}
    assert "--jobs=12" in slurm.arguments("squeue")
    for ask in (cancel_job, release_job, lambda job_id: run_on_each_node(job_id, 1, ["true"], {})):
        with pytest.raises(SlurmError, match="expected a job id"):
            ask(odd)
    assert slurm.arguments("scancel") == slurm.arguments("scontrol") == slurm.arguments("srun") == []


def test_a_job_id_is_a_number_or_a_task_of_an_array() -> None:
    assert [is_job_id(text) for text in ("12", "12_3", "12_", "_3", "12.0", "run", "", "12_[1-3]")] == [
        *(True, True),
        *(False,) * 6,
    ]
