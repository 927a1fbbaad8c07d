"""track end: reports to MLflow, from the batch script, that an attempt has ended."""

from pathlib import Path
from typing import Annotated

import typer

from dist_transformer.cluster.final_status import status_after_attempt
from dist_transformer.config.loading import load_config
from dist_transformer.run.folder import RunDir
from dist_transformer.run.lock import while_nobody_trains
from dist_transformer.tracking.final_status import settle, status_said

SECONDS = 10


def end_command(
    run: Annotated[Path, typer.Argument(help="A run folder.", show_default=False)],
    job: Annotated[str, typer.Option(help="The job, as the batch script names it.", show_default=False)],
    attempt: Annotated[int, typer.Option(help="Which attempt of it has ended.", show_default=False)],
    seconds: Annotated[int, typer.Option(min=1, help="How long to try.")] = SECONDS,
) -> None:
    """Report the end of a job's last attempt to MLflow; the batch script does. Unsent events wait for `sync`."""
    run_dir = RunDir(run)
    status = status_after_attempt(run_dir, job, attempt)
    if status is None or status_said(run_dir) is None:
        return
    config = load_config(run_dir.config, check_files=False)
    with while_nobody_trains(run_dir) as is_free:
        if is_free and config.tracking.enabled:
            problem = settle(run_dir, status, config.tracking, Path(config.run.root), seconds)
            if problem is not None:
                print(f"the status {status} was not sent to MLflow: {problem}")
