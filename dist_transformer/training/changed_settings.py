"""Settings that a start changes in a resumed run: reported in log, history.jsonl and MLflow; previous ones are kept.

A checkpoint holds the settings that it was trained with (`settings` of its state.json), so that reported changes are
right after any rollback, copy or submission. An older checkpoint is compared with the config.yaml of its run folder.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dist_transformer.config.credentials import cleaned
from dist_transformer.config.former_keys import current_settings
from dist_transformer.config.loading import flatten, load_config, with_absolute_paths
from dist_transformer.config.metrics import measured_with
from dist_transformer.config.schema import Config
from dist_transformer.config.slurm_schema import CPU_BIND
from dist_transformer.config.yaml12 import dump
from dist_transformer.errors import UserError
from dist_transformer.files import write_text
from dist_transformer.run.folder import RunDir
from dist_transformer.run.records import read_record
from dist_transformer.training.checkpoint.checkpoints import Checkpoint
from dist_transformer.training.run import Run
from dist_transformer.training.run_log import add_to_history

log = logging.getLogger(__name__)

LOSS = {"training.label_smoothing", "training.guided_alignment", "model.dropout", "model.layer_drop"}
"""Settings that change the training loss of the same text."""


@dataclass(frozen=True)
class Changes:
    """Settings of a start compared with those of the checkpoint that it resumes from.

    Attributes:
        former: all settings of the checkpoint.
        by_key: the changed ones: (then, now).
    """

    settings: dict[str, Any]
    since_step: int
    former: dict[str, Any]
    by_key: dict[str, tuple[Any, Any]]
    metric: str

    @property
    def is_other_metric(self) -> bool:
        """True if values of validation.metric from before and after the change cannot be compared."""
        now = measured_with(self.settings, self.metric)
        return bool(self.by_key) and measured_with(self.former, self.metric) != now

    def early_stopping(self, checkpoint: Checkpoint | None) -> dict[str, Any] | None:
        """Returns the state of early stopping to resume from; None: it begins anew."""
        return None if checkpoint is None or self.is_other_metric else checkpoint.state.get("early_stopping")

    def loss_monitor(self, checkpoint: Checkpoint | None) -> dict[str, Any] | None:
        """Returns the state of the loss monitor to resume from; None: it begins anew, as the loss was changed."""
        return None if checkpoint is None or LOSS & self.by_key.keys() else checkpoint.state["loss_monitor"]

    def texts(self) -> list[str]:
        """Returns a line for each changed setting."""
        return [f"{key}: {then} -> {now}" for key, (then, now) in self.by_key.items()]

    def tags(self) -> dict[str, str]:
        """Returns the tag for MLflow that names the changes; {} without any."""
        return {f"changed_since_step_{self.since_step}": "; ".join(self.texts())} if self.by_key else {}


def changes_of(run: Run, checkpoint: Checkpoint | None) -> Changes:
    """Compares the settings of this start with those of the checkpoint; without one there are no changes."""
    settings, metric = settings_of(run.config, run.data.folder), run.config.validation.metric
    former = _former(run.run_dir, checkpoint) if checkpoint is not None else None
    if checkpoint is None or former is None:
        return Changes(settings, 0, {}, {}, metric)
    then, now = flatten(former), flatten(settings)
    keys = [key for key in sorted({*then, *now}) if then.get(key) != now.get(key)]
    return Changes(settings, checkpoint.step, former, {key: (then.get(key), now.get(key)) for key in keys}, metric)


def compare_and_report(run: Run, checkpoint: Checkpoint | None) -> Changes:
    """Returns `changes_of`; rank 0 reports them, and a run that this one was copied from, and keeps the previous
    configuration (collective). To be called before config.yaml is written."""
    changes = run.ranks.from_rank_zero(lambda: changes_of(run, checkpoint))
    if run.ranks.is_rank_zero and changes.by_key:
        _tell(changes, run.run_dir)
    if run.ranks.is_rank_zero and run.config.tracking.enabled and changes.former:
        original = RunDir(Path(changes.former["run"]["root"], changes.former["run"]["name"]))
        is_same = read_record(original.state).get("run_id") == run.run_id
        if is_same and not original.path.samefile(run.run_dir.path):
            words = "tracking   a copy of %s: both are one run in MLflow; tracking.enabled=false keeps this one out"
            log.warning(words, original.path)
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
    """Returns the configuration as plain JSON with absolute paths, without credentials and a job's environment."""
    values = with_absolute_paths(config, prepared).model_dump(mode="json")
    del values["slurm"]["environment"]
    if values["slurm"]["srun"].get("cpu-bind") == CPU_BIND:  # the default
        del values["slurm"]["srun"]["cpu-bind"]
    found: dict[str, Any] = cleaned(values)
    return found


def _former(run_dir: RunDir, checkpoint: Checkpoint) -> dict[str, Any] | None:
    old = checkpoint.state.get("settings")
    try:
        # Settings that are newer than the checkpoint get their defaults.
        config = Config.model_validate(current_settings(old)) if old else load_config(run_dir.config, check_files=False)
    except (UserError, ValidationError) as error:
        log.warning("settings   those until step %d are of another version: not compared (%s)", checkpoint.step, error)
        return None
    return settings_of(config, None)
