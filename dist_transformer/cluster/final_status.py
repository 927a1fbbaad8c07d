"""MLflow status of a run whose ranks could not report it themselves: killed, lost with their node, cancelled.

A rank reports FINISHED, FAILED or SCHEDULED (saved, to be started again) when it ends normally. After that Slurm and
the batch script decide about the job, so both are asked here: at the end of an attempt, and by `status`.
"""

from dist_transformer.cluster.job_status import Document
from dist_transformer.cluster.queue import WAITING
from dist_transformer.errors import EXIT_DONE, EXIT_FAILED, EXIT_REQUEUE, EXIT_USER_ERROR
from dist_transformer.run.attempts import attempts
from dist_transformer.run.folder import RunDir
from dist_transformer.run.status import SILENT_SECONDS


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
