"""average: a model folder from the checkpoints of a run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dist_transformer.cli.arguments import read_run_folder
from dist_transformer.errors import UserError
from dist_transformer.format import progress_bar
from dist_transformer.run.outputs import check_output

if TYPE_CHECKING:  # at run time this would import torch for every command
    from dist_transformer.training.checkpoint.final_model import Averaged


def average_command(
    run: Annotated[Path, typer.Argument(help="A run folder.", show_default=False)],
    output: Annotated[Path | None, typer.Option(help="Where to write; default: the run's model/.")] = None,
    last: Annotated[int | None, typer.Option(min=1, help="Average the newest so many checkpoints (6.1).")] = None,
    best: Annotated[int | None, typer.Option(min=1, help="Average those best by validation.metric.")] = None,
    ema: Annotated[bool, typer.Option("--ema", help="Take the moving average of training.ema_decay.")] = False,
) -> None:
    """Make a model folder of a run's checkpoints; without an option: as set by checkpoints.final_model."""
    from dist_transformer.data.manifest import Manifest
    from dist_transformer.data.prepare.preparation import prepared_folder
    from dist_transformer.interop.model_folder import MODEL_FOLDER, is_model_folder
    from dist_transformer.training.checkpoint.final_model import write_final_model

    choice = _choice(last, best, ema)
    config, run_dir = read_run_folder(run)
    output = output or run_dir.model
    check_output(output, MODEL_FOLDER, is_model_folder)
    folder = prepared_folder(config)
    with progress_bar() as show:
        show("checking the checkpoints", 0, None)
        written = write_final_model(config, run_dir, folder, Manifest.load(folder), output, choice, show)
    print(f"{output}: {written}")


def _choice(last: int | None, best: int | None, ema: bool) -> "Averaged | None":
    """The selection of the options; None: that of the configuration."""
    from dist_transformer.training.checkpoint.final_model import Averaged

    given = [name for name, value in (("--last", last), ("--best", best), ("--ema", ema)) if value]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} exclude each other: give one of --last, --best and --ema")
    if last is not None:
        return Averaged("average_last", last)
    if best is not None:
        return Averaged("average_best", best)
    return Averaged("ema") if ema else None
