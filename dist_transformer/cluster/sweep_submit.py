"""Submits the points of a sweep as one job array: a run folder for each, one script, one code snapshot.

When submitted again, the array has only the tasks that are not finished and that no job works on.
"""

import json
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dist_transformer.cluster.checks import sbatch_problems, submission_problems
from dist_transformer.cluster.jobs import array_job
from dist_transformer.cluster.queue import known_jobs
from dist_transformer.cluster.run_ref import newest_job_id
from dist_transformer.cluster.script import Code, needed_folders, render_script
from dist_transformer.cluster.slurm import submit_script
from dist_transformer.cluster.submit import Submission, begin_anew, note_job, write_files
from dist_transformer.cluster.sweep import Sweep, grouped_by_reason, ranges
from dist_transformer.config.loading import to_yaml, with_absolute_paths
from dist_transformer.config.schema import Config
from dist_transformer.errors import ConfigError
from dist_transformer.run.excluded_nodes import excluded_nodes
from dist_transformer.run.folder import RunDir
from dist_transformer.run.records import read_record
from dist_transformer.run.snapshot import take_snapshot
from dist_transformer.run.sweep_folder import SweepDir, SweepState, read_sweep_state

_FINISHED = "finished"


@dataclass(frozen=True)
class SweepSubmission:
    """Plan of `submit_sweep`. `tasks` go into the array; `left_out` has the reasons for the others."""

    folder: SweepDir
    array: Submission
    tasks: Sequence[int]
    left_out: dict[int, str]

    @property
    def tasks_that_keep_the_code(self) -> list[int]:
        """Tasks that still run or will be requeued: they, and so all tasks, keep the code snapshot they began with."""
        has_code = self.folder.common.snapshot.is_dir()
        return [task for task, why in self.left_out.items() if has_code and why != _FINISHED]


def plan_sweep(
    sweep: Sweep,
    configs: Sequence[Config],
    num_parameters: int,
    problems: Sequence[Sequence[str]],
    *,
    after: Sequence[str] = (),
    dry_run: bool = False,
) -> SweepSubmission:
    """Checks every point and builds the array, without creating anything.

    Args:
        configs: of the points, with the cluster profile filled in.
        num_parameters: of all points together: they share one disk.
        problems: problems of each point found by the caller.
        after: ids of jobs that must succeed before.
        dry_run: for display only: all points, and Slurm is not asked.

    Raises:
        ConfigError: all problems of all points together.
    """
    run = configs[0].run
    folder = SweepDir((Path(run.root) / run.name).absolute())
    configs = [_in_folder(config, folder.task(task)) for task, config in enumerate(configs)]
    by_task = {}
    for task, config in enumerate(configs):
        here = submission_problems(
            config, folder.task(task), 0 if task else num_parameters, is_after_others=bool(after)
        )
        by_task[task] = [*problems[task], *here]
    before = read_sweep_state(folder)
    found = [*grouped_by_reason(by_task, len(configs)), *([] if dry_run else sbatch_problems())]
    found += _folder_problems(folder, before, sweep)
    if found:
        raise ConfigError(found, "cannot submit:")
    left_out = _left_out(folder, len(before.points)) if before and not dry_run else {}
    tasks = [task for task in range(len(configs)) if task not in left_out]
    state = SweepState(folder.path.name, before.uid if before else uuid.uuid4().hex, sweep.settings)
    slurm, code = configs[0].slurm, Code(folder.common.snapshot)
    excluded = sorted({node for task in tasks for node in excluded_nodes(folder.task(task))})
    limit = f"%{sweep.max_running}" if sweep.max_running else ""
    job = array_job(slurm, folder.common, f"{ranges(tasks)}{limit}", excluded)
    folders = dict.fromkeys(path for config in configs for path in needed_folders(config, folder.path.parent))
    files = {
        folder.file: sweep.text,
        folder.state: json.dumps(state.as_json(), indent=1) + "\n",
        job.script: render_script("train.sbatch", slurm, code, folders),
        **{folder.task(task).config: to_yaml(with_absolute_paths(configs[task], None)) for task in tasks},
    }
    return SweepSubmission(folder, Submission(folder.common, files, (job,), tuple(after)), tasks, left_out)


def submit_sweep(submission: SweepSubmission) -> str:
    """Writes files and code snapshot, calls sbatch, records the job in every run folder; returns the array's job id.

    Raises:
        SlurmError: sbatch failed; the folders then hold the files, but no job.
    """
    folder, array = submission.folder, submission.array
    if not submission.tasks_that_keep_the_code:
        take_snapshot(folder.common.snapshot)
    write_files(array.files)
    # The prepared corpora of the runs beside the sweep, so that they are not prepared again.
    (folder.path.parent / folder.prepared.name).mkdir(exist_ok=True)
    with suppress(FileExistsError):
        folder.prepared.symlink_to(Path("..") / folder.prepared.name)
    for task in submission.tasks:
        begin_anew(folder.task(task))
        folder.task(task).slurm.mkdir(exist_ok=True)  # sbatch does not create folders for logs
    job_id = submit_script(array.jobs[0].sbatch_arguments(array.after))
    note_job(folder.common, {"train": job_id}, array.commands[0])
    for task in submission.tasks:
        note_job(folder.task(task), {"train": f"{job_id}_{task}"}, array.commands[0])
    return job_id


def _in_folder(config: Config, run_dir: RunDir) -> Config:
    run = config.run.model_copy(update={"root": str(run_dir.path.parent), "name": run_dir.name})
    return config.model_copy(update={"run": run})


def _folder_problems(folder: SweepDir, before: SweepState | None, sweep: Sweep) -> Iterator[str]:
    path = folder.path
    if "%" in str(path):
        yield f"run.root: {str(path)!r}: a job array reads '%' in its arguments as a task number; choose another"
    elif before is not None and before.points != sweep.settings[: len(before.points)]:
        yield (
            f"{path}: holds a sweep of other points ({folder.state}); put them back (new ones may follow them), or give "
            "this sweep another run.name"
        )
    elif before is None and (folder.common.config.exists() or folder.common.state.exists()):
        yield f"{path}: is the folder of a single run; give the sweep another run.name"
    elif before is None and folder.file.exists() and folder.file.read_bytes() != sweep.text.encode():
        yield f"{folder.file}: is there already, and not of this sweep; give the sweep another run.name"


def _left_out(folder: SweepDir, num_submitted: int) -> dict[int, str]:
    states = [read_record(folder.task(task).state).get("state") for task in range(num_submitted)]
    left_out = {task: _FINISHED for task, state in enumerate(states) if state == "finished"}
    # A task may have been submitted on its own since.
    newest = {task: newest_job_id(folder.task(task)) for task in range(num_submitted) if task not in left_out}
    known = known_jobs([job_id for job_id in newest.values() if job_id])
    for task, job_id in newest.items():
        if job_id in known and not known[job_id].is_over:
            left_out[task] = f"job {job_id} works on it ({known[job_id].state})"
    return dict(sorted(left_out.items()))
