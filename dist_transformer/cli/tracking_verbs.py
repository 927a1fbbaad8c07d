"""track sync | track model | track end | ui: the verbs for MLflow."""

import json
import os
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from dist_transformer.cli.arguments import Overrides, RunFolder
from dist_transformer.cluster.job_status import status_after_attempt
from dist_transformer.config.loading import load_config
from dist_transformer.errors import UserError
from dist_transformer.run.folder import RunDir
from dist_transformer.run.lock import while_nobody_trains
from dist_transformer.run.read_run import read_run_folder
from dist_transformer.tracking.final_status import add_untracked, settle, status_said

app = typer.Typer(help="Bring runs and MLflow together.", no_args_is_help=True)


@app.command("sync")
def sync_command(run: RunFolder, overrides: Overrides = None) -> None:
    """Send to MLflow what remained in the run folder after an outage; to another server with tracking.uri=ADDRESS."""
    from dist_transformer.tracking.tracker import sync

    config, run_dir = read_run_folder(run, overrides)
    add_untracked(run_dir)
    sent = sync(run_dir, config.tracking, Path(config.run.root))
    what = f"{sent.points} points and {sent.events} events sent"
    print(f"MLflow run {sent.run_id}: {what if sent.points or sent.events else 'nothing was missing'}")


@app.command("model")
def model_command(
    run: Annotated[Path, typer.Argument(help="The run folder that it comes from.")],
    folder: Annotated[Path | None, typer.Argument(help="A model folder; default: the run's model/.")] = None,
    register_as: Annotated[str | None, typer.Option(help="Register it under this name.")] = None,
    alias: Annotated[str | None, typer.Option(help="Alias of that version: champion.")] = None,
) -> None:
    """Upload a model folder of a run, such as one that `average` made, so that MLflow can serve it."""
    from dist_transformer.decoding.loaded_model import model_folder_of
    from dist_transformer.tracking.tracker import log_model

    if alias is not None and register_as is None:
        raise UserError("--alias is a name for a registered version: give --register-as too")
    given = {"register_as": register_as, "alias": alias}
    config, run_dir = read_run_folder(run, [f"tracking.{key}={json.dumps(value)}" for key, value in given.items()])
    if folder is not None and not folder.is_dir():
        raise UserError(f"{folder}: no such folder; expected a model folder, as `average RUN --output FOLDER` makes")
    model = model_folder_of(folder or run)
    add_untracked(run_dir)
    sent = log_model(run_dir, config.tracking, Path(config.run.root), model)
    registered = f", registered as {register_as}{f'@{alias}' if alias else ''}" if register_as else ""
    print(f"MLflow run {sent.run_id}: {model} is there{registered}")


@app.command("end")
def end_command(
    run: RunFolder,
    job: Annotated[str, typer.Option(help="The job, as the batch script names it.")],
    attempt: Annotated[int, typer.Option(help="Which attempt of it has ended.")],
    seconds: Annotated[int, typer.Option(min=1, help="How long to try.")] = 10,
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


def ui_command(
    root: Annotated[Path, typer.Argument(help="The folder of runs.")] = Path("runs"),
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 5000,
) -> None:
    """Open MLflow's web page on the runs of a folder."""
    if not root.is_dir():
        raise UserError(f"{root}: no such folder; expected the folder of runs (run.root)")
    if RunDir(root).config.is_file() and not (root / "mlflow.db").exists():
        above = RunDir(root.absolute().parent).quoted
        raise UserError(f"{root}: is a run; expected the folder of runs: dist-transformer ui {above}")
    from dist_transformer.tracking.tracker import store_uri

    # MLflow's jobs evaluate language models in many processes.
    environment = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true", **os.environ}
    of_store = ["--backend-store-uri", store_uri(root)]
    arguments = [sys.executable, "-m", "mlflow", "ui", *of_store, "--workers", "1", "--port", str(port)]
    try:
        socket.create_server(("127.0.0.1", port)).close()  # with SO_REUSEADDR, as the server does
    except OSError as error:
        raise UserError(f"port {port}: {os.strerror(error.errno or 0)}; give another with --port") from error
    print(f"http://127.0.0.1:{port}  ('Model training' on its left shows the runs; Ctrl-C ends it)", flush=True)
    os.execve(arguments[0], arguments, environment)
