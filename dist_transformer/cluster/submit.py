"""From a checked configuration to a job: the exact script, the exact `sbatch` command, and the files of the run folder.

submission = plan_submission(config, to_yaml(config), run_dir, num_parameters)   # touches nothing
job_id = submit(submission)                                                     # writes, then calls sbatch
"""

import shlex
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from dist_transformer.cluster.checks import cluster_problems, submission_problems
from dist_transformer.cluster.slurm import submit_script
from dist_transformer.cluster.snapshot import take_snapshot
from dist_transformer.config.models import Config, SlurmConfig
from dist_transformer.errors import ConfigError
from dist_transformer.run_dir import RunDir, write_json, write_text
from dist_transformer.share_folder import share_folder

_SETTINGS_BEGIN = "# --- settings"
_SETTINGS_END = "# --- end of settings"


@dataclass(frozen=True)
class Submission:
    """What `submit` will do. `files` are written into the run folder before sbatch is called."""

    run_dir: RunDir
    script: str
    sbatch_arguments: tuple[str, ...]
    files: dict[Path, str]

    @property
    def command(self) -> str:
        """The call of sbatch as one would type it."""
        return shlex.join(["sbatch", *self.sbatch_arguments])


def plan_submission(
    config: Config, config_text: str, run_dir: RunDir, num_parameters: int, *, dry_run: bool = False
) -> Submission:
    """Checks everything and composes the job, without creating anything.

    Args:
        config: the resolved configuration, its cluster profile already filled in.
        config_text: the same as YAML; becomes the run folder's configuration, which the job reads.
        num_parameters: of the model, for the estimate of disk space.
        dry_run: only to be looked at: works without Slurm, and while a job works on the run folder.

    Raises:
        ConfigError: all problems together.
    """
    problems = submission_problems(config, run_dir, num_parameters)
    problems += [] if dry_run else cluster_problems(run_dir)
    if problems:
        raise ConfigError(problems)
    run_dir = RunDir(run_dir.path.absolute())
    script = render_script(config.slurm, run_dir, sys.executable)
    files = {run_dir.config: config_text, run_dir.submitted_script: script}
    return Submission(run_dir, script, _sbatch_arguments(config.slurm, run_dir), files)


def submit(submission: Submission) -> str:
    """Writes the files and the code snapshot, calls sbatch, notes the job in the run folder; returns the job id.

    Raises:
        SlurmError: sbatch refused; the run folder then holds the files, but no job.
    """
    take_snapshot(submission.run_dir.snapshot)
    for path, text in submission.files.items():
        write_text(path, text)
    # A new submission by a person begins a new count of restarts without progress, and overrules an old stop.
    submission.run_dir.restarts.unlink(missing_ok=True)
    submission.run_dir.stop_file.unlink(missing_ok=True)
    job_id = submit_script(submission.sbatch_arguments)
    submitted_at = datetime.now(UTC).isoformat(timespec="seconds")
    write_json(submission.run_dir.job, {"job_id": job_id, "submitted_at": submitted_at, "command": submission.command})
    return job_id


def render_script(slurm: SlurmConfig, run_dir: RunDir, python: str) -> str:
    """slurm/train.sbatch with this job's values in its block of settings; the rest is the file as it is."""
    lines = (share_folder("slurm") / "train.sbatch").read_text(encoding="utf-8").splitlines()
    begin = next(n for n, line in enumerate(lines) if line.startswith(_SETTINGS_BEGIN))
    end = next(n for n, line in enumerate(lines) if line.startswith(_SETTINGS_END))
    return "\n".join([*lines[: begin + 1], *_settings(slurm, run_dir, python), *lines[end:], ""])


def _settings(slurm: SlurmConfig, run_dir: RunDir, python: str) -> list[str]:
    return [
        *(f"export {name}={shlex.quote(value)}" for name, value in slurm.environment.items()),
        f"export DIST_TRANSFORMER_SIGNAL_SECONDS={slurm.signal_seconds}",
        f"python={shlex.quote(python)}",
        f"code={shlex.quote(str(run_dir.snapshot))}",
        f"setup={shlex.quote(chr(10).join(slurm.setup))}",
        f"srun_options=({' '.join(map(shlex.quote, slurm.extra_srun))})",
    ]


def _sbatch_arguments(slurm: SlurmConfig, run_dir: RunDir) -> tuple[str, ...]:
    """One element an option, so that no value can become another option."""
    wanted = {
        "job-name": run_dir.name,
        "nodes": slurm.nodes,
        "ntasks-per-node": slurm.ranks_per_node,
        "cpus-per-task": slurm.cpus_per_rank,
        "gpus-per-node": slurm.gpus_per_node or None,
        "mem": slurm.memory,
        "time": slurm.time_limit,
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "signal": f"B:USR1@{slurm.signal_seconds}",
        "open-mode": "append",
        "output": f"{str(run_dir.slurm).replace('%', '%%')}/job-%j.log",
    }
    options = [f"--{name}={value}" for name, value in wanted.items() if value is not None]
    arguments = [str(run_dir.submitted_script), str(run_dir.path)]
    return ("--parsable", "--requeue", *options, *slurm.extra_sbatch, *arguments)
