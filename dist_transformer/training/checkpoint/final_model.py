"""The final model folder, made of a run's checkpoints: mostly the mean of several (6.1: the last 5 for base, 20 for big)."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from dist_transformer.config.schema import CheckpointConfig, Config
from dist_transformer.data.manifest import Manifest
from dist_transformer.errors import CheckpointError
from dist_transformer.files import read_json
from dist_transformer.format import Show
from dist_transformer.interop.model_card import Origin
from dist_transformer.interop.model_folder import ModelInformation, TokenizerFiles, save_model_folder
from dist_transformer.run.folder import RunDir
from dist_transformer.training.checkpoint import checkpoints, retention
from dist_transformer.training.checkpoint.tensor_files import STATE, Weights

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Averaged:
    """Checkpoints that a model folder is made of, in the terms of checkpoints.final_model.

    `count`: number of checkpoints; 1 for the moving average (ema). `steps`: those of "steps", which no setting has.
    """

    kind: Literal["average_last", "average_best", "ema", "steps"]
    count: int = 1
    steps: tuple[int, ...] = ()

    @classmethod
    def of(cls, settings: CheckpointConfig) -> "Averaged":
        """Returns the configured choice for the final model."""
        counts = {"average_last": settings.average_last, "average_best": settings.keep_best, "ema": 1}
        return cls(settings.final_model, counts[settings.final_model])


def write_final_model(
    config: Config, run_dir: RunDir, prepared: Path, manifest: Manifest, output: Path, choice: Averaged | None = None,
    show: Show = lambda stage, done, total: None,
) -> str:  # fmt: skip
    """Writes the model folder `output` of `choice` (default: checkpoints.final_model); `show`: see `progress_bar`.

    Returns a description: "average of step_00000003, step_00000006", "moving average of step_00000006".

    Checkpoints of stops are not used, so that a stopped run gives the same model as one without stops. Nor are damaged
    ones and those of other runs, with a warning. The last ones are averaged where the best were configured, but not asked
    for, and no validation has succeeded. Raises CheckpointError: there is no complete checkpoint, or none with
    the required validation or moving average.
    """
    asked, choice = choice, choice or Averaged.of(config.checkpoints)
    metric = config.validation.metric
    last = min(config.checkpoints.average_last, config.checkpoints.keep_last) if asked is None else 0
    used = _chosen(run_dir, config.checkpoints.every_steps, choice, metric, last)
    if asked is not None and len(used) < asked.count:  # the configured count is a limit: a short run has fewer
        what = f"complete and with a validation {metric}" if asked.kind == "average_best" else "complete"
        log.warning("%d checkpoints asked for, %d there (%s)", asked.count, len(used), what)
    files = manifest.tokenizer
    target = None if files.target == files.source else prepared / files.target
    of_corpus = {each.name: getattr(manifest, each.name) for each in fields(ModelInformation) if each.name != "step"}
    information = ModelInformation(**of_corpus, step=read_json(used[-1] / STATE)["step"])
    part = "ema" if choice.kind == "ema" else "weight"
    weights = average_weights([Weights(path, part) for path in used], partial(show, "averaging"))
    made_of = f"{'moving average' if part == 'ema' else 'average'} of {', '.join(path.name for path in used)}"
    corpora = [  # without paths, which may be private
        f"{'trained on' if name in manifest.training else 'validated on'} `{name}`: {split.rows:,} pairs of "
        f"{split.read_rows:,} read, {split.source_tokens:,} source and {split.target_tokens:,} target tokens"
        for name, split in manifest.splits.items()
    ]
    origin = Origin(f"{made_of} of the run {run_dir.name}", corpora)
    tokenizer = TokenizerFiles(prepared / files.source, target)
    plugin = None if config.model.plugin is None else run_dir.plugin
    save_model_folder(output, weights, config.model, tokenizer, information, origin, plugin)
    return made_of


def average_weights(
    sources: Sequence[Mapping[str, Tensor]], progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, Tensor]:
    """The fp32 mean of each tensor over `sources`, weights of one model by name; at least one.

    Summed in fp64, one tensor at a time, so weights that are read on access need no more memory than the result.
    `progress` is called with the number of tensors done and of all.
    """
    means = {}
    for number, name in enumerate(sorted(sources[0]), start=1):
        total = torch.zeros(sources[0][name].shape, dtype=torch.float64)
        for source in sources:
            total += source[name].detach().to("cpu", torch.float64)
        means[name] = (total / len(sources)).float()
        progress(number, len(sources[0]))
    return means


def _chosen(run_dir: RunDir, every_steps: int, choice: Averaged, metric: str, last: int) -> list[Path]:
    """Returns the checkpoints to average, oldest first; so many of the `last` where none can be the best."""
    regular = retention.regular(saved := checkpoints.saved(run_dir), every_steps)
    run_id = checkpoints.newest_run_id(run_dir)
    if choice.kind == "steps":
        there = {checkpoints.step_of(path): path for path in saved}
        if there and (missing := sorted({*choice.steps} - {*there})):
            raise CheckpointError(f"{run_dir.checkpoints}: no step {missing[0]}, expected one of {[*there]}")
        used = list(_complete([there[step] for step in sorted({*choice.steps} & {*there})], run_id))
    elif choice.kind == "ema":
        used = list(islice(_complete(reversed(regular), run_id), 1))
    elif choice.kind == "average_last":
        used = list(_complete(regular[-choice.count :], run_id))
    elif (known := retention.best(regular, choice.count, metric)) or not regular:
        used = list(_complete(known, run_id))
    elif last:
        log.warning("no checkpoint knows its validation %s, so none is the best: the last ones are averaged", metric)
        used = list(_complete(regular[-last:], run_id))
    else:
        raise CheckpointError(
            f"{run_dir.checkpoints}: no checkpoint knows its validation {metric}, so none is the best; train with "
            "data.validation and checkpoints.keep_best, or average the last ones (--last)"
        )
    if not used:
        raise CheckpointError(f"{run_dir.checkpoints}: there is no complete checkpoint to make a model of; train first")
    return used


def _complete(paths: Iterable[Path], run_id: str | None) -> Iterator[Path]:
    for path in paths:
        if (problem := checkpoints.damage(path, run_id)) is None:
            yield path
        else:
            log.warning("%s is damaged (%s): left out of the model", path, problem)
