"""Everything known about a run in one document, from Slurm and from the files in its folder, and what MLflow is to say of it.

The document of `status --json`. Every key is always present; null: unknown, or there is none. Times are unix seconds.

A rank reports FINISHED, FAILED or SCHEDULED (saved, to be started again) to MLflow when it ends normally. After that Slurm
and the batch script decide about the job, so both are asked for the status of a run whose ranks could not report it
themselves (killed, lost with their node, cancelled): at the end of an attempt, and by `status`.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dist_transformer.cluster.logs import log_of_run
from dist_transformer.cluster.queue import NOT_SHOWN, OVER, WAITING, QueuedJob, job_now, known_jobs
from dist_transformer.cluster.reasons import exit_code_in_words, waiting_in_words
from dist_transformer.cluster.run_ref import RunRef, is_run_folder, newest_job_id, own_job, refuse_unreadable, worked_on
from dist_transformer.cluster.slurm import SlurmError
from dist_transformer.errors import EXIT_DONE, EXIT_FAILED, EXIT_REQUEUE, EXIT_USER_ERROR
from dist_transformer.run.attempts import attempts, may_be_hidden
from dist_transformer.run.folder import RunDir
from dist_transformer.run.goodput import goodput_of
from dist_transformer.run.metrics_log import finite, newest_record
from dist_transformer.run.records import read_record, records_of
from dist_transformer.run.status import SILENT_SECONDS, RunView, look_at
from dist_transformer.run.tail import last_lines

Document = dict[str, Any]


def report(target: RunRef) -> Document:
    """Document of one run and its job."""
    view, now = look_at(target.run_dir), time.time()
    slurm = ask_slurm(target)
    job, said = slurm.job, [slurm.problem] if slurm.problem else []
    is_over = slurm.was_asked and (job is None or job.is_over) and target.job_id == newest_job_id(target.run_dir)
    waits = job is not None and job.state in WAITING
    attempt = {} if is_over or waits else _attempt_under_way(target.run_dir)
    if is_over or waits:
        view = _without_ended_job(view, target.job_id, job)
    view = _as_it_waits(view, now) if waits else _without_earlier_attempts(view, attempt)
    log = log_of_run(target.run_dir, target.job_id)
    of_stages = {**read_record(target.run_dir.job).get("stages", {}), "train": ""}.values()  # which record no end
    is_done = job.state == "COMPLETED" if job else target.job_id in of_stages  # forgotten: its log says how
    look = f"dist-transformer logs {target.run_dir.quoted}, then " if log and not (job and is_done) else ""
    is_left = (is_over or target.job_id is None) and view.state != "finished" and not view.is_alive(now)
    is_unbegun = is_over and not is_done and not worked_on(target.run_dir, target.job_id)
    end = {} if is_unbegun else view.last_end
    exit_text = exit_code_in_words(end["exit_code"]) if isinstance(end.get("exit_code"), int) else None
    try:
        goodput, validation = goodput_of(target.run_dir, now), newest_record(target.run_dir.metrics, "validation")
    except OSError as error:
        goodput, validation = None, {"step": 0}
        said = [*said, f"{target.run_dir.path}: its records cannot be read now ({error})"]
    failures = (r for r in records_of(last_lines(target.run_dir.history)) if r.get("state") == "failed")
    return {
        **_of_run(view, now),
        "validation": finite(validation) if validation["step"] else None,
        "checkpoint": view.checkpoint,
        "checkpoint_time": view.checkpoint_time,
        "checkpoint_age_seconds": now - view.checkpoint_time if view.checkpoint_time else None,
        "set_aside": view.set_aside,
        "attempt": attempt.get("attempt"),
        "failure_reason": next(failures, {}).get("reason") if view.state == "failed" else None,
        "last_end_time": end.get("time"),
        "last_exit_code": end.get("exit_code"),
        "last_exit_text": "before its ranks started" if is_unbegun else exit_text,
        "last_end_reason": end.get("reason"),
        "last_end_requeued": end.get("requeued"),
        "starts": view.starts,
        "excluded_nodes": view.excluded,
        "divergences": len(view.divergences),
        "last_divergence": view.divergences[-1].get("reason") if view.divergences else None,
        "goodput": None if goodput is None else asdict(goodput),
        "log": None if log is None else str(log),
        "next": look + again(target, is_done=is_done) if is_left else None,
        "mlflow_run_id": view.mlflow_run_id,
        "mlflow_uri": view.mlflow_uri,
        "job_id": target.job_id,
        "job": None if job is None else _of_job(job),
        "warnings": [*said, *_warnings(view, job, now, is_job=target.job_id is not None)],
    }


def report_all(root: Path) -> list[Document]:
    """A short document for each run folder in `root`, the newest record first. Slurm is asked once."""
    return sorted(short_reports(run_folders(root)), key=lambda row: -(row["record_time"] or 0))


def run_folders(root: Path) -> list[Path]:
    """The run folders in `root`. Raises UserError for a folder that may not be read."""
    refuse_unreadable(root)
    return sorted(path for path in root.iterdir() if path.is_dir() and is_run_folder(path))


def short_reports(folders: Sequence[Path]) -> list[Document]:
    """A short document for each run folder. Slurm is asked once."""
    views = [look_at(RunDir(path.absolute())) for path in folders]
    ids = [newest_job_id(view.run_dir) for view in views]
    asked = [job_id for view, job_id in zip(views, ids, strict=True) if job_id and view.state != "finished"]
    try:
        known, problem = known_jobs(asked), None
    except SlurmError as error:  # the list of runs is useful without it
        known, problem = {}, f"Slurm was not asked: {str(error).splitlines()[0]}"
    return [
        {**_row(view, job_id, known.get(job_id or "")), "slurm_problem": problem if job_id in asked else None}
        for view, job_id in zip(views, ids, strict=True)
    ]


@dataclass(frozen=True)
class Answer:
    """Slurm's answer about a job.

    Attributes:
        was_asked: False where there is no job, Slurm does not answer, knows another one with that id, or may hide it.
        problem: why the job is not known; None without a problem.
    """

    job: QueuedJob | None
    was_asked: bool
    problem: str | None


def ask_slurm(target: RunRef) -> Answer:
    """Asks Slurm about a run's job; without Slurm the answer says so."""
    if (job_id := target.job_id) is None:
        return Answer(None, False, None)
    try:
        found = job_now(job_id)
    except SlurmError as error:
        return Answer(None, False, f"Slurm was not asked about job {job_id}: {str(error).splitlines()[0]}")
    if (job := own_job(found, target.run_dir)) is None and found:
        return Answer(None, False, f"job {job_id} of this Slurm is not this run's: look on the cluster that has it")
    if job is None and may_be_hidden(target.run_dir, job_id):
        over = job_id in {**read_record(target.run_dir.job).get("stages", {}), "train": ""}.values()  # has no attempts
        return Answer(None, over, NOT_SHOWN.format(job_id))
    return Answer(job, True, None if job else f"Slurm does not know job {job_id} (any more): it has ended")


def again(target: RunRef, *, is_done: bool = False) -> str:
    """The command that continues a run: its training if the job `is_done`, else the job and what Slurm ended with it."""
    run_dir, stages = target.run_dir, {} if is_done else read_record(target.run_dir.job).get("stages", {})
    if (run_dir.path / "node.json").exists():
        return f"dist-transformer {'submit --pipeline' if run_dir.job.exists() else 'pipeline run'} FILE"
    if not run_dir.config.exists():  # a job by hand that failed before it wrote its configuration
        return "submit it again"
    rest = [*stages][[*stages.values()].index(target.job_id) :] if target.job_id in stages.values() else ["train"]
    verb = "resume" if target.job_id else "train"
    words = f"{verb} {run_dir.quoted}" if rest == ["train"] else f"submit {run_dir.quoted} --stages {','.join(rest)}"
    return f"dist-transformer {words}"


def _of_run(view: RunView, now: float) -> Document:
    return {
        "run": view.run_dir.name,
        "folder": str(view.run_dir.path),
        "time": now,
        "state": view.state,
        "step": view.step,
        "max_steps": view.max_steps,
        **{key: view.newest.get(key) for key in ("loss", "learning_rate", "tokens_per_second")},
        "record_time": view.newest.get("time"),
        "seconds_to_last_step": view.seconds_to_last_step if view.is_alive(now) else None,
        "heartbeat_time": view.heartbeat_time,
        "owner": view.owner or None,
    }


def _attempt_under_way(run_dir: RunDir) -> Document:
    """The newest record of attempts.jsonl if that attempt has begun and not ended."""
    newest: Document = next(reversed([*attempts(run_dir)]), {})
    return newest if newest.get("event") == "began" else {}


def _without_earlier_attempts(view: RunView, attempt: Document) -> RunView:
    """The view without state and heartbeat of earlier attempts, which say nothing about the current one."""
    began = float(attempt.get("time", 0.0))
    if float(read_record(view.run_dir.state).get("time", 0.0)) < began:
        view = replace(view, state="starting")
    if float(view.owner.get("started", 0.0)) < began:
        view = replace(view, owner={}, heartbeat_time=None)
    return view


def _as_it_waits(view: RunView, now: float) -> RunView:
    """The view of a queued job: a state left by its last attempt does not mean that it trains; another process may."""
    is_word_of_a_rank = view.state in ("starting", "running")
    return replace(view, state="pending") if is_word_of_a_rank and not view.is_alive(now) else view


def _without_ended_job(view: RunView, job_id: str | None, job: QueuedJob | None) -> RunView:
    """The view without the heartbeat of a rank that Slurm ended; another job's, or one without a job, is kept."""
    is_of_it = view.owner.get("job") in {job_id, job.number if job else job_id}
    return replace(view, owner={}, heartbeat_time=None) if is_of_it else view


def _of_job(job: QueuedJob) -> Document:
    return {
        "id": job.job_id,
        "state": job.state,
        "reason": job.reason or None,
        "reason_text": waiting_in_words(job.reason) if job.state == "PENDING" else None,
        "partition": job.partition,
        "num_nodes": job.num_nodes,
        "nodes": job.nodes or None,
        "submit_time": job.submit_time,
        "start_time": job.start_time,
        "seconds_left": job.seconds_left if job.state == "RUNNING" else None,
        "source": job.source,
    }


def _warnings(view: RunView, job: QueuedJob | None, now: float, *, is_job: bool) -> Iterator[str]:
    """Contradictions between the run's files and Slurm's answer."""
    if view.is_alive(now):
        return
    silent = "no rank works on the run folder" if view.heartbeat_time is None else (
        f"its last sign of life is {now - view.heartbeat_time:.0f} s old"
    )  # fmt: skip
    if job is not None and job.state == "RUNNING":
        if now - (job.start_time or 0) > SILENT_SECONDS:
            yield f"the job is RUNNING, but {silent}: do its ranks start, hang, or not reach the folder? See `logs`, `stacks`"
    elif view.state in ("starting", "running") and not is_job:
        yield f"run.json says {view.state}, but {silent}: it was ended without a word; `train` resumes it"
    elif view.state == "running" and job is not None and job.is_over:
        yield f"run.json says running, but the job is over and {silent}: `resume` submits it again"


def _row(view: RunView, job_id: str | None, job: QueuedJob | None) -> Document:
    now, job_state = time.time(), job.state if (job := own_job(job, view.run_dir)) else None
    if job_state in WAITING:
        view = _as_it_waits(_without_ended_job(view, job_id, None), now)
    view = _without_earlier_attempts(view, {} if job_state in (*OVER, *WAITING) else _attempt_under_way(view.run_dir))
    return {
        **_of_run(view, now),
        "starts": view.starts,
        "job_id": job_id,
        "job_state": job_state,
        "checkpoint": view.checkpoint,
    }


def status_after_attempt(run_dir: RunDir, job: str, attempt: int) -> str | None:
    """MLflow status after an attempt that has just ended, from the batch script's record; None: there is no record."""
    noted = [r for r in attempts(run_dir) if (r["event"], r["job"], r.get("attempt")) == ("ended", job, attempt)]
    if not noted:
        return None
    newest = noted[-1]
    code = newest.get("exit_code")
    if code == EXIT_DONE:
        return "FINISHED"
    if newest.get("requeued") or newest.get("how") == "ended":
        return "SCHEDULED"
    is_wanted = newest.get("how") == "cancelled" or (code == EXIT_REQUEUE and run_dir.stop_file.exists())
    return "KILLED" if is_wanted else "FAILED"


def status_found(document: Document, said: str, *, is_by_hand: bool = False) -> str | None:
    """MLflow status that `status` finds in place of the last reported one; None: that one holds, or it is unknown.

    Args:
        document: from `report`.
        said: the last reported status: RUNNING, SCHEDULED, FINISHED, FAILED or KILLED.
        is_by_hand: the newest start was without a job, whatever jobs there were before.
    """
    job, state = document["job"], document["state"]
    if is_alive(document) or said not in ("RUNNING", "SCHEDULED"):
        return None
    if state == "finished":
        return "FINISHED"
    if document["job_id"] is None or is_by_hand:  # the user resumes a stopped run
        return "FAILED" if state == "failed" else "KILLED" if said == "RUNNING" else None
    if document["next"] is not None:  # the job is over, and the run is not finished
        return "FAILED" if document["last_exit_code"] in (EXIT_FAILED, EXIT_USER_ERROR) else "KILLED"
    waits = job is not None and job["state"] in WAITING
    return "SCHEDULED" if waits and said == "RUNNING" else None


def is_alive(document: Document) -> bool:
    """True if the newest heartbeat was recent."""
    heartbeat = document["heartbeat_time"]
    return heartbeat is not None and document["time"] - heartbeat <= SILENT_SECONDS
