"""submit --sweep: many runs that differ in some settings."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from dist_transformer.cli.submission import memory_problems, num_parameters_of, show_commands, show_plan
from dist_transformer.cluster.profiles import fill_from_profile
from dist_transformer.cluster.sweep import load_points, ranges, read_sweep
from dist_transformer.cluster.sweep_submit import PointRun, SweepSubmission, plan_sweep, submit_sweep
from dist_transformer.config.loading import to_yaml, with_absolute_paths
from dist_transformer.config.schema import Config
from dist_transformer.data.sources.first_pairs import first_pairs_problems
from dist_transformer.errors import UserError
from dist_transformer.run.sweep_folder import SweepDir


def submit_points(
    run: Path,
    overrides: list[str],
    file: Path,
    max_running: int | None,
    *,
    after: Sequence[str] = (),
    dry_run: bool = False,
) -> None:
    """Submits every point of a sweep file over a YAML file as one job array.

    Raises:
        ConfigError: all problems of all points together.
        SlurmError: sbatch failed.
    """
    if run.is_dir():
        raise UserError(f"{run}: expected the YAML file that the points of a sweep are laid over, got a folder")
    sweep = read_sweep(file)
    if max_running is not None:
        sweep = replace(sweep, max_running=max_running)
    configs = [fill_from_profile(config) for config in load_points(run, overrides, sweep)]
    folder = SweepDir((Path(configs[0].run.root) / configs[0].run.name).absolute())
    by_data = {_data_of(config): config for config in configs}  # usually all points have the same data
    of_data = {text: first_pairs_problems(config) for text, config in by_data.items()}
    runs = [_point_run(config, folder, task, of_data[_data_of(config)]) for task, config in enumerate(configs)]
    submission = plan_sweep(sweep, runs, folder, after=after, dry_run=dry_run)
    if dry_run:
        show_plan([submission.command], submission.files)
    else:
        _submit(submission, sweep.max_running)


def _data_of(config: Config) -> str:
    return f"{config.data.model_dump_json()} {config.tokenizer.source_model}"


def _point_run(config: Config, folder: SweepDir, task: int, problems: Sequence[str]) -> PointRun:
    run = config.run.model_copy(update={"root": str(folder.path), "name": folder.task(task).name})
    config = config.model_copy(update={"run": run})
    text = to_yaml(with_absolute_paths(config, None))
    return PointRun(config, text, num_parameters_of(config), [*memory_problems(config), *problems])


def _submit(submission: SweepSubmission, max_running: int | None) -> None:
    folder = submission.folder.path
    for task, why in submission.left_out.items():
        print(f"task {task}: left out: {why}")
    if not submission.tasks:
        print(f"nothing to submit; sweep folder {folder}")
        return
    code = _code_line(submission)
    job_id = submit_sweep(submission)
    at_once = "" if max_running is None else f", {max_running} at once"
    print(f"submitted job array {job_id} of {len(submission.tasks)} runs{at_once}; sweep folder {folder}")
    if code:
        print(code)
    print(f"{'logs:':8}{shlex.quote(f'{folder}/task_N/slurm/job-{job_id}_N.log')}")
    show_commands(folder, [
        ("watch:", "dist-transformer list FOLDER"),
        ("stop:", "dist-transformer stop FOLDER/task_N  # one run; saves first"),
        ("cancel:", f"scancel {job_id}  # all of them, at once"),
    ])  # fmt: skip


def _code_line(submission: SweepSubmission) -> str | None:
    """Line about the code of a sweep whose new tasks run an older snapshot."""
    tasks = submission.tasks_that_keep_the_code
    if not tasks:
        return None
    taken = datetime.fromtimestamp(submission.folder.common.snapshot.stat().st_mtime)
    who = f"task {tasks[0]} still runs" if len(tasks) == 1 else f"tasks {ranges(tasks)} still run"
    return f"{'code:':8}as of {taken:%Y-%m-%d %H:%M}, since {who} with it; what was changed later is not in it"
