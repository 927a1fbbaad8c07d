"""track sync | track model | track end | ui: the verbs for MLflow."""

import os
from pathlib import Path
from typing import Annotated

import typer

from dist_transformer.cli.arguments import Overrides, read_run
from dist_transformer.cli.track_end import end_command
from dist_transformer.errors import UserError

app = typer.Typer(help="Bring runs and MLflow together.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Send runs and models to MLflow."""


@app.command("sync")
def sync_command(
    run: Annotated[Path, typer.Argument(help="A run folder.", show_default=False)], overrides: Overrides = None
) -> None:
    """Send to MLflow what remained in the run folder after an outage; to another server with tracking.uri=ADDRESS."""
    from dist_transformer.tracking.tracker import sync

    _refuse_no_run(run)
    config, run_dir = read_run(run, overrides, check_files=False)
    sent = sync(run_dir, config.tracking, Path(config.run.root))
    what = (
        f"{sent.points} points and {sent.events} events sent" if sent.points or sent.events else "nothing was missing"
    )
    print(f"MLflow run {sent.run_id}: {what}")


@app.command("model")
def model_command(
    run: Annotated[Path, typer.Argument(help="The run folder that it comes from.", show_default=False)],
    folder: Annotated[Path | None, typer.Argument(help="A model folder; default: the run's model/.")] = None,
    register_as: Annotated[str | None, typer.Option(help="Register it under this name.", show_default=False)] = None,
    alias: Annotated[str | None, typer.Option(help="Alias of that version: champion.", show_default=False)] = None,
) -> None:
    """Upload a model folder of a run, such as one that `average` made, so that MLflow can serve it."""
    from dist_transformer.decoding.loaded_model import model_folder_of
    from dist_transformer.tracking.tracker import log_model

    if alias is not None and register_as is None:
        raise UserError("--alias is a name for a registered version: give --register-as too")
    _refuse_no_run(run)
    if folder is not None and not folder.is_dir():
        raise UserError(
            f"{folder}: no such folder; expected a model folder, such as `average RUN --output FOLDER` makes"
        )
    config, run_dir = read_run(run, None, check_files=False)
    settings = config.tracking.model_copy(update={"register_as": register_as, "alias": alias})
    model = model_folder_of(folder or run)
    sent = log_model(run_dir, settings, Path(config.run.root), model, {})
    registered = f", registered as {register_as}{f'@{alias}' if alias else ''}" if register_as else ""
    print(f"MLflow run {sent.run_id}: {model} is there{registered}")


app.command("end")(end_command)


def ui_command(
    root: Annotated[Path, typer.Argument(help="The folder of runs.")] = Path("runs"),
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 5000,
) -> None:
    """Open MLflow's web page on the runs of a folder."""
    if not root.is_dir():
        raise UserError(f"{root}: no such folder; expected the folder of runs (run.root)")
    from dist_transformer.tracking.tracker import ui_command as command

    # MLflow's jobs evaluate language models in many processes.
    environment = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true", **os.environ}
    arguments = [*command(root), "--workers", "1", "--port", str(port)]
    print(f"http://127.0.0.1:{port}  ('Model training' on its left shows the runs; Ctrl-C ends it)", flush=True)
    os.execve(arguments[0], arguments, environment)


def _refuse_no_run(run: Path) -> None:
    if not run.is_dir():
        raise UserError(f"{run}: no such folder; expected a run folder (<run.root>/<run.name>)")
