"""average, verify: the checkpoints of a run as a model folder; at rest, against their manifests."""

import os
from pathlib import Path
from typing import Annotated

import typer

from dist_transformer.cli.arguments import RunFolder, read_run_folder
from dist_transformer.errors import CheckpointError, UserError
from dist_transformer.format import progress_bar
from dist_transformer.run.folder import RunDir
from dist_transformer.run.outputs import check_output
from dist_transformer.run.records import read_record


def average_command(
    run: RunFolder,
    output: Annotated[Path | None, typer.Option(help="Where to write; default: the run's model/.")] = None,
    last: Annotated[int | None, typer.Option(min=1, help="Average the newest so many checkpoints (6.1).")] = None,
    best: Annotated[int | None, typer.Option(min=1, help="Average those best by validation.metric.")] = None,
    ema: Annotated[bool, typer.Option("--ema", help="Take the moving average of training.ema_decay.")] = False,
    step: Annotated[list[int] | None, typer.Option(help="Average those of these steps; one: take it.")] = None,
) -> None:
    """Make a model folder of a run's checkpoints; without an option: as set by checkpoints.final_model."""
    from dist_transformer.data.manifest import Manifest
    from dist_transformer.data.prepare.preparation import prepared_folder
    from dist_transformer.interop.model_folder import MODEL_FOLDER, is_model_folder
    from dist_transformer.training.checkpoint.final_model import Averaged, write_final_model

    choices = {
        "--last": Averaged("average_last", last) if last else None,
        "--best": Averaged("average_best", best) if best else None,
        "--ema": Averaged("ema") if ema else None,
        "--step": Averaged("steps", len({*step}), tuple(step)) if step else None,
    }
    given = {option: choice for option, choice in choices.items() if choice}
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} exclude each other: give one of --last, --best, --ema and --step")
    choice = next(iter(given.values()), None)
    config, run_dir = read_run_folder(run)
    output = output or run_dir.model
    other = RunDir((real := Path(os.path.realpath(output))).parent)
    if real == other.model and other.config.is_file() and not os.path.samefile(other.path, run_dir.path):
        raise UserError(f"{output}: is the model of another run; give a path outside {other.path}")
    check_output(output, MODEL_FOLDER, is_model_folder)
    folder = prepared_folder(config)
    with progress_bar() as show:
        show("checking the checkpoints", 0, None)
        written = write_final_model(config, run_dir, folder, Manifest.load(folder), output, choice, show)
    print(f"{output}: {written}")


def verify_command(run: RunFolder) -> None:
    """Read every byte of a run's checkpoints and compare it with their checksums. Nothing is changed."""
    from dist_transformer.training.checkpoint import checkpoints

    if not run.is_dir():
        raise UserError(f"{run}: no such run folder")
    problems, number = [], 0
    total = len([*RunDir(run).checkpoints.glob("step_*")])
    with progress_bar() as show:
        for number, (path, problem) in enumerate(checkpoints.verified(RunDir(run)), start=1):
            print(f"{path.name}  {problem or 'undamaged'}", flush=True)
            show("verifying", number, total)
            problems += [path.name] if problem else []
    if not number:
        step = read_record(RunDir(run).state).get("step", 0)
        purged = f", although run.json says that step {step} was saved: was it purged?" if step else ""
        raise UserError(f"{run}: has no checkpoint to verify; expected a run folder with checkpoints/step_...{purged}")
    if problems:
        raise CheckpointError(
            f"{run}: damaged: {', '.join(problems)}. A start takes the newest undamaged one and sets damaged ones aside; copy "
            "them back from elsewhere if you have them"
        )
