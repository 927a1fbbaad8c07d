"""submit --sweep, and sweep status: many runs that differ in some settings."""

import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from dist_transformer.cli.submission import memory_problems, num_parameters_of, show_commands, show_plan
from dist_transformer.cluster.profiles import fill_from_profile
from dist_transformer.cluster.queue import QueuedJob, known_jobs
from dist_transformer.cluster.run_ref import newest_job_id
from dist_transformer.cluster.slurm import SlurmError
from dist_transformer.cluster.sweep import load_points, ranges, read_sweep
from dist_transformer.cluster.sweep_submit import PointRun, SweepSubmission, plan_sweep, submit_sweep
from dist_transformer.config.loading import to_yaml, with_absolute_paths
from dist_transformer.config.schema import Config
from dist_transformer.data.sources.first_pairs import first_pairs_problems
from dist_transformer.errors import UserError
from dist_transformer.run.folder import RunDir
from dist_transformer.run.records import read_record
from dist_transformer.run.sweep_folder import SweepDir, SweepState, read_sweep_state

app = typer.Typer(help="Many runs that differ in some settings; `submit --sweep` starts them.", no_args_is_help=True)

_LAST_WORDS = ("stopped", "failed")
"""States after which a run does not continue by itself."""


@app.callback()
def group() -> None:
    """Many runs that differ in some settings; `submit --sweep` starts them."""


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


@app.command("status")
def status_command(
    folder: Annotated[Path, typer.Argument(help="The folder of a sweep.", show_default=False)],
    sort: Annotated[
        str, typer.Option(help="Sort by this number of metrics.jsonl, lowest first: EVENT.KEY.")
    ] = "validation.loss",
    reverse: Annotated[bool, typer.Option("--reverse", help="Highest first.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
) -> None:
    """Each run of a sweep: its own settings, its state, its newest losses."""
    event, dot, key = sort.partition(".")
    if not dot or not key:
        raise UserError(f"--sort {sort!r}: expected EVENT.KEY: validation.loss, train.tokens_per_second")
    sweep_dir = SweepDir(folder.absolute())
    state = read_sweep_state(sweep_dir)
    if state is None:
        raise UserError(
            f"{folder}: holds no sweep (no {sweep_dir.state.name}); give the folder that `submit --sweep` named"
        )
    rows = [_row(sweep_dir.task(task), task, state, event, key) for task in range(len(state.points))]
    jobs = _jobs_of(rows)
    for row in rows:
        row["state"] = _state(row["state"], row["job_id"], jobs)
    rows.sort(key=lambda row: _sort_key(row["sorted_by"], reverse))
    if as_json:
        print(json.dumps({"sweep": state.name, "sorted_by": sort, "tasks": rows}, indent=1, ensure_ascii=False))
    else:
        print("\n".join(_table(rows, state, sort)))


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
        ("watch:", "dist-transformer sweep status FOLDER"),
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


def _row(run_dir: RunDir, task: int, sweep: SweepState, event: str, key: str) -> dict[str, Any]:
    own = read_record(run_dir.state)
    newest, job_id = _newest(run_dir, event), newest_job_id(run_dir)
    return {
        "task": task,
        "state": own.get("state"),
        "step": newest.get("train", {}).get("step", own.get("step", 0)),
        "loss": newest.get("train", {}).get("loss"),
        "validation_loss": newest.get("validation", {}).get("loss"),
        "sorted_by": newest.get(event, {}).get(key),
        "job_id": job_id,
        "run_folder": str(run_dir.path),
        "overrides": sweep.points[task],
    }


def _newest(run_dir: RunDir, event: str) -> dict[str, dict[str, Any]]:
    """The newest record of each event that the table shows."""
    from dist_transformer.run.metrics_log import read_records

    return {r["event"]: r for r in read_records(run_dir.metrics) if r["event"] in ("train", "validation", event)}


def _jobs_of(rows: Sequence[dict[str, Any]]) -> dict[str, QueuedJob] | None:
    """Jobs in Slurm of the runs that are not finished; None: Slurm does not answer."""
    try:
        return known_jobs([row["job_id"] for row in rows if row["job_id"] and row["state"] != "finished"])
    except SlurmError:
        return None


def _state(own: str | None, job_id: str | None, jobs: Mapping[str, QueuedJob] | None) -> str:
    """State of the job in Slurm while there is one; else the last state in run.json."""
    if own == "finished" or job_id is None:
        return own or "not submitted"
    if jobs is None:
        return own or "submitted"
    job = jobs.get(job_id)
    if job is None or job.is_over:
        return own if own in _LAST_WORDS else f"ended ({job.state})" if job else "ended"
    return f"{job.state.lower()} ({job.reason})" if job.reason else job.state.lower()


def _sort_key(value: Any, reverse: bool) -> tuple[bool, float]:
    """Sort key by which runs without the number, or with NaN, come last either way."""
    if not isinstance(value, int | float) or math.isnan(value):
        return True, 0.0
    return False, -float(value) if reverse else float(value)


def _table(rows: Sequence[dict[str, Any]], sweep: SweepState, sort: str) -> Iterator[str]:
    keys = list(dict.fromkeys(key for point in sweep.points for key in point))
    differ = [key for key in keys if len({json.dumps(point.get(key)) for point in sweep.points}) > 1]
    columns = ["task", "state", "step", "loss", "validation_loss"]
    extra = [] if sort in ("validation.loss", "train.loss") else [sort]
    lines = [[*columns, *extra, *differ]]
    for row in rows:
        own = [row[name] for name in columns] + [row["sorted_by"] for _ in extra]
        lines.append([_text(v) for v in own] + [_text(row["overrides"].get(key)) for key in differ])
    widths = [max(len(line[n]) for line in lines) for n in range(len(lines[0]))]
    for line in lines:
        yield "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.5g}" if isinstance(value, float) else str(value)
