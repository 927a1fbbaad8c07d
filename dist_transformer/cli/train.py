"""train: starts or resumes a run. As a rank (RANK is set) it trains; otherwise it starts the ranks of this machine."""

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from dist_transformer.cli.arguments import Overrides, RunArgument
from dist_transformer.config.credentials import tracking_address
from dist_transformer.config.schema import Config
from dist_transformer.errors import UserError
from dist_transformer.processes import stacks
from dist_transformer.processes.children import forwarding_signals
from dist_transformer.processes.launching import importing, num_ranks_given
from dist_transformer.processes.stop_request import StopRequest, leave
from dist_transformer.run.folder import RunDir
from dist_transformer.run.read_run import check_ranks, read_run
from dist_transformer.training.forked_ranks import run_local_ranks


def train_command(
    run: RunArgument,
    overrides: Overrides = None,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks to start on this machine.")] = 1,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print warnings and errors only.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each record of metrics.jsonl on standard output too.")
    ] = False,
    profile: Annotated[
        bool,
        typer.Option("--profile", help="Show where a step goes: profile/ in the run folder has a table and traces."),
    ] = False,
) -> None:
    """Train, or resume a run folder from its newest complete checkpoint, on any number of ranks.

    Exit codes: 0 finished, 75 stopped on request and saved (start it again), 2 something you can fix, 1 failed.
    """
    of_group = num_ranks_given()
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if of_group is None and tasks != "1" and "SLURM_PTY_PORT" not in os.environ:  # as a shell of `srun --pty` has
        raise UserError(
            f"srun started {tasks} tasks without RANK: expected one; use `dist-transformer submit`, `srun -n1` and --ranks N, or "
            "`srun launch/slurm_task.sh train ...` (docs/slurm.md); for a run in each task unset SLURM_STEP_NUM_TASKS"
        )
    num_ranks = of_group or ranks
    given = {"--quiet": quiet, "--json": as_json, "--profile": profile}
    stop = StopRequest()
    if of_group or num_ranks == 1:
        stop.listen()  # before the slow imports: a signal in the first seconds counts too
        config, run_dir = _read(run, overrides, num_ranks)
        _train_as_rank(config, run_dir, stop, *given.values())
    arguments = [*(flag for flag, is_given in given.items() if is_given), str(run), *(overrides or [])]
    with forwarding_signals() as signals:  # from here on signals are forwarded to the ranks once they listen
        config, run_dir = _read(run, overrides, num_ranks)
        from dist_transformer.cli.main import run_as_command
        from dist_transformer.data.prepare.progress import prepare_for_training

        def listening(work: Callable[[], object]) -> None:
            stop.listen()
            run_as_command(work)

        prepare = partial(prepare_for_training, config, stop)
        train = partial(_train_as_rank, config, run_dir, stop, *given.values())
        sys.exit(run_local_ranks(partial(listening, prepare), partial(listening, train), arguments, num_ranks, signals))


def _read(run: Path, overrides: list[str] | None, num_ranks: int) -> tuple[Config, RunDir]:
    config, run_dir = read_run(run, overrides, check_files=os.environ.get("RANK", "0") == "0")
    check_ranks(config, num_ranks)
    if config.tracking.enabled:
        tracking_address(config.tracking)  # raises if the variable holds no address
    return config, run_dir


def _train_as_rank(config: Config, run_dir: RunDir, stop: StopRequest, *of_terminal: bool) -> NoReturn:
    stacks.register()
    with importing():
        from dist_transformer.training.metrics.console import Terminal
        from dist_transformer.training.rank import train_rank

    leave(train_rank(config, run_dir, stop, Terminal(*of_terminal)))
