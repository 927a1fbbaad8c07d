"""submit --sweep: many runs that differ in some settings."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from dist_transformer.cli.submission import memory_problems, num_parameters_of, show_commands, show_plan
from dist_transformer.cluster.profiles import fill_from_profile
from dist_transformer.cluster.sweep import load_points, ranges, read_sweep
from dist_transformer.cluster.sweep_submit import SweepSubmission, plan_sweep, submit_sweep
from dist_transformer.data.sources.first_pairs import first_pairs_problems
from dist_transformer.errors import UserError


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
    sweep = replace(sweep, max_running=max_running or sweep.max_running)
    configs = [fill_from_profile(config) for config in load_points(run, overrides, sweep)]
    of_data: dict[str, list[str]] = {}  # usually all points have the same data
    problems = []
    for config in configs:
        data = f"{config.data.model_dump_json()} {config.tokenizer.source_model}"
        if data not in of_data:
            of_data[data] = first_pairs_problems(config)
        problems.append([*memory_problems(config), *of_data[data]])
    num_parameters = sum(map(num_parameters_of, configs))
    submission = plan_sweep(sweep, configs, num_parameters, problems, after=after, dry_run=dry_run)
    if dry_run:
        show_plan(submission.array.commands, submission.array.files)
    else:
        _submit(submission, sweep.max_running)


def _submit(submission: SweepSubmission, max_running: int | None) -> None:
    folder = submission.folder.path
    for task, why in submission.left_out.items():
        print(f"task {task}: left out: {why}")
    if not submission.tasks:
        print(f"nothing to submit; sweep folder {folder}")
        return
    old = submission.tasks_that_keep_the_code
    job_id = submit_sweep(submission)
    at_once = "" if max_running is None else f", {max_running} at once"
    print(f"submitted job array {job_id} of {len(submission.tasks)} runs{at_once}; sweep folder {folder}")
    if old:
        taken = datetime.fromtimestamp(submission.folder.common.snapshot.stat().st_mtime)
        who = f"task {old[0]} still runs" if len(old) == 1 else f"tasks {ranges(old)} still run"
        print(f"{'code:':8}as of {taken:%Y-%m-%d %H:%M}, since {who} with it; what was changed later is not in it")
    print(f"{'logs:':8}{shlex.quote(f'{folder}/task_N/slurm/job-{job_id}_N.log')}")
    show_commands(folder, [
        ("watch:", "dist-transformer list FOLDER"),
        ("stop:", "dist-transformer stop FOLDER/task_N  # one run; saves first"),
        ("cancel:", f"scancel {job_id}  # all of them, at once"),
    ])  # fmt: skip
