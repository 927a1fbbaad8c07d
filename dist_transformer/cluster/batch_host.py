"""Requeues a job whose batch script has died with its node; the batch script starts this on another node of the job.

    python -m dist_transformer.cluster.batch_host JOB ATTEMPT RUN_FOLDER

With --no-kill Slurm takes a dead node from the job and lets the others run on until the time limit, even if the script
was on it. Slurm alone says that it is dead: what this node sees may be its own network.
"""

import os
import signal
import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path

from dist_transformer.cluster import slurm
from dist_transformer.cluster.requeue import note_lost_host
from dist_transformer.cluster.slurm import SlurmError
from dist_transformer.run.excluded_nodes import exclude
from dist_transformer.run.folder import RunDir

POLL_SECONDS = 10.0
TRIES = 6
"""Times that Slurm is asked for other nodes before the job is requeued without keeping it away from the lost one."""


def watch(job: str, attempt: int, run_dir: RunDir) -> None:
    """Returns when the attempt is over, by itself or by a requeue from here."""
    tries = 0
    while True:
        time.sleep(POLL_SECONDS)
        try:
            record = slurm.job_record(job)
            if record.get("Restarts") != str(attempt) or record.get("JobState") != "RUNNING":
                return
            host = record["BatchHost"]
            if host not in slurm.host_names(record["NodeList"]):
                tries += 1
                if tries == 1:
                    with suppress(OSError):
                        note_lost_host(run_dir, job, attempt, host)
                with suppress(SlurmError) if tries == TRIES else nullcontext():
                    _keep_away(run_dir, record, host)
                slurm.requeue_job(job)
                return
        except (SlurmError, KeyError):  # no answer: asked again
            continue


def _keep_away(run_dir: RunDir, record: dict[str, str], host: str) -> None:
    """Excludes the lost node from later requeues of the run if there are enough others.

    Back from a power failure it may still have the folder of the job's batch script, and Slurm would hold a job that it
    starts there again, until a person releases it. Raises SlurmError: the controller does not answer.
    """
    left = slurm.host_names(record["NodeList"])
    similar = {*slurm.similar_nodes(os.environ.get("SLURM_JOB_PARTITION", ""), left[0])} - {host}
    reason = "it went down with the batch script, and may hold the job when it is back"
    with suppress(OSError):
        exclude(run_dir, {host: reason}, len(left) + 1, len(similar) - len(left))


if __name__ == "__main__":
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # signals for the ranks reach every step of the job
        signal.signal(number, signal.SIG_IGN)
    watch(sys.argv[1], int(sys.argv[2]), RunDir(Path(sys.argv[3])))
