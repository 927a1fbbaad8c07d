"""Settings that a start changes in a run that goes on: told in the log, in history.jsonl and in MLflow; the former are kept.

A checkpoint holds the settings that it was trained with (`settings` of its state.json), so that what is told is true after
any return, copy or submission. One that is older is compared with the config.yaml of its run folder.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dist_transformer.config.credentials import without_credentials
from dist_transformer.config.former_keys import current_settings
from dist_transformer.config.loading import load_config, with_absolute_paths
from dist_transformer.config.metrics import measured_with
from dist_transformer.config.schema import Config
from dist_transformer.config.slurm_schema import CPU_BIND
from dist_transformer.config.yaml12 import dump
from dist_transformer.data.recipe import flat
from dist_transformer.distributed.group import Ranks
from dist_transformer.errors import UserError
from dist_transformer.files import write_text
from dist_transformer.run.folder import RunDir
from dist_transformer.training.checkpoint.checkpoints import Checkpoint
from dist_transformer.training.run_log import add_to_history

log = logging.getLogger(__name__)

LOSS = "training.label_smoothing"
"""The setting that makes another loss of the same text."""


@dataclass(frozen=True)
class Changes:
    """The settings of a start, and those of the checkpoint that it goes on from as far as they were others: (then, now)."""

    settings: dict[str, Any]
    since_step: int
    former: dict[str, Any]
    by_key: dict[str, tuple[Any, Any]]
    metric: str

    @property
    def is_other_metric(self) -> bool:
        """Whether a value of validation.metric of before says nothing of one of now."""
        now = measured_with(self.settings, self.metric)
        return bool(self.by_key) and measured_with(self.former, self.metric) != now

    def early_stopping(self, checkpoint: Checkpoint | None) -> dict[str, Any] | None:
        """Its state to go on with; None: it begins anew."""
        return None if checkpoint is None or self.is_other_metric else checkpoint.state.get("early_stopping")

    def loss_monitor(self, checkpoint: Checkpoint | None) -> dict[str, Any] | None:
        """Its state to go on with; None: it begins anew, as losses of before and of now are of two kinds."""
        return None if checkpoint is None or LOSS in self.by_key else checkpoint.state["loss_monitor"]

    def texts(self) -> list[str]:
        """A line for each setting."""
        return [f"{key}: {then} -> {now}" for key, (then, now) in self.by_key.items()]

    def tags(self) -> dict[str, str]:
        """What MLflow is told."""
        return {f"changed_since_step_{self.since_step}": "; ".join(self.texts())} if self.by_key else {}


def changes_of(config: Config, prepared: Path, run_dir: RunDir, checkpoint: Checkpoint | None) -> Changes:
    """Compares the settings of this start with those that the checkpoint was trained with; none without one."""
    settings, metric = settings_of(config, prepared), config.validation.metric
    former = _former(run_dir, checkpoint) if checkpoint is not None else None
    if checkpoint is None or former is None:
        return Changes(settings, 0, {}, {}, metric)
    then, now = flat(former), flat(settings)
    keys = [key for key in sorted({*then, *now}) if then.get(key) != now.get(key)]
    return Changes(settings, checkpoint.step, former, {key: (then.get(key), now.get(key)) for key in keys}, metric)


def compare_and_tell(
    config: Config, prepared: Path, run_dir: RunDir, checkpoint: Checkpoint | None, ranks: Ranks
) -> Changes:
    """`changes_of`, told by rank 0, which keeps the former configuration; before config.yaml is written (collective)."""
    compared = changes_of(config, prepared, run_dir, checkpoint) if ranks.is_rank_zero else None
    changes: Changes = ranks.broadcast_object(compared)
    if ranks.is_rank_zero and changes.by_key:
        _tell(changes, run_dir)
    return changes


def _tell(changes: Changes, run_dir: RunDir) -> None:
    step = changes.since_step
    for text in changes.texts():
        log.info("settings   changed since step %d: %s", step, text)
    if changes.is_other_metric:
        log.info("settings   validation.metric is measured otherwise now: the best and the patience begin anew")
    write_text(run_dir.config_until(step), dump(changes.former))
    values = {"settings": changes.by_key, "metric_begins_anew": changes.is_other_metric}
    add_to_history(run_dir, "changed", step, values)


def settings_of(config: Config, prepared: Path | None) -> dict[str, Any]:
    """The configuration as plain JSON with absolute paths; without credentials, and what a job's environment holds."""
    values = with_absolute_paths(config, prepared).model_dump(mode="json")
    del values["slurm"]["environment"]
    values["slurm"]["srun"] = {"cpu-bind": CPU_BIND, **values["slurm"]["srun"]}
    cleaned: dict[str, Any] = _cleaned(values)
    return cleaned


def _former(run_dir: RunDir, checkpoint: Checkpoint) -> dict[str, Any] | None:
    kept = checkpoint.state.get("settings")
    try:
        # Settings that are younger than the checkpoint are what they are where nothing is given.
        config = (
            Config.model_validate(current_settings(kept)) if kept else load_config(run_dir.config, check_files=False)
        )
    except (UserError, ValidationError) as error:
        log.warning("settings   those until step %d are of another version: not compared (%s)", checkpoint.step, error)
        return None
    return settings_of(config, None)


def _cleaned(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _cleaned(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_cleaned(item) for item in value]
    return without_credentials(value) if isinstance(value, str) else value
