"""stop, cancel, resume: control of a run from outside."""

import os

import typer

from dist_transformer.cli.arguments import RUNS, Overrides, Root, RunOrJob
from dist_transformer.cli.submit import submit_run
from dist_transformer.cluster.job_status import Answer, again, ask_slurm
from dist_transformer.cluster.queue import job_now
from dist_transformer.cluster.reasons import is_held, waiting_in_words
from dist_transformer.cluster.run_ref import find_run, own_job
from dist_transformer.cluster.slurm import cancel_job, release_job
from dist_transformer.errors import UserError
from dist_transformer.run.status import look_at


def stop_command(run: RunOrJob, root: Root = RUNS) -> None:
    """Ask a run to save and end at its next step. Its job is not requeued; `resume` continues the run."""
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


def _why_idle(slurm: Answer) -> str:
    return slurm.problem or (f"job {slurm.job.job_id} is over ({slurm.job.state})" if slurm.job else "it does not run")
