"""What MLflow should say of a run whose ranks could not say it themselves: killed, lost with their node, cancelled.

A rank says FINISHED, FAILED or SCHEDULED (saved, to be started again) when it ends in order. What becomes of the job after
that is Slurm's and the batch script's matter, so both are asked here: at the end of an attempt, and by `status`.
"""

from dist_transformer.cluster.job_status import Document
from dist_transformer.cluster.queue import WAITING
from dist_transformer.errors import EXIT_DONE, EXIT_FAILED, EXIT_REQUEUE, EXIT_USER_ERROR
from dist_transformer.run.attempts import attempts
from dist_transformer.run.folder import RunDir
from dist_transformer.run.status import SILENT_SECONDS


def status_after_attempt(run_dir: RunDir, job: str, attempt: int) -> str | None:
    """Of a job whose attempt has just ended, as the batch script noted it; None: nothing is noted."""
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
    """What a look at a run finds in place of what MLflow was told last; None: that is true, or nobody can know.

    Args:
        document: of `report`.
        said: RUNNING, SCHEDULED, FINISHED, FAILED or KILLED.
        is_by_hand: the newest start was no job's, whatever jobs there were before.
    """
    job, state = document["job"], document["state"]
    if is_alive(document) or said not in ("RUNNING", "SCHEDULED"):
        return None
    if state == "finished":
        return "FINISHED"
    if document["job_id"] is None or is_by_hand:  # a stopped run is for its user to go on with
        return "FAILED" if state == "failed" else "KILLED" if said == "RUNNING" else None
    if document["next"] is not None:  # the job is over, and the run is not finished
        return "FAILED" if document["last_exit_code"] in (EXIT_FAILED, EXIT_USER_ERROR) else "KILLED"
    waits = job is not None and job["state"] in WAITING
    return "SCHEDULED" if waits and said == "RUNNING" else None


def is_alive(document: Document) -> bool:
    """Whether a rank had given a sign of life shortly before."""
    heartbeat = document["heartbeat_time"]
    return heartbeat is not None and document["time"] - heartbeat <= SILENT_SECONDS
