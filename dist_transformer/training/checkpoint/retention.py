"""Checkpoints that are kept: the newest, the best by their validation, and those of every so many steps."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dist_transformer.config.metrics import is_lower_better, measured_with
from dist_transformer.config.schema import CheckpointConfig
from dist_transformer.run.folder import RunDir
from dist_transformer.training.checkpoint.checkpoints import delete, read_file, saved, step_of
from dist_transformer.training.checkpoint.tensor_files import STATE, validation_of
from dist_transformer.training.divergence import PATIENCE_STEPS

JUDGED_LATE_STEPS = 3
"""A step's loss is that of the weights before it, and is judged when the next but one is begun."""


def regular(run_dir: RunDir, every_steps: int) -> list[Path]:
    """The newest checkpoint and those of every `every_steps` steps, oldest first: what a run without stops has too."""
    paths = [path for path in saved(run_dir) if step_of(path) > 0]
    return [path for path in paths if step_of(path) % every_steps == 0 or path == paths[-1]]


def best(paths: Sequence[Path], count: int, metric: str) -> list[Path]:
    """Those `count` of the checkpoints that are best by a metric of their validation, by step; of equal ones the first.

    Fewer where fewer know it. Compared are those that measured it as the newest one did.
    """
    known = {path: found for path in paths if (found := _validated(path, metric)) is not None}
    kinds = [kind for _, kind in known.values() if kind is not None]
    values = {path: value for path, (value, kind) in known.items() if kind is None or kind == kinds[-1]}
    sign = 1 if is_lower_better(metric) else -1
    return sorted(sorted(values, key=lambda path: (sign * values[path], step_of(path)))[:count], key=step_of)


def retain(run_dir: RunDir, settings: CheckpointConfig, metric: str) -> None:
    """Deletes what `settings` do not keep (rank 0, after a commit).

    Kept are the newest; the newest one that a divergence noticed now would not set aside, as it is older than the
    PATIENCE_STEPS of the loss's monitor; the newest `keep_last` regular ones; of those of every `every_steps` steps the
    `keep_best` that are best by `metric`; those of every `keep_every_steps` steps.
    """
    if not (paths := saved(run_dir)):
        return
    kept = {paths[-1], *regular(run_dir, settings.every_steps)[-settings.keep_last :]}
    kept |= set(
        [path for path in paths if step_of(path) < step_of(paths[-1]) - PATIENCE_STEPS - JUDGED_LATE_STEPS][-1:]
    )
    if settings.keep_best:  # a stop's does not count: a run without that stop would not have it to push another out
        of_regular_steps = [path for path in paths if step_of(path) % settings.every_steps == 0]
        kept |= set(best(of_regular_steps, settings.keep_best, metric))
    if settings.keep_every_steps:
        kept |= {path for path in paths if step_of(path) > 0 and step_of(path) % settings.keep_every_steps == 0}
    for path in paths:
        if path not in kept:
            delete(path)


def _validated(path: Path, metric: str) -> tuple[float, dict[str, Any] | None] | None:
    """The value, and the settings that it was measured with; None: an older version did not write them."""
    try:
        value = float(validation_of(path)[metric])
        settings = read_file(path / STATE).get("settings")
        kind = measured_with(settings, metric) if settings else None
    except (OSError, ValueError, KeyError, TypeError):  # of a step that was not validated, or damaged
        return None
    return (value, kind) if math.isfinite(value) else None
