"""A job as Slurm reports it: by `squeue`, or, once that has forgotten the job, by `sacct` (with accounting only).

Fields are separated by "|"; the comment, which may hold one itself, comes last. The fields are those that every
version since 22.05 writes in the same way. Every question raises SlurmError where Slurm cannot be asked.
"""

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from dist_transformer.cluster.jobs import COMMENT
from dist_transformer.cluster.slurm import list_accounted_jobs, list_jobs

# A job that is requeued after PREEMPTED or NODE_FAIL is PENDING at once; one that keeps the state is not requeued.
OVER = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
        "TIMEOUT")  # fmt: skip
WAITING = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT")
NOT_SHOWN = "Slurm shows no job {}: it is over, or hidden from you: ask its owner"

_SQUEUE_FORMAT = "%i|%A|%T|%S|%L|%D|%N|%P|%V|%r|%k"
_SQUEUE_FIELDS = "JobID,JobIDRaw,State,Start,TimeLeft,NNodes,NodeList,Partition,Submit,Reason,Comment"
_SACCT_FIELDS = "JobID,JobIDRaw,State,Start,NNodes,NodeList,Partition,Submit,ExitCode,UID,Comment"


@dataclass(frozen=True)
class QueuedJob:
    """One job, or one part of an array. Times are unix seconds; None: unknown.

    Attributes:
        job_id: 123, 123_4, or from sacct 123_[5-9%2] for the tasks of an array that never began.
        number: the plain number that `srun --jobid` takes.
        state: in Slurm's words: PENDING, RUNNING, COMPLETED ...
        reason: why it waits or how it ended, in Slurm's words; may be empty. PrivateData: squeue hides it, and it is not over.
        start_time: Slurm's estimate for a job that waits.
        nodes: n[1-2]; empty while it waits.
        comment: holds the run folder in jobs of this program.
        source: the command that reported the job: squeue or sacct.
    """

    job_id: str
    number: str
    state: str
    reason: str
    submit_time: int | None
    start_time: int | None
    seconds_left: int | None
    num_nodes: int
    nodes: str
    partition: str
    comment: str
    source: str

    @property
    def is_over(self) -> bool:
        """True if the job does not run and will not run again."""
        return self.state in OVER or (self.source == "sacct" and self.reason != "PrivateData")  # else it is forgotten

    @property
    def task(self) -> str | None:
        """Task number of one task of an array; None for other jobs."""
        match = re.fullmatch(r"\d+_(\d+)", self.job_id)
        return match[1] if match else None

    @property
    def folder(self) -> str | None:
        """The run folder that `submit` wrote into the comment; %a in it stands for the task number."""
        if not self.comment.startswith(COMMENT):
            return None
        folder = self.comment.removeprefix(COMMENT)
        return folder if self.task is None else folder.replace("%a", self.task)


def jobs_of(job_id: str) -> list[QueuedJob]:
    """All parts of a job; none when Slurm has forgotten it."""
    return _in_queue([job_id]) or _parsed(list_accounted_jobs(job_id, _SACCT_FIELDS), _SACCT_FIELDS, "sacct")


def job_now(job_id: str) -> QueuedJob | None:
    """The job, or the first part of an array that is not over; None when Slurm has forgotten it."""
    return min(jobs_of(job_id), key=lambda job: job.is_over, default=None)


def known_jobs(job_ids: Collection[str], hidden: Collection[str] = ()) -> dict[str, QueuedJob]:
    """The jobs and array tasks among `job_ids` that squeue still knows, from one call; those that it may have `hidden`, and
    does not show, as sacct knows them."""
    shown = {job.job_id: job for job in _in_queue([*dict.fromkeys(job_ids)]) if job.job_id in job_ids}
    return shown | {each: job for each in hidden if each not in shown and (job := job_now(each))}


def seconds_of(text: str) -> int | None:
    """Seconds of a time as Slurm's commands take and print it; None if it is none: UNLIMITED, NOT_SET, INVALID, N/A.

    The forms: minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes and
    days-hours:minutes:seconds. As a time limit, 0 means none.
    """
    if not re.fullmatch(r"\d+-\d+(:\d+){0,2}|\d+(:\d+){0,2}", text):
        return None
    days, dash, rest = text.rpartition("-")
    fields = [int(field) for field in rest.split(":")]
    if not dash and len(fields) < 3:  # without days the first field is minutes, unless there are three
        fields.insert(0, 0)
    hours, minutes, seconds = (*fields, 0, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _in_queue(job_ids: Sequence[str]) -> list[QueuedJob]:
    return _parsed(list_jobs(job_ids, _SQUEUE_FORMAT), _SQUEUE_FIELDS, "squeue")


def _parsed(lines: list[str], fields: str, source: str) -> list[QueuedJob]:
    names = fields.split(",")
    rows = [line.split("|", len(names) - 1) for line in lines]
    return [_job(dict(zip(names, row, strict=True)), source) for row in rows if len(row) == len(names)]


def _job(fields: dict[str, str], source: str) -> QueuedJob:
    state, _, detail = fields["State"].partition(" ")  # CANCELLED by 1000
    reason = fields["Reason"] if source == "squeue" else detail or f"exit code {fields['ExitCode']}"
    if source == "sacct" and state not in OVER and fields["UID"] not in ("", str(os.getuid())):
        reason = "PrivateData"
    return QueuedJob(
        job_id=fields["JobID"],
        number=fields["JobIDRaw"],
        state=state,
        reason="" if reason == "None" else reason,
        submit_time=_time(fields["Submit"]),
        start_time=_time(fields["Start"]),
        seconds_left=seconds_of(fields.get("TimeLeft", "")),
        num_nodes=int(fields["NNodes"]) if fields["NNodes"].isdecimal() else 0,
        nodes="" if fields["NodeList"] == "None assigned" else fields["NodeList"],
        partition=fields["Partition"],
        comment="" if fields["Comment"] == "(null)" else fields["Comment"],
        source=source,
    )


def _time(text: str) -> int | None:
    return int(text) if text.isdecimal() else None  # N/A, None, Unknown, NONE
