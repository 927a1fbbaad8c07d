"""What Slurm says about a job, from `squeue` alone: works without accounting."""

from dataclasses import dataclass

from dist_transformer.cluster.queue import OVER
from dist_transformer.cluster.slurm import list_jobs


@dataclass(frozen=True)
class JobState:
    """`state` in Slurm's words (PENDING, RUNNING, COMPLETED, ...), UNKNOWN when Slurm has forgotten the job."""

    state: str
    reason: str

    @property
    def is_over(self) -> bool:
        """It does not run and will not run again."""
        return self.state in OVER


def job_state(job_id: str) -> JobState:
    """State and reason of a job; of an array, of its first part that is not over.

    Raises:
        SlurmError: Slurm cannot be asked.
    """
    states = [JobState(*line.split("|", 1)) for line in list_jobs(job_id, "%T|%r")]
    unfinished = [state for state in states if not state.is_over]
    return (unfinished or states or [JobState("UNKNOWN", "Slurm does not know the job (any more)")])[0]
