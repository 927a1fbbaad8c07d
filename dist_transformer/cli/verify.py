"""verify: the checkpoints of a run at rest, against their manifests."""

from pathlib import Path
from typing import Annotated

import typer

from dist_transformer.errors import CheckpointError, UserError
from dist_transformer.format import progress_bar
from dist_transformer.run.folder import RunDir
from dist_transformer.run.records import read_record


def verify_command(run: Annotated[Path, typer.Argument(help="A run folder.", show_default=False)]) -> None:
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
