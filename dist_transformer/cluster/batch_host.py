"""Requeues a job whose batch script has died with its node; the batch script starts this on another node of the job.

    python -m dist_transformer.cluster.batch_host JOB ATTEMPT RUN_FOLDER

With --no-kill Slurm takes a dead node from the job and lets the others run on until the time limit, even if the script
was on it. Slurm alone says that it is dead: what this node sees may be its own network. A node that is back soon, or that an
administrator sets down, ends the script, and TERM comes here.
"""

import os
import signal
import sys
from collections import deque
from contextlib import nullcontext, suppress
from pathlib import Path

from dist_transformer.cluster import slurm
from dist_transformer.cluster.requeue import nodes_to_exclude, note_lost_host
from dist_transformer.cluster.slurm import SlurmError
from dist_transformer.errors import MachineError
from dist_transformer.run.attempts import attempts
from dist_transformer.run.excluded_nodes import exclude
from dist_transformer.run.folder import RunDir

POLL_SECONDS = 10.0
RETRY_SECONDS = 0.5
"""Between questions after TERM, until KillWait is over."""
TRIES = 6
"""Times that Slurm is asked for other nodes before the job is requeued without keeping it away from the lost one."""


def watch(job: str, attempt: int, run_dir: RunDir) -> None:
    """Returns when the attempt is over, by itself or by a requeue, from here or by Slurm; at TERM it looks once more."""
    tries, has_term = 0, False
    while True:
        has_term |= signal.sigtimedwait({signal.SIGTERM}, RETRY_SECONDS if has_term else POLL_SECONDS) is not None
        try:
            record = slurm.job_record(job)
            is_requeued = _is(record, attempt + 1, "COMPLETING") and bool(tries or not _has_ended(run_dir))
            is_failed = _is(record, attempt, "COMPLETING") and record["Reason"] == "JobLaunchFailure"
            if not (is_requeued or is_failed or _is(record, attempt, "RUNNING")):
                return
            host = record["BatchHost"]
            if host not in slurm.host_names(record["NodeList"]):
                tries += 1
                if tries == 1:
                    with suppress(OSError):
                        note_lost_host(run_dir, job, attempt, host)
                with suppress(SlurmError) if tries == TRIES else nullcontext():
                    _keep_away(run_dir, record, host)
                if not is_requeued:
                    slurm.requeue_job(job)
                if excluded := nodes_to_exclude(run_dir, record.get("ExcNodeList", "")):
                    slurm.exclude_nodes(job, excluded)
                return
            if has_term:
                return
        except (SlurmError, KeyError):  # no answer: asked again
            continue


def _has_ended(run_dir: RunDir) -> bool:
    """True if the batch script recorded its end: its node has left a job that is requeued as usual."""
    return any(record["event"] == "ended" for record in deque(attempts(run_dir), maxlen=1))


def _is(record: dict[str, str], restarts: int, state: str) -> bool:
    return (record.get("Restarts"), record.get("JobState")) == (str(restarts), state)


def _keep_away(run_dir: RunDir, record: dict[str, str], host: str) -> None:
    """Excludes the lost node from later requeues of the run if there are enough others.

    Back from a power failure it may still have the folder of the job's batch script, and Slurm would hold a job that it
    starts there again, until a person releases it. Raises SlurmError: the controller does not answer.
    """
    left = slurm.host_names(record["NodeList"])
    similar = {*slurm.similar_nodes(os.environ.get("SLURM_JOB_PARTITION", ""), left[0])} - {host}
    reason = "it went down with the batch script, and may hold the job when it is back"
    with suppress(OSError, MachineError):
        exclude(run_dir, {host: reason}, len(left) + 1, len(similar) - len(left))


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # `watch` waits for it
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # signals for the ranks reach every step of the job
        signal.signal(number, signal.SIG_IGN)
    watch(sys.argv[1], int(sys.argv[2]), RunDir(Path(sys.argv[3])))
