"""What training calls on rank 0 to have a run followed in MLflow. Every call writes a line and returns.

A start in four calls; between them training appends to metrics.jsonl, which the shipper reads:

    tracker = Tracker(run_dir, config.tracking, config.run.name, config.run.root)
    tracker.start(parameters, tags, config_text)
    tracker.checkpoint_saved(1000, path, {"validation_loss": 2.31})
    tracker.close("FINISHED")
"""

import logging
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from dist_transformer.config.credentials import without_credentials
from dist_transformer.config.models import TrackingConfig
from dist_transformer.errors import UserError
from dist_transformer.run_dir import RunDir
from dist_transformer.tracking.metrics_log import read_records
from dist_transformer.tracking.shipper import BackgroundShipper, Delivery, Shipper
from dist_transformer.tracking.spool import ServerTrouble, Target, add_event, load_memory
from dist_transformer.tracking.sweep_parent import run_name_of, store_folder

logger = logging.getLogger(__name__)

Status = Literal["FINISHED", "FAILED", "KILLED", "SCHEDULED"]
"""SCHEDULED: stopped with everything saved, to be started again."""

SYNC_ATTEMPTS = 3
SYNC_WAIT_SECONDS = 1.0


class Tracker:
    """One run folder's voice to MLflow. No call waits for the server but `close`, and that one for a limited time."""

    def __init__(self, run_dir: RunDir, settings: TrackingConfig, run_name: str, default_store: Path) -> None:
        """`default_store`: the folder of runs, whose mlflow.db is used when `settings.uri` names no server."""
        self._run_dir = run_dir
        self._close_seconds = settings.close_seconds
        self._memory = load_memory(run_dir.tracking, run_name_of(run_dir, run_name))
        self._shipper = BackgroundShipper(Shipper(run_dir, target_of(settings, default_store), self._memory))

    @property
    def run_id(self) -> str | None:
        """MLflow's id of this run; None until the server has answered for the first time."""
        return self._memory.run_id

    def start(self, parameters: Mapping[str, str], tags: Mapping[str, str], config_text: str) -> None:
        """Begin to follow: at every start of the run folder, once. The run on the server is made in the background."""
        self._add(
            "start",
            parameters={key: without_credentials(value) for key, value in parameters.items()},
            tags={key: without_credentials(value) for key, value in tags.items()},
            config=without_credentials(config_text),
        )
        self._shipper.start()

    def checkpoint_saved(self, step: int, path: Path, metrics: Mapping[str, float]) -> None:
        """A reference to a checkpoint, found in MLflow by its scores; nothing is uploaded."""
        self._add("checkpoint", step=step, path=str(path.absolute()), metrics=finite(metrics))

    def model_written(self, folder: Path, metrics: Mapping[str, float]) -> None:
        """The model folder that people use: uploaded when it is small, else its path and digest."""
        step = max((record["step"] for record in read_records(self._run_dir.metrics)), default=0)
        self._add("model", step=step, path=str(folder.absolute()), metrics=finite(metrics))

    def close(self, status: Status) -> None:
        """Wait at most `close_seconds` for the server; what it did not take stays in the run folder for a later job."""
        self._add("status", status=status)
        if not self._shipper.close(self._close_seconds):
            hint = f"dist-transformer track sync {self._run_dir.path}"
            logger.warning("MLflow did not take everything in %d s. To send the rest: %s", self._close_seconds, hint)

    def _add(self, event: str, **details: Any) -> None:
        try:
            add_event(self._run_dir.tracking_events, event, details)
        except OSError as error:
            logger.warning("the tracking event %r is lost, its file cannot be written: %s", event, error)


def sync(run_dir: RunDir, settings: TrackingConfig, default_store: Path) -> Delivery:
    """Send everything of a run folder that its server does not have yet, in the foreground.

    Raises UserError with the server's answer when it does not take it.
    """
    target = target_of(settings, default_store)
    shipper = Shipper(run_dir, target, load_memory(run_dir.tracking, run_name_of(run_dir, run_dir.name)))
    for attempt in range(1, SYNC_ATTEMPTS + 1):
        try:
            return shipper.deliver()
        except ServerTrouble as trouble:
            if attempt == SYNC_ATTEMPTS:
                raise UserError(
                    f"MLflow at {without_credentials(target.uri)} does not take the history of {run_dir.path}.\n"
                    f"Its answer: {trouble}\n"
                    "Nothing is lost: check the address (tracking.uri) and the server, then run the command again."
                ) from trouble
        time.sleep(SYNC_WAIT_SECONDS)
    raise AssertionError("the last attempt returns or raises")


def target_of(settings: TrackingConfig, default_store: Path) -> Target:
    """`settings.uri`, or MLflow's own variable (it may hold credentials: it is only used, never written), or sqlite."""
    uri = settings.uri or os.environ.get("MLFLOW_TRACKING_URI") or store_uri(default_store)
    return Target(uri, settings.experiment, store_folder(default_store) / "mlartifacts")


def store_uri(root: Path) -> str:
    """The store of the runs in `root` that needs no server: one sqlite file."""
    return f"sqlite:///{store_folder(root).resolve() / 'mlflow.db'}"


def ui_command(root: Path) -> list[str]:
    """The command that shows the runs of `root` in a browser."""
    return [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", store_uri(root)]


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    return {key: float(value) for key, value in metrics.items() if math.isfinite(value)}
