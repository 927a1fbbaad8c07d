"""Tells MLflow how a start of a run ended that could not say so itself: it was killed, or its node is gone."""

import importlib
from pathlib import Path

from dist_transformer.config.models import TrackingConfig
from dist_transformer.run_dir import RunDir
from dist_transformer.tracking.metrics_log import read_records
from dist_transformer.tracking.shipper import BackgroundShipper, Shipper
from dist_transformer.tracking.spool import Memory, add_event
from dist_transformer.tracking.tracker import memory_of, target_of, uid_of

_DOOR = "dist_transformer.tracking.mlflow_door"


def status_said(run_dir: RunDir) -> str | None:
    """The status that MLflow was told last, or will be as soon as it answers; None: the run was never followed."""
    said = None
    for event in read_records(run_dir.tracking_events):
        if event["event"] in ("start", "status"):
            said = str(event.get("status", "RUNNING"))
    return said


def settle(run_dir: RunDir, status: str, settings: TrackingConfig, default_store: Path, seconds: float) -> bool:
    """Sets the status, and sends all that has not arrived, for at most so many seconds; False: the rest stays here.

    Nobody may train in the run folder meanwhile.

    Raises:
        OSError: the run folder cannot be written.
    """
    if status_said(run_dir) != status:
        add_event(run_dir.tracking_events, "status", {"status": status})
    if has_arrived(run_dir):
        return True
    importlib.import_module(_DOOR)  # seconds on a busy machine, which are not the server's
    shipper = BackgroundShipper(Shipper(run_dir, target_of(settings, default_store), _memory(run_dir)))
    shipper.start()
    return shipper.close(seconds)


def has_arrived(run_dir: RunDir) -> bool:
    """Whether MLflow has taken all that it was told of starts, checkpoints and ends."""
    return _memory(run_dir).spool_offset == run_dir.tracking_events.stat().st_size


def _memory(run_dir: RunDir) -> Memory:
    return memory_of(run_dir, run_dir.name, uid_of(run_dir))
