"""average: a model folder from the newest checkpoints of a run."""

from pathlib import Path
from typing import Annotated

import typer

from dist_transformer.cli.arguments import read_run
from dist_transformer.errors import UserError


def average_command(
    run: Annotated[Path, typer.Argument(help="A run folder.", show_default=False)],
    output: Annotated[Path | None, typer.Option(help="Where to write; default: the run's model/.")] = None,
    last: Annotated[int | None, typer.Option(min=1, help="Checkpoints; default: checkpoints.average_last.")] = None,
) -> None:
    """Average the newest checkpoints of a run into a model folder (6.1)."""
    from dist_transformer.cli.write_model import write_averaged_model
    from dist_transformer.data.manifest import Manifest
    from dist_transformer.data.prepare import prepared_folder

    if not run.is_dir():
        raise UserError(f"{run}: no such run folder")
    config, run_dir = read_run(run, None, check_files=False)
    folder = prepared_folder(config)
    used = write_averaged_model(config, run_dir, folder, Manifest.load(folder), output or run_dir.model, last)
    print(f"{output or run_dir.model}: average of {', '.join(path.name for path in used)}")
