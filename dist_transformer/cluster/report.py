"""Everything that is known of a run in one document: what Slurm says of its job, and what the run says of itself.

The document of `status --json`. Every key is always there; null: not known, or there is none. Times are unix seconds.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dist_transformer.cluster.queue import QueuedJob, job_now, states_of
from dist_transformer.cluster.reasons import exit_code_in_words, waiting_in_words
from dist_transformer.cluster.run_view import SILENT_SECONDS, RunView, look_at
from dist_transformer.cluster.slurm import SlurmError
from dist_transformer.cluster.targets import Target, is_run_folder, newest_job_id
from dist_transformer.run_dir import RunDir

Document = dict[str, Any]


def report(target: Target) -> Document:
    """One look at a run and its job."""
    view, now = look_at(target.run_dir), time.time()
    slurm = ask_slurm(target.job_id)
    job, said = slurm.job, [slurm.problem] if slurm.problem else []
    return {
        "run": target.run_dir.name,
        "folder": str(target.run_dir.path),
        "time": now,
        **_of_training(view, is_going=view.is_alive(now)),
        **_of_checkpoint(view, now),
        **_of_attempts(view),
        "mlflow_run_id": view.mlflow_run_id,
        "mlflow_uri": view.mlflow_uri,
        "job_id": target.job_id,
        "job": None if job is None else _of_job(job),
        "warnings": [*said, *_warnings(view, job, now, is_job=target.job_id is not None)],
    }


def report_all(root: Path) -> list[Document]:
    """A short document for each run folder in `root`, the newest record first. Slurm is asked once."""
    folders = sorted(path for path in root.iterdir() if path.is_dir() and is_run_folder(path))
    views = [look_at(RunDir(path.absolute())) for path in folders]
    ids = [newest_job_id(view.run_dir) for view in views]
    states = _job_states(
        [job_id for view, job_id in zip(views, ids, strict=True) if job_id and view.state != "finished"]
    )
    rows = [_row(view, job_id, states.get(job_id or "")) for view, job_id in zip(views, ids, strict=True)]
    return sorted(rows, key=lambda row: -(row["record_time"] or 0))


@dataclass(frozen=True)
class Answer:
    """What Slurm said of a job.

    Attributes:
        was_asked: False where there is no job, or Slurm does not answer.
        problem: why the job is not known; None where there is nothing to say.
    """

    job: QueuedJob | None
    was_asked: bool
    problem: str | None


def ask_slurm(job_id: str | None) -> Answer:
    """Asks for a job; without Slurm that is an answer too."""
    if job_id is None:
        return Answer(None, False, None)
    try:
        job = job_now(job_id)
    except SlurmError as error:
        return Answer(None, False, f"Slurm was not asked about job {job_id}: {str(error).splitlines()[0]}")
    return Answer(job, True, None if job else f"Slurm does not know job {job_id} (any more): it has ended")


def _of_training(view: RunView, *, is_going: bool) -> Document:
    newest = view.newest
    return {
        "state": view.state,
        "step": view.step,
        "max_steps": view.max_steps,
        "loss": newest.get("loss"),
        "learning_rate": newest.get("learning_rate"),
        "tokens_per_second": newest.get("tokens_per_second"),
        "record_time": newest.get("time"),
        "seconds_to_last_step": view.seconds_to_last_step if is_going else None,
        "heartbeat_time": view.heartbeat_time,
        "owner": view.owner or None,
    }


def _of_checkpoint(view: RunView, now: float) -> Document:
    return {
        "checkpoint": view.checkpoint,
        "checkpoint_time": view.checkpoint_time,
        "checkpoint_age_seconds": now - view.checkpoint_time if view.checkpoint_time else None,
    }


def _of_attempts(view: RunView) -> Document:
    code = view.last_end.get("exit_code")
    return {
        "starts": view.starts,
        "last_end_time": view.last_end.get("time"),
        "last_exit_code": code,
        "last_exit_text": exit_code_in_words(code) if isinstance(code, int) else None,
        "last_end_reason": view.last_end.get("reason"),
        "last_end_requeued": view.last_end.get("requeued"),
        "excluded_nodes": view.excluded,
        "divergences": len(view.divergences),
        "last_divergence": view.divergences[-1].get("reason") if view.divergences else None,
    }


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
    """What does not fit together."""
    if view.is_alive(now):
        return
    silent = "no rank works on the run folder" if view.heartbeat_time is None else (
        f"its last sign of life is {now - view.heartbeat_time:.0f} s old"
    )  # fmt: skip
    if job is not None and job.state == "RUNNING":
        if now - (job.start_time or 0) > SILENT_SECONDS:
            yield f"the job is RUNNING, but {silent}: do its ranks start, hang, or not reach the folder? See `logs`, `stacks`"
    elif view.state in ("starting", "running") and not is_job:
        yield f"run.json says {view.state}, but {silent}: it was ended without a word; `train` goes on with it"
    elif view.state == "running" and job is not None and job.is_over:
        yield f"run.json says running, but the job is over and {silent}: `resume` goes on with it"


def _job_states(job_ids: list[str]) -> dict[str, str]:
    try:
        return states_of(job_ids)
    except SlurmError:  # a list of runs is of use without it
        return {}


def _row(view: RunView, job_id: str | None, job_state: str | None) -> Document:
    return {
        "run": view.run_dir.name,
        "folder": str(view.run_dir.path),
        "state": view.state,
        "job_id": job_id,
        "job_state": job_state,
        "step": view.step,
        "max_steps": view.max_steps,
        "loss": view.newest.get("loss"),
        "record_time": view.newest.get("time"),
        "checkpoint": view.checkpoint,
    }
