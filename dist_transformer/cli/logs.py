"""logs, stacks: what a run says, and where its ranks stand."""

from typing import Annotated

import typer

from dist_transformer.cli.status import RUNS, Root, RunOrJob
from dist_transformer.cluster.logs import follow, last_hang, log_file, tail
from dist_transformer.cluster.rank_stacks import NodeStacks, stacks_here, stacks_of_job
from dist_transformer.cluster.report import ask_slurm
from dist_transformer.cluster.run_view import look_at
from dist_transformer.cluster.targets import Target, find_target
from dist_transformer.errors import UserError

_ENDED = ("finished", "stopped", "failed")


def logs_command(
    run: RunOrJob,
    follow_log: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what is added, until the run is over.")
    ] = False,
    rank: Annotated[int | None, typer.Option(min=0, help="Only the lines of this rank.")] = None,
    lines: Annotated[int, typer.Option(min=0, help="How many of the last lines to begin with.")] = 50,
    root: Root = RUNS,
) -> None:
    """Print the log of a run's newest job, or train.log where there was none."""
    target = find_target(run, root)
    path = log_file(target.run_dir, target.job_id)
    if not follow_log:
        for line in tail(path, lines, rank):
            print(line)
        return
    try:
        for line in follow(target.run_dir, path, lines, rank, lambda: is_over(target)):
            print(line, flush=True)
    except KeyboardInterrupt:
        return


def stacks_command(run: RunOrJob, root: Root = RUNS) -> None:
    """Print where each rank of a running run stands: all threads, also while they wait in a collective."""
    target = find_target(run, root)
    slurm = ask_slurm(target.job_id)
    job = slurm.job
    if job is not None and job.state == "RUNNING":
        _print_stacks(stacks_of_job(target.run_dir, job))
        return
    owner = look_at(target.run_dir).owner
    if owner and target.job_id is None:
        _print_stacks([stacks_here(target.run_dir, owner)])
        return
    print(slurm.problem or (f"job {job.job_id} is {job.state}" if job else f"{target.run_dir.path}: nothing runs here"))
    path = log_file(target.run_dir, target.job_id)
    found = last_hang(path)
    if not found:
        raise UserError(f"no rank to ask, and {path} tells of no rank that hung")
    print(f"where the ranks stood when one of them hung, from {path}:\n" + "\n".join(found))


def is_over(target: Target) -> bool:
    """Whether nothing will be added to the run's log: by its job, or without one by its own word."""
    slurm = ask_slurm(target.job_id)
    if slurm.was_asked:
        return slurm.job is None or slurm.job.is_over
    return target.job_id is None and look_at(target.run_dir).state in _ENDED


def _print_stacks(nodes: list[NodeStacks]) -> None:
    for node in nodes:
        if node.problem:
            print(f"==== node {node.node}: {node.problem}\n")
        for dump in node.dumps:
            print(f"==== rank {dump.rank} on {dump.host}, process {dump.pid}\n{dump.text}\n")
