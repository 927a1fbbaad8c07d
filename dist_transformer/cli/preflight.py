"""preflight: checks of the machines. As a rank (RANK is set) it measures its share, otherwise this machine."""

import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from dist_transformer.cli.arguments import read_run
from dist_transformer.cluster.script import PREFLIGHT_SECONDS, PREFLIGHT_TOLERANCE
from dist_transformer.config.credentials import without_credentials
from dist_transformer.run.folder import RunDir

SECONDS_TO_ANSWER = 5.0


def preflight_command(
    folder: Annotated[Path, typer.Option(help="Gets what is measured and report.json.")] = Path("preflight"),
    run_folder: Annotated[
        Path | None, typer.Option(help="Run folder whose disk and MLflow server are tried; none: --folder.")
    ] = None,
    seconds: Annotated[int, typer.Option(min=10, help="Time limit.")] = PREFLIGHT_SECONDS,
    tolerance: Annotated[
        float, typer.Option(help="A node that reaches less than this share of the nodes' median stands out.")
    ] = PREFLIGHT_TOLERANCE,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks to start on this machine: one per GPU.")] = 1,
) -> None:
    """Measure this machine: matmul, disk, memory, and between ranks the network. On Slurm: slurm/preflight.sbatch.

    Exit codes: 0 nothing stands out, 3 nodes to exclude, 1 it could not be measured.
    """
    from dist_transformer.processes.launching import num_ranks_given, start_local_ranks

    if num_ranks_given():
        _measure_as_rank(folder, run_folder or folder, seconds)
    from dist_transformer.preflight.report import begin_anew, main

    begin_anew(folder)
    arguments = ["--folder", str(folder), "--run-folder", str(run_folder or folder), "--seconds", str(seconds)]
    start_local_ranks(arguments, ranks, program=[sys.executable, "-m", "dist_transformer", "preflight"])
    sys.exit(main([str(folder), str(tolerance)]))


def _measure_as_rank(folder: Path, run_folder: Path, seconds: int) -> None:
    end = time.monotonic() + seconds
    from dist_transformer.preflight.measure import limit_own_time, measure

    limit_own_time(seconds)
    code = measure(folder, run_folder, end, lambda: tracking_warnings(run_folder))
    sys.stdout.flush()
    os._exit(code)  # destroying a failed group could wait for ranks that never join


def tracking_warnings(run_folder: Path) -> list[str]:
    """A warning if the MLflow server of the run does not answer; none if the run has no server."""
    address = os.environ.get("MLFLOW_TRACKING_URI")
    if RunDir(run_folder).config.is_file():
        tracking = read_run(run_folder, check_files=False)[0].tracking
        address = (tracking.uri or address) if tracking.enabled else None
    if address is None or not address.startswith(("http://", "https://")):
        return []
    trouble = _trouble_of_server(address)
    return [f"MLflow at {without_credentials(address)} {without_credentials(trouble)}"] if trouble else []


def _trouble_of_server(address: str) -> str | None:
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import urlopen

    # A request to the API: a proxy or a page in front of it may answer even if the API does not.
    query = f"{address.rstrip('/')}/api/2.0/mlflow/experiments/get-by-name?experiment_name=Default"
    try:
        with urlopen(query, timeout=SECONDS_TO_ANSWER):
            return None
    except HTTPError as error:
        # The server asks for a password, which is not sent here, or has no such experiment: it is running.
        return None if error.code in (401, 404) else f"answers with the error {error.code}"
    except (OSError, HTTPException, ValueError) as error:
        return f"does not answer: {getattr(error, 'reason', None) or error}"
