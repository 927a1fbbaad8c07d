"""submit: checks everything on the login node, then submits the jobs to Slurm. stop, cancel, resume: control of a run from
outside."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from dist_transformer.cli.arguments import RUNS, Overrides, Root, RunOrJob
from dist_transformer.cluster.job_status import Answer, again, ask_slurm
from dist_transformer.cluster.queue import job_now
from dist_transformer.cluster.reasons import is_held, waiting_in_words
from dist_transformer.cluster.run_ref import find_run, own_job
from dist_transformer.cluster.slurm import cancel_job, release_job
from dist_transformer.cluster.submit import Submission, checked_submission, read_job_ids, read_stages, submit
from dist_transformer.config.slurm_schema import STAGES, Stage
from dist_transformer.errors import UserError
from dist_transformer.run.status import look_at

_VERBS = [
    ("watch:", "dist-transformer status FOLDER"),
    ("", "dist-transformer logs FOLDER --follow"),
    ("stop:", "dist-transformer stop FOLDER  # saves first"),
    ("cancel:", "dist-transformer cancel FOLDER  # at once"),
]


def submit_command(
    run: Annotated[Path | None, typer.Argument(help="A YAML file, or a run folder to resume.")] = None,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be submitted, submit nothing.")] = False,
    stages: Annotated[
        str, typer.Option(help=f"Jobs that follow each other: some of {','.join(STAGES)}, in this order.")
    ] = "train",
    after: Annotated[str, typer.Option(help="Begin when these jobs have ended well: 12 or 12,13.")] = "",
    pipeline: Annotated[Path | None, typer.Option(help="A file of nodes, in place of a run: a job for each.")] = None,
) -> None:
    """Check a run and submit it as a Slurm job that saves, requeues and resumes by itself."""
    wanted = read_stages([word.strip() for word in stages.split(",")])
    waits = read_job_ids(after.split(",") if after else [])
    if pipeline is not None:
        if wanted != ("train",):
            raise UserError(f"--stages {stages}: the nodes of a pipeline are its stages; leave it out")
        from dist_transformer.cli.pipeline import submit_pipeline

        submit_pipeline(pipeline, [*([str(run)] if run else []), *(overrides or [])], waits, dry_run=dry_run)
        return
    if run is None:
        raise UserError("expected a YAML file or a run folder: dist-transformer submit RUN, or --pipeline FILE")
    submit_run(run, overrides or [], stages=wanted, after=waits, dry_run=dry_run)


def stop_command(run: RunOrJob, root: Root = RUNS) -> None:
    """Ask a run to save and end at its next step. Its job is not requeued; `resume`, without a job `train`, continues it."""
    target = find_run(run, root)
    run_dir, slurm = target.run_dir, ask_slurm(target)
    job, state = slurm.job, look_at(run_dir).state
    if (job is None or job.is_over) and state == "finished":
        raise UserError(f"{run_dir.path}: is finished; nothing to stop")
    if slurm.problem and not slurm.was_asked:
        typer.echo(slurm.problem, err=True)
    elif (job is None or job.is_over) and state not in ("starting", "running"):
        # The stop file would stop the next start at once.
        raise UserError(f"{run_dir.path}: nothing to stop: {_why_idle(slurm)}")
    said = f"asked to save and end: {run_dir.stop_file}"
    if target.job_id is not None and job is not None and job.state == "PENDING":
        cancel_job(target.job_id)  # first: where Slurm refuses, the file would end the job when it starts
        said = f"job {target.job_id} was waiting: taken out of the queue; what it had saved is kept"
    run_dir.stop_file.touch()
    print(f"{said}\nto resume:  {again(target)}")


def cancel_command(run: RunOrJob, root: Root = RUNS) -> None:
    """End a run's job now and for good, without waiting for a checkpoint (`stop` saves first)."""
    target = find_run(run, root)
    if target.job_id is None:
        raise UserError(f"{target.run_dir.path}: has no job to cancel: it was not given to Slurm; `stop` works on it")
    slurm = ask_slurm(target)
    if slurm.job is None or slurm.job.is_over:
        raise UserError(f"{target.run_dir.path}: nothing is cancelled: {_why_idle(slurm)}")
    cancel_job(target.job_id)
    print(f"job {target.job_id} is cancelled; to resume:  {again(target)}")


def resume_command(run: RunOrJob, overrides: Overrides = None, root: Root = RUNS) -> None:
    """Submit a run again, from its newest checkpoint. A job of it that is held is released instead."""
    target = find_run(run, root)
    job = own_job(job_now(target.job_id), target.run_dir) if target.job_id else None
    if job is None or job.is_over:
        submit_run(target.run_dir.path, overrides or [])
        return
    was_moved = job.folder is not None and not os.path.isdir(job.folder)
    if job.state != "PENDING" or not is_held(job.reason) or was_moved:
        why = f": {waiting_in_words(job.reason)}" if job.state == "PENDING" else ""
        what = "wait for it, or `stop` it first"
        if was_moved:
            why = f"; its script is in {job.folder}, which is not there as seen from this host"
            what = "if the run was moved, `stop` it first"
        raise UserError(f"{target.run_dir.path}: its job {job.job_id} is not over, it is {job.state}{why}; {what}")
    if overrides:
        raise UserError(f"job {job.job_id} is held, and released without {' '.join(overrides)}; `cancel` it first")
    release_job(job.job_id)
    print(f"job {job.job_id} was held ({job.reason}): released")


def submit_run(
    run: Path,
    overrides: list[str],
    *,
    stages: Sequence[Stage] = ("train",),
    after: Sequence[str] = (),
    dry_run: bool = False,
) -> None:
    """Submits a YAML file or a run folder, and prints the jobs and the commands to watch and stop them. Raises ConfigError:
    all problems of the run together; SlurmError: sbatch failed."""
    submission, slurm = checked_submission(run, overrides, stages, after, dry_run=dry_run)
    nodes = f"{slurm.nodes} node{'s' if slurm.nodes > 1 else ''}"
    ranks = f"{slurm.ranks_per_node} rank{'s' if slurm.ranks_per_node > 1 else ''}"
    gpus = "one GPU each" if slurm.gpus_per_node else "CPUs only (slurm.gpus_per_node is 0)"
    size = f"{nodes} x {ranks}, {gpus}, time limit {slurm.time_limit}" if "train" in stages else ""
    if dry_run:
        print(f"# {size}\n\n" if size else "", end="")
        print(submission.listing)
    else:
        _report(submission, submit(submission), size)


def _report(submission: Submission, ids: dict[str, str], size: str) -> None:
    run_dir = submission.run_dir
    if list(ids) == ["train"]:
        print(f"submitted job {ids['train']}; run folder {run_dir.path}")
    else:
        jobs = ", ".join(f"job {job_id} ({stage})" for stage, job_id in ids.items())
        print(f"submitted {jobs}, each after the one before\nrun folder {run_dir.path}")
    if size:
        print(f"{'job:':8}{size}")
    log = f"job-{ids['train']}" if "train" in ids else "-".join(next(iter(ids.items())))
    print(f"{'log:':8}{shlex.quote(f'{run_dir.slurm / log}.log')}")
    for purpose, command in _VERBS:
        print(f"{purpose:8}{command.replace('FOLDER', run_dir.quoted)}")


def _why_idle(slurm: Answer) -> str:
    return slurm.problem or (f"job {slurm.job.job_id} is over ({slurm.job.state})" if slurm.job else "it does not run")
