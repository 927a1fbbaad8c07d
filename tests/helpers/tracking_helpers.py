"""What the tests of tracking share: what training writes, and what of it is on a server."""

import math
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

from mlflow import MlflowClient

from dist_transformer.config.schema import TrackingConfig
from dist_transformer.files import read_json
from dist_transformer.run.folder import RunDir
from dist_transformer.run.metrics_log import MetricsLog, read_records
from dist_transformer.tracking import tracker
from dist_transformer.tracking.tracker import Status, Tracker

Curve = list[tuple[int, float, int]]
"""(step, value, unix time in milliseconds), in the order of steps."""


class TimedTracker(Tracker):
    """One that waits so long for the server at its end."""

    close_seconds = 240

    def close(self, status: Status) -> None:
        with patch.object(tracker, "CLOSE_SECONDS", self.close_seconds):
            super().close(status)


def tracker_of(run_dir: RunDir, uri: str | None, close_seconds: int = TimedTracker.close_seconds) -> Tracker:
    run_id = uuid.uuid5(uuid.NAMESPACE_URL, str(run_dir.path)).hex
    timed = TimedTracker(run_dir, settings_of(uri), "a run", run_dir.path.parent, run_id)
    timed.close_seconds = close_seconds
    return timed


def settings_of(uri: str | None) -> TrackingConfig:
    return TrackingConfig.model_validate({"uri": uri})


def started(run_dir: RunDir, parameters: dict[str, str] | None = None) -> Tracker:
    """A start of a run on its sqlite store, with these parameters."""
    tracker = tracker_of(run_dir, None)
    tracker.start(parameters or {}, {"slurm.job_id": "7"}, "model: base\n")
    return tracker


def train(log: MetricsLog, steps: range) -> None:
    """What the training loop writes: a record each step, a validation every fifth. Values depend on the step only."""
    for step in steps:
        log.append("train", step, {"loss": 10 / step, "learning_rate": step * 1e-5, "batch_digest": f"digest {step}"})
        if step % 5 == 0:
            log.append("validation", step, {"loss": 11 / step})


def train_while(log: MetricsLog, tracker: Tracker, first: int, trouble: Callable[[], bool]) -> list[float]:
    """Trains from step `first` on as long as `trouble` lasts and for 50 steps at least; the seconds of each step's calls."""
    seconds: list[float] = []
    while len(seconds) < 50 or trouble():
        step = first + len(seconds)
        began = time.perf_counter()
        train(log, range(step, step + 1))
        if step % 500 == 0:
            save_checkpoint(tracker, log.path.parent, step)
        seconds.append(time.perf_counter() - began)
        time.sleep(0.02)  # what else a step does
    return seconds


def save_checkpoint(tracker: Tracker, run: Path, step: int) -> None:
    """What training says of a checkpoint; its only one, and so its best."""
    name = f"step_{step:08d}"
    tracker.checkpoint_saved(step, run / "checkpoints" / name, {"loss": 10 / step}, is_best=True, kept=[name])


def assert_never_held_up(seconds: list[float]) -> None:
    """Generous: the machine may be busy. The exact cost is measured by benchmarks/tracking.py."""
    ordered = sorted(seconds)
    assert ordered[len(ordered) // 2] < 0.001
    assert ordered[len(ordered) * 95 // 100] < 0.05


def assert_complete(uri: str, run_dir: RunDir) -> None:
    """Every step is on the server once, in order, and all curves are those of metrics.jsonl."""
    stored, written = curves_on_server(uri, run_id_of(run_dir)), curves_in_file(run_dir)
    assert stored == written
    for curve in stored.values():
        steps = [step for step, _, _ in curve]
        assert steps == sorted(set(steps))


def run_id_of(run_dir: RunDir) -> str:
    return str(read_json(run_dir.tracking)["run_id"])


def sent_step(run_dir: RunDir) -> int:
    """The newest training step that has arrived according to tracking.json."""
    return int(read_json(run_dir.tracking)["sent"].get("train", 0)) if run_dir.tracking.exists() else 0


def curves_on_server(
    uri: str, run_id: str, events: tuple[str, ...] = ("train", "validation", "system", "goodput")
) -> dict[str, Curve]:
    client = MlflowClient(tracking_uri=uri)
    keys = [key for key in client.get_run(run_id).data.metrics if key.split("/")[0] in events]
    return {key: [(m.step, m.value, m.timestamp) for m in client.get_metric_history(run_id, key)] for key in keys}


def curves_in_file(run_dir: RunDir) -> dict[str, Curve]:
    curves: dict[str, Curve] = {}
    for record in read_records(run_dir.metrics):
        for key, value in record.items():
            if key not in ("step", "time") and isinstance(value, int | float) and math.isfinite(value):
                point = (record["step"], value, int(record["time"] * 1000))
                curves.setdefault(f"{record['event']}/{key}", []).append(point)
    return curves


def store_of(run_dir: RunDir) -> str:
    """The address of the store without a server."""
    return f"sqlite:///{run_dir.path.parent}/mlflow.db"
