"""What a run leaves behind beside checkpoints: metrics files, run.json, its MLflow run. Rank 0 writes them."""

import logging
import math
import os
import platform
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from dist_transformer import __version__
from dist_transformer.config.credentials import without_secrets
from dist_transformer.config.loading import to_yaml, with_absolute_paths
from dist_transformer.config.metrics import is_better
from dist_transformer.config.schema import Config
from dist_transformer.data.manifest import Manifest
from dist_transformer.distributed.group import Ranks
from dist_transformer.errors import MachineError
from dist_transformer.files import is_file, patiently, read_json, write_json, write_text
from dist_transformer.run.folder import RunDir
from dist_transformer.run.metrics_log import MetricsLog, read_records
from dist_transformer.run.records import sound
from dist_transformer.tracking.tracker import Tracker
from dist_transformer.training.checkpoint import checkpoints, retention
from dist_transformer.training.checkpoint.tensor_files import STATE, add_validation, validation_of
from dist_transformer.training.run_tracking import start_tracker
from dist_transformer.training.train_state import RunLog, TrainState

log = logging.getLogger(__name__)


def open_records(
    config: Config,
    run_dir: RunDir,
    ranks: Ranks,
    prepared: Path,
    manifest: Manifest,
    progress: TrainState,
    origin: dict[str, str],
    echo: TextIO | None = None,
) -> tuple[RunLog, Tracker | None]:
    """Begins the records of this start: what an earlier one wrote beyond `progress` is dropped, then MLflow follows.

    Args:
        origin: where the initial weights came from, for MLflow.
        echo: gets each record of metrics.jsonl too.
    """
    write_text(run_dir.config, to_yaml(with_absolute_paths(config, prepared)))
    metrics, samples = MetricsLog(run_dir.metrics, echo), MetricsLog(run_dir.samples)
    metrics.rewind(progress.step)
    samples.rewind(progress.step)
    audit = MetricsLog(run_dir.audit) if config.data.audit else None
    if audit is not None:
        audit.rewind(progress.batches, "batch")
    tracker = (
        start_tracker(config, run_dir, ranks, prepared, manifest, origin, run_id(run_dir))
        if config.tracking.enabled
        else None
    )

    if tracker is not None:
        _tell_of_untold(tracker, run_dir, progress.step, config.validation.metric)

    def checkpoint_saved(step: int, path: Path) -> None:
        metric = config.validation.metric
        with _warned_of_disk(path):
            retention.retain(run_dir, config.checkpoints, metric)
        if tracker is not None:
            _tell(tracker, run_dir, path, metric)
        with _warned_of_disk(path):
            _note_step(run_dir, step)

    def validated_later(step: int, measures: Mapping[str, float]) -> None:
        path = run_dir.checkpoints / checkpoints.folder_name(step)
        with _warned_of_disk(path):
            add_validation(path, measures)
        if tracker is not None:
            _tell(tracker, run_dir, path, config.validation.metric)

    def samples_written(step: int, corpora: list[dict[str, Any]]) -> None:
        for corpus in corpora:
            samples.append("samples", step, corpus)
        if tracker is not None and corpora:
            tracker.samples_written(step)

    def validation_failed(step: int, reason: str) -> None:
        add_to_history(run_dir, "failed validation", step, {"reason": without_secrets(reason)})

    def profile_written(table: Path) -> None:
        if tracker is not None:
            tracker.profile_written(table)

    told = (checkpoint_saved, validated_later, samples_written, validation_failed, profile_written)
    return RunLog(metrics, audit, *told), tracker


def newest_records(run_dir: RunDir) -> dict[str, dict[str, Any]]:
    """The newest record of a log line and of a validation in metrics.jsonl; of step 0 where there is none."""
    newest: dict[str, dict[str, Any]] = {"train": {"step": 0}, "validation": {"step": 0}}
    for record in read_records(run_dir.metrics):
        if record["event"] in newest and record.get("step", -1) >= newest[record["event"]]["step"]:
            newest[record["event"]] = record
    return newest


def note(run_dir: RunDir, ranks: Ranks, state: str, step: int | None = None, reason: str = "") -> None:
    """run.json, what people and scripts ask about a run, and its history; without a step the one noted before."""
    if not ranks.is_rank_zero:
        return
    before = {"starts": 0, "step": 0, **_noted(run_dir)}
    write_json(
        run_dir.state,
        {
            **({"run_id": before["run_id"]} if "run_id" in before else {}),
            "state": state,
            "step": before["step"] if step is None else step,
            "starts": before["starts"] + (state == "running"),
            "num_ranks": ranks.num_ranks,
            "host": platform.node(),
            "slurm_job_id": os.environ.get("SLURM_JOB_ID"),
            "version": __version__,
            "time": round(time.time(), 3),
        },
    )
    step = before["step"] if step is None else step
    if state == "running":
        add_to_history(run_dir, "start", step, _start_of(ranks))
    else:
        add_to_history(run_dir, "end", step, {"state": state, "reason": without_secrets(reason)})


def add_to_history(run_dir: RunDir, event: str, step: int, values: dict[str, Any]) -> None:
    """Adds a record to history.jsonl, which no resume shortens (rank 0). A disk that does not take it is a warning."""
    with _warned_of_disk(run_dir.history):
        history = MetricsLog(run_dir.history)
        history.append(event, step, values)
        history.close()


def is_best_so_far(state: Mapping[str, Any], metric: str) -> bool:
    """Whether the checkpoint of this `state` was validated at its step, better than at any step before."""
    stopping = state.get("early_stopping") or {}
    best = stopping.get("best") if stopping.get("metric") == metric else None
    if best is not None and stopping["best_step"] == state["step"]:
        return True
    # A run's last validation may be at no regular step, and is not in `stopping`.
    value = float((state["validation"] or {}).get(metric, math.nan))
    return math.isfinite(value) and is_better(metric, value, math.nan if best is None else float(best))


def _tell(tracker: Tracker, run_dir: RunDir, path: Path, metric: str) -> None:
    with _warned_of_disk(path):
        measures = validation_of(path)
        state = {**read_json(path / STATE), "validation": measures}
        kept = [one.name for one in checkpoints.saved(run_dir)]
        tracker.checkpoint_saved(state["step"], path, measures, is_best_so_far(state, metric), kept)


def _tell_of_untold(tracker: Tracker, run_dir: RunDir, step: int, metric: str) -> None:
    """The checkpoint that this start goes on from, where the one that wrote it was killed before it could tell of it."""
    path = run_dir.checkpoints / checkpoints.folder_name(step)
    events = read_records(run_dir.tracking_events)
    if path.is_dir() and not any(event["event"] == "checkpoint" and event.get("step") == step for event in events):
        _tell(tracker, run_dir, path, metric)


@contextmanager
def _warned_of_disk(path: Path) -> Iterator[None]:
    """A full disk must not end what goes on in memory, least of all on one rank alone."""
    try:
        yield
    except (OSError, MachineError) as error:
        log.warning("%s: %s", path, error)


def _start_of(ranks: Ranks) -> dict[str, Any]:
    return {
        "num_ranks": ranks.num_ranks,
        "nodes": [os.environ.get("SLURM_JOB_NODELIST") or platform.node()],
        "slurm_job_id": os.environ.get("SLURM_JOB_ID"),
        "restart": int(os.environ.get("SLURM_RESTART_COUNT") or 0),
        "device": ranks.device.type,
        "version": __version__,
    }


def run_id(run_dir: RunDir) -> str:
    """What tells this run from every other; drawn once (rank 0, with the run folder's lock held).

    A folder without run.json but with checkpoints is a copy made by a person: it goes on under their id.
    """
    before = {"state": "starting", "starts": 0, "step": 0, **_noted(run_dir)}
    if "run_id" not in before:
        known = checkpoints.newest_run_id(run_dir)
        before["run_id"] = known or secrets.token_hex(8)
        write_json(run_dir.state, before)
    return str(before["run_id"])


def _note_step(run_dir: RunDir, step: int) -> None:
    write_json(run_dir.state, {**_noted(run_dir), "step": step, "time": round(time.time(), 3)})


def _noted(run_dir: RunDir) -> dict[str, Any]:
    """run.json; empty where there is none, or a damaged one: what it said is in the checkpoints too.

    Raises:
        MachineError: it cannot be read now.
    """
    if not is_file(run_dir.state):
        return {}
    try:
        noted = patiently(run_dir.state, lambda: read_json(run_dir.state))
    except ValueError as error:
        log.warning("%s: is damaged (%s), and written anew", run_dir.state, error)
        return {}
    return sound(noted) if isinstance(noted, dict) else {}
