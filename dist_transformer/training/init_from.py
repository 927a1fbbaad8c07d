"""`training.init_from`: weights of another run or model as the start: fitting tensors are copied, others reported by name.

A tensor fits if the model has one of the same name, shape and meaning. Shapes alone are not enough: the rows of an
embedding belong to the pieces of one tokenizer, and a projection of attention to its number of heads.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dist_transformer.distributed.rank_zero import run_on_rank_zero
from dist_transformer.distributed.rounds import together
from dist_transformer.errors import CheckpointError, MachineError, UserError
from dist_transformer.files import MISPLACED, file_sha256, read_json
from dist_transformer.interop.model_folder import CONFIG, WEIGHTS, load_model_folder
from dist_transformer.model.transformer import Transformer
from dist_transformer.run.attempts import warn_of_age
from dist_transformer.run.folder import RunDir
from dist_transformer.training.checkpoint import checkpoints
from dist_transformer.training.checkpoint.tensor_files import MANIFEST, STATE, Weights
from dist_transformer.training.run import Run

log = logging.getLogger(__name__)

MISSING = "not in the source"
UNKNOWN = "in the source, but not in the model"
OTHER_SHAPE = "of another shape"
OTHER_TOKENIZER = "of another tokenizer, whose pieces are other rows"
OTHER_HEADS = "of attention heads of another number or size"
OTHER_FORM = "settings that no shape tells, but that the weights were trained with"
FORM = ("norm", "norm_type", "activation", "positions")
"""Settings of the model that change the computation without changing the shapes of tensors."""


@dataclass(frozen=True)
class Found:
    """The folder that a path names: a model folder, or a complete checkpoint.

    Attributes:
        sha256: SHA-256 of the model's weights file, or of the checkpoint's manifest, which has that of every file.
    """

    folder: Path
    is_model: bool
    sha256: str


@dataclass(frozen=True)
class Origin:
    """Meaning of the tensors of a source or of the model to be initialised.

    Attributes:
        tokenizers: SHA-256 of the source and of the target side's sentencepiece model, or its first digits.
        form: the settings of FORM that are known.
    """

    num_heads: int
    tokenizers: tuple[str, str]
    form: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Fit:
    """Result of a comparison: the fitting tensors, and the others as (name, reason, details), sorted by name.

    Among the others are differing settings, such as `model.norm`, that no tensor shows.
    """

    taken: tuple[str, ...]
    others: tuple[tuple[str, str, str], ...]


def initialise(run: Run, model: Transformer) -> dict[str, str]:
    """Loads the weights of `training.init_from` into the fp32 model on the CPU (collective); rank 0 logs which.

    Returns the values to track: the folder that was used, and the SHA-256 of its weights. Raises UserError: the same on
    every rank: there is no such model, or it does not fit.
    """
    config, tokenizer = run.config, run.data.manifest.tokenizer
    doing = run.doing("reading the weights of training.init_from")
    doing()
    found = run_on_rank_zero(run.ranks, lambda: _found(Path(str(config.training.init_from))), doing)
    tokenizers = (tokenizer.source_sha256, tokenizer.target_sha256)
    here = Origin(config.model.num_heads, tokenizers, form_of(config.model.model_dump()))
    fit = together(run.ranks, lambda: _load(model, found, here, config.training.init_partially))
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
    if (path / MANIFEST).is_file() and (path.name.startswith("step_") or (path / STATE).is_file()):
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


def _load(model: Transformer, found: Found, here: Origin, partially: bool) -> Fit:
    try:
        weights, there = _of_model(found.folder) if found.is_model else _of_checkpoint(found.folder)
        return load_initial_weights(model, weights, there, here, str(found.folder), partially)
    except OSError as error:
        raise _unreadable(found.folder, error) from error


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


def form_of(settings: Mapping[str, object]) -> dict[str, str]:
    """The settings of FORM among those of a model."""
    return {name: str(settings[name]) for name in FORM if name in settings}


def load_initial_weights(
    model: Transformer, weights: Mapping[str, Tensor], there: Origin, here: Origin, label: str, partially: bool
) -> Fit:
    """Copies the fitting ones of `weights` into the fp32 model on the CPU and returns the others by name.

    `label` names the source in messages. Every rank calls it with the same arguments; nothing is communicated. Raises
    UserError: a tensor does not fit and `partially` is false, or none fits. The model is then unchanged.
    """
    fit = compare(model, weights, there, here)
    if not fit.taken:
        raise UserError(
            f"training.init_from: nothing of {label} fits this model:\n{fit_text(fit)}\n"
            "Give a run or model of the same shape and tokenizer, or leave training.init_from out"
        )
    if fit.others and not partially:
        raise UserError(
            f"training.init_from: {len(fit.others)} parts of {label} and of this model do not fit each other:\n"
            f"{fit_text(fit)}\nSet training.init_partially=true to take the {len(fit.taken)} that fit and to start the "
            "others anew, or give this run the model section and the tokenizer (tokenizer.source_model) of the source"
        )
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name in fit.taken:
            own[name].copy_(weights[name])
    return fit


def compare(model: Transformer, weights: Mapping[str, Tensor], there: Origin, here: Origin) -> Fit:
    """Compares names, shapes and meaning; tied tensors count once."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    foreign = _foreign_matrices(model, there, here)
    heads = f"{there.num_heads} there, {here.num_heads} here"
    names = set(weights)  # a lookup in the mapping itself may read the tensor
    taken, others = [], [(name, UNKNOWN, "") for name in names - shapes.keys()]
    others += [
        (f"model.{name}", OTHER_FORM, f"{there.form[name]} there, {here.form[name]} here")
        for name in there.form.keys() & here.form.keys()
        if there.form[name] != here.form[name]
    ]
    for name, shape in shapes.items():
        found = tuple(weights[name].shape) if name in names else None
        if found is None:
            others.append((name, MISSING, ""))
        elif name in foreign:
            others.append((name, OTHER_TOKENIZER, ""))
        elif found != shape:
            others.append((name, OTHER_SHAPE, f"{found} there, {shape} here"))
        elif "attention." in name and (there.num_heads != here.num_heads or _value_sizes_differ(name, shapes, weights)):
            others.append((name, OTHER_HEADS, heads))
        else:
            taken.append(name)
    return Fit(tuple(taken), tuple(sorted(others)))


def _value_sizes_differ(name: str, shapes: Mapping[str, tuple[int, ...]], weights: Mapping[str, Tensor]) -> bool:
    """True if value sizes differ: the matrices joined in one tensor then differ, even if their total size is equal."""
    output = f"{name.split('attention.')[0]}attention.output.weight"
    return output in weights and tuple(weights[output].shape) != shapes[output]


def fit_text(fit: Fit) -> str:
    """All names that do not fit, grouped by reason, with a line for each layer or other part.

    2 not in the source:
      decoder_layers.1: feed_forward.inner.bias, feed_forward.inner.weight
    """
    lines = []
    for why, of_kind in groupby(sorted(fit.others, key=itemgetter(1)), key=itemgetter(1)):
        entries = list(of_kind)
        lines.append(f"  {len(entries)} {why}:")
        for part, of_part in groupby(entries, key=lambda entry: _part(entry[0])):
            names = [f"{name.removeprefix(part + '.')}{details and f' ({details})'}" for name, _, details in of_part]
            lines.append(f"    {part}: {', '.join(names)}")
    return "\n".join(lines) or "  everything fits"


def _part(name: str) -> str:
    """`decoder_layers.1` for `decoder_layers.1.feed_forward.inner.bias`; the module for any other name."""
    words = name.split(".")
    is_layer = len(words) > 2 and words[1].isdigit()
    return ".".join(words[:2] if is_layer else words[:-1]) or name


def _foreign_matrices(model: Transformer, there: Origin, here: Origin) -> set[str]:
    """Names of the matrices whose rows are pieces of another tokenizer."""
    # A checkpoint keeps the first digits only.
    differs = [not (a.startswith(b) or b.startswith(a)) for a, b in zip(there.tokenizers, here.tokenizers, strict=True)]
    of_source, of_target = {"source_embedding.weight"}, {"target_embedding.weight", "output.weight", "output_bias"}
    if model.target_embedding is model.source_embedding:
        of_target |= of_source
    return (of_source if differs[0] else set()) | (of_target if differs[1] else set())
