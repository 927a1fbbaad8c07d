"""Arguments that several verbs take, and what they mean."""

from pathlib import Path
from typing import Annotated

import typer

from dist_transformer.config.loading import load_config
from dist_transformer.config.models import Config
from dist_transformer.errors import UserError
from dist_transformer.run_dir import RunDir

ConfigArgument = Annotated[Path, typer.Argument(help="A YAML file.", show_default=False)]
RunArgument = Annotated[Path, typer.Argument(help="A YAML file, or a run folder to go on with.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Settings over those of the file: optimizer.learning_rate=3e-4", show_default=False),
]


def read_run(run: Path, overrides: list[str] | None, *, check_files: bool = True) -> tuple[Config, RunDir]:
    """Configuration and run folder of a YAML file, or of a run folder that is gone on with."""
    if run.is_dir():
        run_dir = RunDir(run)
        if not run_dir.config.is_file():
            raise UserError(
                f"{run}: is a folder without config.yaml, so not a run folder; give a YAML file or a run folder"
            )
        return load_config(run_dir.config, overrides, check_files=check_files), run_dir
    config = load_config(run, overrides, check_files=check_files)
    return config, RunDir(Path(config.run.root) / config.run.name)
