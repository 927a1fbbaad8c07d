"""What a run leaves behind beside checkpoints: metrics files, run.json, its MLflow run. Rank 0 writes them."""

import logging
import os
import platform
import secrets
import time
from pathlib import Path
from typing import Any

from dist_transformer import __version__
from dist_transformer.cli.arguments import with_absolute_paths
from dist_transformer.config.loading import to_yaml
from dist_transformer.config.models import Config
from dist_transformer.data.manifest import Manifest
from dist_transformer.distributed import Ranks
from dist_transformer.run_dir import RunDir, read_json, write_json, write_text
from dist_transformer.tracking.metrics_log import MetricsLog, read_records
from dist_transformer.tracking.tracker import Tracker
from dist_transformer.training import checkpoints
from dist_transformer.training.records import Journal, Progress
from dist_transformer.training.state_files import STATE

log = logging.getLogger(__name__)


def open_records(
    config: Config,
    run_dir: RunDir,
    ranks: Ranks,
    prepared: Path,
    manifest: Manifest,
    progress: Progress,
    origin: dict[str, str],
) -> tuple[Journal, Tracker | None]:
    """Begins the records of this start: what an earlier one wrote beyond `progress` is dropped, then MLflow follows.

    `origin`: where the initial weights came from, for MLflow.
    """
    write_text(run_dir.config, to_yaml(with_absolute_paths(config, prepared)))
    metrics = MetricsLog(run_dir.metrics)
    metrics.rewind(progress.step)
    audit = MetricsLog(run_dir.audit) if config.data.audit else None
    if audit is not None:
        audit.rewind(progress.batches, "batch")
    tracker = _start_tracker(config, run_dir, ranks, manifest, origin) if config.tracking.enabled else None

    def checkpoint_saved(step: int, path: Path) -> None:
        try:
            checkpoints.retain(run_dir, config.checkpoints, config.divergence.patience_steps)
            _note_step(run_dir, step)
            if tracker is not None:
                tracker.checkpoint_saved(step, path, read_json(path / STATE)["validation"] or {})
        except OSError as error:  # a full disk must not end what goes on in memory
            log.warning("after checkpoint %s: %s", path.name, error)

    return Journal(metrics, audit, checkpoint_saved), tracker


def _start_tracker(
    config: Config, run_dir: RunDir, ranks: Ranks, manifest: Manifest, origin: dict[str, str]
) -> Tracker:
    tracker = Tracker(run_dir, config.tracking, config.run.name, Path(config.run.root))
    tags = {
        "languages": f"{config.data.source_language}-{config.data.target_language}",
        "num_ranks": str(ranks.num_ranks),
        "device": ranks.device.type,
        "zero_stage": str(config.training.zero_stage),
        "precision": config.training.precision,
        "data_digest": manifest.digest,
        "version": __version__,
        **origin,
        **{f"slurm.{key}": os.environ[name] for key, name in _SLURM_TAGS.items() if name in os.environ},
    }
    tracker.start(_flat(config.model_dump(mode="json")), tags, to_yaml(config))
    return tracker


_SLURM_TAGS = {"job_id": "SLURM_JOB_ID", "nodes": "SLURM_JOB_NODELIST", "restart": "SLURM_RESTART_COUNT"}


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """{"optimizer": {"beta1": 0.9}} -> {"optimizer.beta1": "0.9"}; what is not given is left out."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        elif value is not None:
            flat[prefix + key] = str(value)
    return flat


def newest_steps(run_dir: RunDir) -> dict[str, int]:
    """The newest step of each event in metrics.jsonl; 0 where there is none."""
    newest = {"train": 0, "validation": 0}
    for record in read_records(run_dir.metrics):
        newest[record["event"]] = max(newest[record["event"]], record["step"])
    return newest


def note(run_dir: RunDir, ranks: Ranks, state: str, step: int | None = None) -> None:
    """run.json: what people and scripts ask about a run; without a step the one noted before."""
    if not ranks.is_first:
        return
    before = read_json(run_dir.state) if run_dir.state.is_file() else {"starts": 0, "step": 0}
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


def run_id(run_dir: RunDir) -> str:
    """What tells this run from every other; drawn once (rank 0, with the run folder's lock held).

    A folder without run.json but with checkpoints is a copy made by a person: it goes on under their id.
    """
    before = read_json(run_dir.state) if run_dir.state.is_file() else {"state": "starting", "starts": 0, "step": 0}
    if "run_id" not in before:
        known = checkpoints.newest_run_id(run_dir)
        before["run_id"] = known or secrets.token_hex(8)
        write_json(run_dir.state, before)
    return str(before["run_id"])


def _note_step(run_dir: RunDir, step: int) -> None:
    write_json(run_dir.state, {**read_json(run_dir.state), "step": step, "time": round(time.time(), 3)})
