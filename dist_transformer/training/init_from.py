"""`training.init_from`: finds the weights that a path names, and initialises a model with them."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dist_transformer.distributed.rank_zero import run_on_rank_zero
from dist_transformer.errors import CheckpointError, MachineError, UserError
from dist_transformer.files import MISPLACED, file_sha256, read_json
from dist_transformer.interop.initial_weights import Fit, Origin, fit_text, form_of, load_initial_weights
from dist_transformer.interop.model_folder import CONFIG, WEIGHTS, load_model_folder
from dist_transformer.model.transformer import Transformer
from dist_transformer.run.attempts import warn_of_age
from dist_transformer.run.folder import RunDir
from dist_transformer.training.checkpoint import checkpoints
from dist_transformer.training.checkpoint.tensor_files import MANIFEST, STATE, Weights
from dist_transformer.training.run import Run

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """The folder that a path names: a model folder, or a complete checkpoint.

    Attributes:
        sha256: SHA-256 of the model's weights file, or of the checkpoint's manifest, which has that of every file.
    """

    folder: Path
    is_model: bool
    sha256: str


def initialise(run: Run, model: Transformer) -> dict[str, str]:
    """Loads the weights of `training.init_from` into the fp32 model on the CPU (collective); rank 0 logs which.

    Returns the values to track: the folder that was used, and the SHA-256 of its weights. Raises UserError: the same on
    every rank: there is no such model, or it does not fit.
    """
    config, tokenizer = run.config, run.manifest.tokenizer
    doing = run.doing("reading the weights of training.init_from")
    doing()
    found = run_on_rank_zero(run.ranks, lambda: _found(Path(str(config.training.init_from))), doing)
    tokenizers = (tokenizer.source_sha256, tokenizer.target_sha256)
    here = Origin(config.model.num_heads, tokenizers, form_of(config.model.model_dump()))
    fit = _load(model, found, here, config.training.init_partially)
    for result in run.ranks.all_gather_object(fit):
        if isinstance(result, UserError):
            raise result.agreed()
    assert isinstance(fit, Fit)
    step = read_json(found.folder / (CONFIG if found.is_model else STATE))["step"]
    log.info("init_from  %s of step %d: %d tensors taken", found.folder, step, len(fit.taken))
    if fit.others and run.ranks.is_rank_zero:
        log.warning("init_from  these start anew, were left out, or are others now:\n%s", fit_text(fit))
    return {"init_from": str(found.folder.absolute()), "init_from_sha256": found.sha256}


def find(path: Path) -> Found:
    """Finds the weights of a model folder, a checkpoint, or a run folder (its model, else its newest checkpoint).

    Every byte of a checkpoint is read and compared with its manifest.

    Raises:
        UserError: `path` is none of these.
        CheckpointError: `path` is a damaged checkpoint.
    """
    for folder in (path, RunDir(path).model):
        if (folder / CONFIG).is_file() and (folder / WEIGHTS).is_file():
            warn_of_age(RunDir(path))
            return Found(folder, True, file_sha256(folder / WEIGHTS))
    if path.name.startswith("step_") and (path / MANIFEST).is_file():
        if (problem := checkpoints.damage(path)) is not None:
            raise CheckpointError(f"training.init_from: the checkpoint {path} is damaged ({problem}). Take another one")
        return Found(path, False, file_sha256(path / MANIFEST))
    for checkpoint in reversed(checkpoints.saved(RunDir(path))):
        if (problem := checkpoints.damage(checkpoint)) is None:
            return Found(checkpoint, False, file_sha256(checkpoint / MANIFEST))
        log.warning("init_from  %s is damaged (%s): an older one is taken", checkpoint, problem)
    problem = "has no weights to start with" if path.is_dir() else "is no folder"
    raise UserError(
        f"training.init_from: {path} {problem}. Expected a run folder with a `model` folder or whole "
        "checkpoints, one checkpoint (.../checkpoints/step_00001000), or a model folder (model.safetensors, config.json)"
    )


def _found(path: Path) -> Found:
    try:
        return find(path)
    except OSError as error:
        raise _unreadable(path, error) from error


def _load(model: Transformer, found: Found, here: Origin, partially: bool) -> Fit | UserError:
    """Loads the weights; returns an error so that all ranks can agree on it: another node may not see the folder."""
    try:
        weights, there = _of_model(found.folder) if found.is_model else _of_checkpoint(found.folder)
        return load_initial_weights(model, weights, there, here, str(found.folder), partially)
    except UserError as error:
        return error
    except OSError as error:
        return _unreadable(found.folder, error)


def _unreadable(path: Path, error: OSError) -> UserError:
    kind = UserError if error.errno in MISPLACED else MachineError
    return kind(f"training.init_from: {path} cannot be read: {error}")


def _of_model(folder: Path) -> tuple[Mapping[str, Any], Origin]:
    loaded = load_model_folder(folder)
    files = loaded.tokenizer_files
    tokenizers = (file_sha256(files.source), file_sha256(files.target or files.source))
    origin = Origin(loaded.config.num_heads, tokenizers, form_of(loaded.config.model_dump()))
    return dict(loaded.model.named_parameters()), origin


def _of_checkpoint(folder: Path) -> tuple[Mapping[str, Any], Origin]:
    recipe = read_json(folder / STATE)["recipe"]
    tokenizers = (recipe["source tokenizer"], recipe["target tokenizer"])
    model = {key.removeprefix("model."): value for key, value in recipe.items() if key.startswith("model.")}
    return Weights(folder), Origin(recipe["model.num_heads"], tokenizers, form_of(model))
