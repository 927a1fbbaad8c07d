"""logs, stacks: the log of a run, and the stacks of its ranks."""

import time
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from dist_transformer.cli.arguments import RUNS, Root, RunOrJob
from dist_transformer.cluster.job_status import ask_slurm
from dist_transformer.cluster.logs import follow, last_hang, log_of_job, log_of_run, newest_log, tail, wait_for_log
from dist_transformer.cluster.rank_stacks import NodeStacks, stacks_here, stacks_of_job
from dist_transformer.cluster.reasons import waiting_in_words
from dist_transformer.cluster.run_ref import RunRef, find_run
from dist_transformer.errors import UserError
from dist_transformer.run.status import look_at

_ENDED = ("finished", "stopped", "failed")


def logs_command(
    run: RunOrJob,
    follow_log: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow what is added, until the run is over.")
    ] = False,
    rank: Annotated[int | None, typer.Option(min=0, help="Only the lines of this rank.")] = None,
    lines: Annotated[int, typer.Option(min=0, help="How many of the last lines to begin with.")] = 50,
    root: Root = RUNS,
) -> None:
    """Print the log of a run's newest job, or train.log if there was none; for a job id, the log of that job."""
    target = find_run(run, root)
    named = None if Path(run).is_dir() else target.job_id
    try:
        path = _log(target, named, waits=follow_log)
        if path.stat().st_size == 0:
            typer.echo(f"{path}: is empty so far", err=True)
        if follow_log:
            newest = partial(log_of_job, target.run_dir, named) if named else partial(newest_log, target.run_dir)
            for line in follow(newest, path, lines, rank, lambda: is_over(target)):
                print(line, flush=True)
        else:
            found = tail(path, lines, rank)
            for line in found:
                print(line)
            if rank is not None and lines and not found and path.stat().st_size:
                typer.echo(f"no line of rank {rank} in the last part of {path}", err=True)
    except KeyboardInterrupt:
        return


def stacks_command(run: RunOrJob, root: Root = RUNS) -> None:
    """Print the stacks of each rank of a running run: all threads, also while they wait in a collective."""
    target = find_run(run, root)
    slurm = ask_slurm(target)
    job = slurm.job
    if job is not None and job.state == "RUNNING":
        _print_stacks(stacks_of_job(target.run_dir, job))
        return
    owner = look_at(target.run_dir).owner
    if owner and target.job_id is None:
        _print_stacks([stacks_here(target.run_dir, owner)])
        return
    print(slurm.problem or (f"job {job.job_id} is {job.state}" if job else f"{target.run_dir.path}: nothing runs here"))
    path = log_of_run(target.run_dir, target.job_id)
    if path is None:
        raise _no_log(target, None)
    found = last_hang(path)
    if not found:
        raise UserError(f"no rank to ask, and {path} tells of no rank that hung")
    print(f"where the ranks stood when one of them hung, from {path}:\n" + "\n".join(found))


def is_over(target: RunRef) -> bool:
    """True if nothing will be added to the run's log, according to its job, or without one to run.json."""
    slurm = ask_slurm(target)
    if slurm.was_asked:
        return slurm.job is None or slurm.job.is_over
    view = look_at(target.run_dir)
    return target.job_id is None and (view.state in _ENDED or not view.is_alive(time.time()))


def _log(target: RunRef, named: str | None, *, waits: bool) -> Path:
    """The log to print. `named`: the job that the user named; no other job's log is printed for it.

    `waits`: wait for the log of a job that is not over.
    """
    find = partial(log_of_job, target.run_dir, named) if named else partial(log_of_run, target.run_dir, target.job_id)
    path = find()
    job = ask_slurm(target).job if path is None and waits else None
    if job is not None and not job.is_over:
        state = f"waits: {waiting_in_words(job.reason)}" if job.state == "PENDING" else f"is {job.state}"
        typer.echo(f"job {target.job_id} {state}; its log is followed as soon as there is one", err=True)
        path = wait_for_log(find, lambda: is_over(target))
    if path is None:
        raise _no_log(target, named)
    return path


def _no_log(target: RunRef, named: str | None) -> UserError:
    folder, job = target.run_dir.path, ask_slurm(target).job
    if job is not None and not job.is_over:
        why = f": {waiting_in_words(job.reason)}" if job.state == "PENDING" else ""
        return UserError(f"{folder}: has no log yet: job {target.job_id} is {job.state}{why}")
    if named is not None:
        by_hand = f"a script started by hand writes slurm-{named}.out where sbatch was called"
        return UserError(f"job {named} wrote no log in {target.run_dir.slurm}; {by_hand}")
    if job is not None:
        return UserError(f"{folder}: has no log: job {target.job_id} is over ({job.state}) and wrote none")
    return UserError(f"{folder}: has no log yet: its job has not started, or nothing was ever started here")


def _print_stacks(nodes: list[NodeStacks]) -> None:
    for node in nodes:
        if node.problem:
            print(f"==== node {node.node}: {node.problem}\n")
        for dump in node.dumps:
            print(f"==== rank {dump.rank} on {dump.host}, process {dump.pid}\n{dump.text}\n")
