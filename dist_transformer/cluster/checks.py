"""What must hold before a job is submitted. Each check yields messages; `submit` reports all of them at once."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from dist_transformer.cluster.status import job_state
from dist_transformer.config.checks import run_name_problems, secret_problems
from dist_transformer.config.models import Config, SlurmConfig
from dist_transformer.run_dir import RunDir, read_json

SIGNAL_EARLY_SECONDS = 60
"""sbatch(1), --signal: the signal may come up to 60 seconds early."""

BYTES_PER_PARAMETER = 12
"""A checkpoint holds an fp32 weight and both fp32 moments of Adam for each parameter."""

_OPTION = re.compile(r"--[a-z][a-z0-9-]*(=[^\n\0]*)?")
_RELIED_ON = (
    *("--requeue", "--no-requeue", "--signal", "--open-mode", "--nodes", "--ntasks-per-node", "--output"),
    *("--ntasks", "--export", "--export-file", "--wrap", "--parsable", "--array", "--job-name", "--chdir"),
)
_SET_BY_THE_JOB = re.compile(r"(SLURM_|SRUN_|SBATCH_|MASTER_).*|(LOCAL_)?(RANK|WORLD_SIZE)|PYTHONPATH|PYTHONSAFEPATH")


def submission_problems(config: Config, run_dir: RunDir, num_parameters: int) -> list[str]:
    """Everything that can be known without asking Slurm. Nothing is created."""
    slurm = config.slurm
    return [
        *_name_problems(run_dir),
        *_rank_problems(config),
        *_folder_problems(run_dir.path, num_parameters * BYTES_PER_PARAMETER * (config.checkpoints.keep_last + 1)),
        *_time_problems(slurm),
        *_option_problems(slurm),
        *_environment_problems(slurm),
    ]


def cluster_problems(run_dir: RunDir) -> list[str]:
    """What only a machine with Slurm can tell: is `sbatch` here, and does a job work on this run folder already?"""
    if shutil.which("sbatch") is None:
        return ["sbatch: not found on PATH; submit from a login node of the cluster, or look at it with --dry-run"]
    if not run_dir.job.exists():
        return []
    job_id = str(read_json(run_dir.job)["job_id"])
    state = job_state(job_id)
    if state.is_over:
        return []
    return [
        f"run folder {run_dir.path}: job {job_id} already works on it ({state.state}); wait for it, "
        f"`scancel {job_id}`, or choose another run.name"
    ]


def parse_time_limit(text: str) -> int | None:
    """Seconds of a time limit as sbatch takes it (minutes, minutes:seconds, hours:minutes:seconds, days-hours,
    days-hours:minutes, days-hours:minutes:seconds); None for "0", which is no limit.

    Raises:
        ValueError: it is none of these forms.
    """
    if not re.fullmatch(r"\d+-\d+(:\d+){0,2}|\d+(:\d+){0,2}", text):
        raise ValueError(text)
    days, dash, rest = text.rpartition("-")
    fields = [int(field) for field in rest.split(":")]
    if not dash and len(fields) < 3:  # without days the first field is minutes, unless there are three
        fields.insert(0, 0)
    hours, minutes, seconds = (*fields, 0, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds or None


def _name_problems(run_dir: RunDir) -> Iterator[str]:
    yield from (message for _, message in run_name_problems(run_dir.name))
    if re.search(r"[\n\\]", str(run_dir.path)):
        yield f"run.root: {str(run_dir.path)!r}: sbatch cannot write logs below a path with a backslash or line break"


def _rank_problems(config: Config) -> Iterator[str]:
    slurm, num_ranks = config.slurm, config.slurm.nodes * config.slurm.ranks_per_node
    if num_ranks > config.data.lanes:
        yield (
            f"slurm: {slurm.nodes} nodes x {slurm.ranks_per_node} ranks = {num_ranks} ranks, more than data.lanes "
            f"{config.data.lanes}; a rank needs a lane of its own"
        )
    if 0 < slurm.gpus_per_node < slurm.ranks_per_node:
        yield (
            f"slurm.gpus_per_node: {slurm.gpus_per_node} GPUs for {slurm.ranks_per_node} ranks on each node; "
            "each rank needs a GPU of its own"
        )


def _folder_problems(folder: Path, needed_bytes: int) -> Iterator[str]:
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        yield f"run folder {folder}: cannot be written ({existing} is no writable folder); change run.root"
        return
    free_bytes = shutil.disk_usage(existing).free
    if free_bytes < needed_bytes:
        yield (
            f"run folder {folder}: {free_bytes / 1e9:.1f} GB free, but its checkpoints will take "
            f"{needed_bytes / 1e9:.1f} GB; free some, change run.root, or keep fewer (checkpoints.keep_last)"
        )


def _time_problems(slurm: SlurmConfig) -> Iterator[str]:
    try:
        limit_seconds = parse_time_limit(slurm.time_limit)
    except ValueError:
        yield f"slurm.time_limit: {slurm.time_limit!r}: expected hours:minutes:seconds or days-hours:minutes:seconds"
        return
    needed = slurm.signal_seconds + SIGNAL_EARLY_SECONDS
    if limit_seconds is not None and limit_seconds <= needed:
        yield (
            f"slurm.time_limit: {slurm.time_limit} is {limit_seconds} s, but the job is told to save "
            f"{slurm.signal_seconds} s before its end (slurm.signal_seconds), and Slurm may be "
            f"{SIGNAL_EARLY_SECONDS} s early; give more than {needed} s"
        )


def _option_problems(slurm: SlurmConfig) -> Iterator[str]:
    for key, options in (("extra_sbatch", slurm.extra_sbatch), ("extra_srun", slurm.extra_srun)):
        for option in options:
            if not _OPTION.fullmatch(option):
                yield f"slurm.{key}: {option!r}: expected --option or --option=value, one an entry"
    for option in slurm.extra_sbatch:
        # sbatch also takes an option by its first letters.
        taken = [name for name in _RELIED_ON if _OPTION.fullmatch(option) and name.startswith(option.split("=")[0])]
        if taken:
            yield (
                f"slurm.extra_sbatch: {option!r}: {taken[0]} is set by submit and the batch script relies on it; "
                "use the keys of slurm:"
            )


def _environment_problems(slurm: SlurmConfig) -> Iterator[str]:
    # Asked again here, because a cluster profile adds variables of its own.
    yield from (message for _, message in secret_problems(slurm))
    for name, value in slurm.environment.items():
        where = f"slurm.environment.{name}"
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            yield f"{where}: expected a variable's name: letters, digits and '_', no digit in front"
        elif _SET_BY_THE_JOB.fullmatch(name):
            yield f"{where}: is set by the batch script for each rank; remove it"
        if "\0" in value:
            yield f"{where}: a variable cannot hold a zero byte"
