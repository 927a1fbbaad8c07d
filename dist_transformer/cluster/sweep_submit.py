"""Submits the points of a sweep as one job array: a run folder for each, one script, one code snapshot.

When submitted again, the array has only the tasks that are not finished and that no job works on.
"""

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dist_transformer.cluster.checks import sbatch_problems, submission_problems
from dist_transformer.cluster.jobs import Job, array_job
from dist_transformer.cluster.queue import known_jobs
from dist_transformer.cluster.run_ref import newest_job_id
from dist_transformer.cluster.script import Code, needed_folders, render_script
from dist_transformer.cluster.slurm import submit_script
from dist_transformer.cluster.submit import begin_anew, command_text, note_job, write_files
from dist_transformer.cluster.sweep import Sweep, grouped_by_reason, ranges
from dist_transformer.config.schema import Config
from dist_transformer.errors import ConfigError
from dist_transformer.files import write_json
from dist_transformer.run.excluded_nodes import excluded_nodes
from dist_transformer.run.folder import RunDir
from dist_transformer.run.records import read_record
from dist_transformer.run.snapshot import take_snapshot
from dist_transformer.run.sweep_folder import SweepDir, SweepState, read_sweep_state

_FINISHED = "finished"


@dataclass(frozen=True)
class PointRun:
    """One point as a run in `folder`/task_N, with its cluster profile filled in and the problems the caller found."""

    config: Config
    config_text: str
    num_parameters: int
    problems: Sequence[str]


@dataclass(frozen=True)
class SweepSubmission:
    """Plan of `submit_sweep`. `tasks` go into the array; `left_out` has the reasons for the others."""

    folder: SweepDir
    state: SweepState
    files: dict[Path, str]
    tasks: tuple[int, ...]
    left_out: dict[int, str]
    job: Job
    after: tuple[str, ...]

    @property
    def command(self) -> str:
        """The call of sbatch as a shell command."""
        return command_text(self.job, self.after)

    @property
    def tasks_that_keep_the_code(self) -> tuple[int, ...]:
        """Tasks that still run or will be requeued: they, and so all tasks, keep the code snapshot they began with."""
        if not self.folder.common.snapshot.is_dir():
            return ()
        return tuple(task for task, why in self.left_out.items() if why != _FINISHED)


def plan_sweep(
    sweep: Sweep, runs: Sequence[PointRun], folder: SweepDir, *, after: Sequence[str] = (), dry_run: bool = False
) -> SweepSubmission:
    """Checks every point and builds the array, without creating anything.

    Args:
        runs: one for each point.
        folder: absolute.
        after: ids of jobs that must succeed before.
        dry_run: for display only: all points, and Slurm is not asked.

    Raises:
        ConfigError: all problems of all points together.
    """
    found = [*_all_problems(runs, folder, is_after_others=bool(after)), *([] if dry_run else sbatch_problems())]
    before = read_sweep_state(folder)
    points = [_plain(point.settings) for point in sweep.points]
    found += _folder_problems(folder, before, points, sweep.text)
    if found:
        raise ConfigError(found, "cannot submit:")
    left_out = {} if dry_run else _left_out(folder, before)
    tasks = tuple(task for task in range(len(points)) if task not in left_out)
    job_ids = [*(before.job_ids if before else ()), *([None] * len(points))][: len(points)]
    state = SweepState(folder.path.name, before.uid if before else uuid.uuid4().hex, points, job_ids)
    slurm = runs[0].config.slurm
    excluded = sorted({node for task in tasks for node in excluded_nodes(folder.task(task))})
    job = array_job(slurm, folder.common, _array(tasks, sweep.max_running), excluded)
    folders = list(dict.fromkeys(path for run in runs for path in needed_folders(run.config, folder.path.parent)))
    script = render_script("train.sbatch", slurm, Code(folder.common.snapshot), folders)
    files = {folder.file: sweep.text, job.script: script}
    files |= {folder.task(task).config: runs[task].config_text for task in tasks}
    return SweepSubmission(folder, state, files, tasks, left_out, job, tuple(after))


def submit_sweep(submission: SweepSubmission) -> str:
    """Writes files and code snapshot, calls sbatch, records the job in every run folder; returns the array's job id.

    Raises:
        SlurmError: sbatch failed; the folders then hold the files, but no job.
    """
    folder = submission.folder
    if not submission.tasks_that_keep_the_code:
        take_snapshot(folder.common.snapshot)
    write_files(submission.files)
    _share_prepared(folder)
    write_json(folder.state, submission.state.as_json())  # records the uid before the first task can begin
    for task in submission.tasks:
        begin_anew(folder.task(task))
        folder.task(task).slurm.mkdir(exist_ok=True)  # sbatch does not create folders for logs
    job_id = submit_script(submission.job.sbatch_arguments(submission.after))
    ids = [f"{job_id}_{n}" if n in submission.tasks else old for n, old in enumerate(submission.state.job_ids)]
    write_json(folder.state, replace(submission.state, job_ids=ids).as_json())
    for task in submission.tasks:
        note_job(folder.task(task), {"train": f"{job_id}_{task}"}, submission.command)
    submitted_at = datetime.now(UTC).isoformat(timespec="seconds")
    write_json(folder.common.job, {"job_id": job_id, "submitted_at": submitted_at, "command": submission.command})
    return job_id


def is_finished(run_dir: RunDir) -> bool:
    """True if the run has finished."""
    return read_record(run_dir.state).get("state") == "finished"


def _all_problems(runs: Sequence[PointRun], folder: SweepDir, *, is_after_others: bool) -> list[str]:
    """Problems of all runs. They share one disk, so the first one checks the space for all."""
    num_parameters = sum(run.num_parameters for run in runs)
    by_task = {
        task: [
            *run.problems,
            *submission_problems(
                run.config, folder.task(task), 0 if task else num_parameters, is_after_others=is_after_others
            ),
        ]
        for task, run in enumerate(runs)
    }
    return grouped_by_reason(by_task, len(runs))


def _folder_problems(
    folder: SweepDir, before: SweepState | None, points: Sequence[dict[str, Any]], text: str
) -> list[str]:
    path = folder.path
    if "%" in str(path):
        return [f"run.root: {str(path)!r}: a job array reads '%' in its arguments as a task number; choose another"]
    if before is None:
        if folder.common.config.exists() or folder.common.state.exists():
            return [f"{path}: is the folder of a single run; give the sweep another run.name"]
        if folder.file.exists() and folder.file.read_bytes() != text.encode():
            return [f"{folder.file}: is there already, and not of this sweep; give the sweep another run.name"]
        return []
    if list(before.points) != list(points[: len(before.points)]):
        return [
            f"{path}: holds a sweep of other points ({folder.state}); put them back (new ones may follow them), or give "
            "this sweep another run.name"
        ]
    return []


def _left_out(folder: SweepDir, before: SweepState | None) -> dict[int, str]:
    tasks = range(len(before.points) if before else 0)
    left_out = {task: _FINISHED for task in tasks if is_finished(folder.task(task))}
    # A task may have been submitted on its own since.
    newest = {task: newest_job_id(folder.task(task)) for task in tasks if task not in left_out}
    known = known_jobs([job_id for job_id in newest.values() if job_id])
    for task, job_id in newest.items():
        if job_id in known and not known[job_id].is_over:
            left_out[task] = f"job {job_id} works on it ({known[job_id].state})"
    return dict(sorted(left_out.items()))


def _share_prepared(folder: SweepDir) -> None:
    """Links the prepared corpora of the runs beside the sweep, so that they are not prepared again."""
    beside = folder.path.parent / folder.prepared.name
    beside.mkdir(exist_ok=True)
    if not folder.prepared.is_symlink() and not folder.prepared.exists():
        folder.prepared.symlink_to(Path("..") / beside.name)


def _array(tasks: Sequence[int], max_running: int | None) -> str:
    return ranges(tasks) + (f"%{max_running}" if max_running is not None else "")


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings as sweep.json returns them."""
    plain: dict[str, Any] = json.loads(json.dumps(settings))
    return plain
