"""Selection of the checkpoints to keep: the newest, the best by their validation, and those of regular steps."""

import math
from collections.abc import Generator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from dist_transformer.config.metrics import is_lower_better, measured_with, signature_of
from dist_transformer.config.schema import CheckpointConfig
from dist_transformer.files import patiently, read_json_patiently
from dist_transformer.run.folder import RunDir
from dist_transformer.training.checkpoint.checkpoints import delete, saved, step_of
from dist_transformer.training.checkpoint.tensor_files import MANIFEST, STATE, validation_of
from dist_transformer.training.divergence import PATIENCE_STEPS

JUDGED_LATE_STEPS = 3
"""Delay of divergence checks: a step's loss is that of the weights before it, and is checked two steps later."""


def regular(paths: Sequence[Path], every_steps: int) -> list[Path]:
    """Returns of all checkpoints the newest and the regular ones, oldest first, as in a run without stops: those of every
    `checkpoints.every_steps` steps of the start that saved them; of `every_steps`, if they do not know it."""
    paths = [path for path in paths if step_of(path) > 0]
    return [path for path in paths if path == paths[-1] or _is_due(path, "every_steps", every_steps)]


def best(paths: Sequence[Path], count: int, metric: str) -> list[Path]:
    """Returns the `count` checkpoints that are best by a metric of their validation, by step; of equal ones the first.

    Fewer if fewer have the metric. Only those that measured it as the newest one, with its settings and signature, are compared.
    """
    return sorted(_measured_as_the_newest(paths, metric)[:count], key=step_of)


def retain(run_dir: RunDir, settings: CheckpointConfig, metric: str, new: Path) -> Generator[Path, None, list[Path]]:
    """Deletes the checkpoints that `settings` do not keep (rank 0, after a commit), yielding each; returns those kept, by step.

    Kept are the newest; the newest one that a divergence detected now would not set aside, as it is older than the
    PATIENCE_STEPS of the loss monitor; the newest `keep_last` regular ones; of the regular ones the `keep_best` that are best
    by `metric`, and while fewer were measured as the newest one the best that were measured otherwise; those of every
    `keep_every_steps` steps. Those of another run than the committed `new` one are left alone.
    """
    run_id = read_json_patiently(new / MANIFEST)["run_id"]
    if not (paths := [p for p in saved(run_dir) if _run_of(p, patiently(p, p.stat).st_mtime_ns) in (run_id, None)]):
        return []
    of_regular_steps = regular(paths, settings.every_steps)
    kept = {paths[-1], *of_regular_steps[-settings.keep_last :]}
    judged = step_of(paths[-1]) - PATIENCE_STEPS - JUDGED_LATE_STEPS
    kept |= {*[path for path in paths if step_of(path) < judged][-1:]}
    # Without checkpoints of stops: one must not replace another that a run without stops keeps.
    rest = [path for path in of_regular_steps if _is_due(path, "every_steps", settings.every_steps)]
    missing = settings.keep_best
    while missing > 0 and (measured := _measured_as_the_newest(rest, metric)):
        kept |= {*measured[: settings.keep_best]}
        missing -= len(measured)
        rest = [path for path in rest if path not in measured]
    kept |= {path for path in paths if _is_due(path, "keep_every_steps", settings.keep_every_steps or 0)}
    for path in sorted({*paths} - kept, key=step_of):
        delete(path)
        yield path
    return sorted(kept, key=step_of)


@cache  # the time of the folder is another if a save has taken its place
def _run_of(path: Path, _written_ns: int) -> Any:
    """Returns the id of the run that saved a checkpoint; None if its manifest is damaged."""
    with suppress(ValueError, LookupError, TypeError):
        return read_json_patiently(path / MANIFEST)["run_id"]
    return None


def _is_due(path: Path, key: str, otherwise: int) -> bool:
    """True if the step is a multiple of a setting of the start that saved it, or `otherwise` (0: none) if that had none."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        otherwise = int(_settings(path)[key]) or otherwise
    return otherwise > 0 and step_of(path) > 0 and step_of(path) % otherwise == 0


@cache  # what is saved does not change
def _settings(path: Path) -> Any:
    """Returns the `checkpoints` settings of the start that saved a checkpoint."""
    return read_json_patiently(path / STATE)["settings"]["checkpoints"]


def _measured_as_the_newest(paths: Sequence[Path], metric: str) -> list[Path]:
    """Returns those whose metric was measured as that of the newest one, as far as both are known to be, the best first."""
    known = {}
    for path in paths:
        with suppress(FileNotFoundError):  # it is gone; one whose disk does not answer may be the best: that is raised
            if found := _validated(path, metric, patiently(path, path.stat).st_mtime_ns):
                known[path] = found
    newest = next((kind for _, kind in reversed(known.values()) if kind), {})
    sign = 1 if is_lower_better(metric) else -1
    same = [path for path, (_, kind) in known.items() if kind | newest == newest | kind]  # in the keys of both
    return sorted(same, key=lambda path: (sign * known[path][0], step_of(path)))


@cache  # of 3,000 they take a second; the time of the folder is another if measures were added, or its step saved again
def _validated(path: Path, metric: str, _written_ns: int) -> tuple[float, dict[str, Any]] | None:
    """Returns the value, and the settings and the signature that it was measured with, as far as the version that wrote it
    knew them. An OSError is raised, as what is returned is kept."""
    try:
        measures, settings = validation_of(path)
        value = float(measures[metric])
        kind = measured_with(settings, metric) if settings else {}
    except (ValueError, LookupError, TypeError, AttributeError):  # it was not validated, or is damaged
        return None
    signature = signature_of(measures, metric)
    return (value, kind | ({"signature": signature} if signature else {})) if math.isfinite(value) else None
