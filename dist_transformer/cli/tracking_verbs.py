"""track sync | ui: MLflow beside a run."""

import os
from pathlib import Path
from typing import Annotated

import typer

from dist_transformer.cli.arguments import read_run

app = typer.Typer(help="Bring runs and MLflow together.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Bring runs and MLflow together."""


@app.command("sync")
def sync_command(run: Annotated[Path, typer.Argument(help="A run folder.", show_default=False)]) -> None:
    """Send to MLflow what an outage kept in the run folder."""
    from dist_transformer.tracking.tracker import sync

    config, run_dir = read_run(run, None, check_files=False)
    print(sync(run_dir, config.tracking, Path(config.run.root)))


def ui_command(
    root: Annotated[Path, typer.Argument(help="The folder of runs.")] = Path("runs"),
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 5000,
) -> None:
    """Open MLflow's web page on the runs of a folder."""
    from dist_transformer.tracking.tracker import ui_command as command

    arguments = [*command(root), "--port", str(port)]
    print(f"http://127.0.0.1:{port}  (Ctrl-C ends it)", flush=True)
    os.execv(arguments[0], arguments)
