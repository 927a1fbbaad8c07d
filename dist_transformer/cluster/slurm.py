"""The only place that calls Slurm's commands. Arguments travel as lists: nothing passes through a shell."""

import os
import subprocess
from collections.abc import Mapping, Sequence

from dist_transformer.errors import UserError

_NOT_FOR_A_JOB = ("SLURM_", "SRUN_", "SBATCH_", "MASTER_")
_NOT_FOR_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES")


class SlurmError(UserError):
    """A command of Slurm is missing or refused."""


def submit_script(arguments: Sequence[str]) -> str:
    """Runs `sbatch` (its argv without the program) and returns the job id.

    Raises:
        SlurmError: with sbatch's own words.
    """
    answer = _call(["sbatch", *arguments], clean_environment(os.environ))
    return answer.strip().split(";")[0]  # --parsable: "id" or "id;cluster"


def list_jobs(job_id: str, format_string: str) -> list[str]:
    """One line of `squeue` for each part of the job, ended ones too; none when Slurm has forgotten it."""
    try:
        answer = _call(["squeue", "--noheader", "--states=all", f"--jobs={job_id}", f"--format={format_string}"])
    except SlurmError as error:
        if "Invalid job id" in str(error):
            return []
        raise
    return answer.splitlines()


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Without what belongs to the job, node or rank that `submit` happens to run in; the job would inherit it."""
    return {
        name: value
        for name, value in environment.items()
        if name == "SLURM_CONF" or not (name.startswith(_NOT_FOR_A_JOB) or name in _NOT_FOR_A_RANK)
    }


def _call(command: list[str], environment: Mapping[str, str] | None = None) -> str:
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise SlurmError(
            f"{command[0]}: not found; expected Slurm's commands on PATH; run this on a login node of the cluster"
        ) from None
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        raise SlurmError(f"{command[0]} refused: {words}\n  command: {' '.join(command)}")
    return done.stdout
