"""A real MLflow server that a test can start, kill and start again, and what is stored in it."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from mlflow import MlflowClient

from dist_transformer.config.models import TrackingConfig
from dist_transformer.run_dir import RunDir, read_json
from dist_transformer.tracking.metrics_log import MetricsLog, read_records
from dist_transformer.tracking.tracker import Tracker

PATIENCE_SECONDS = 60.0
Curve = list[tuple[int, float, int]]
"""(step, value, unix time in milliseconds), in the order of steps."""


class Server:
    """`mlflow server` on a free port of this machine over one sqlite file."""

    def __init__(self, folder: Path, empty_database: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None
        shutil.copy(empty_database, folder / "server.db")

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{self.folder}/server.db"]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        wait_until(self._answers)

    def kill(self) -> None:
        """End it as a power loss would."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def stop(self) -> None:
        if self._process is not None:
            self.kill()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.05)


def tracker_of(run_dir: RunDir, uri: str | None, close_seconds: int = 30) -> Tracker:
    return Tracker(run_dir, settings_of(uri, close_seconds), "a run", run_dir.path.parent)


def settings_of(uri: str | None, close_seconds: int = 30) -> TrackingConfig:
    return TrackingConfig.model_validate({"uri": uri, "close_seconds": close_seconds})


def train(log: MetricsLog, steps: range) -> None:
    """What the training loop writes: a record each step, a validation every fifth. Values depend on the step only."""
    for step in steps:
        log.append("train", step, {"loss": 10 / step, "learning_rate": step * 1e-5, "batch_digest": f"digest {step}"})
        if step % 5 == 0:
            log.append("validation", step, {"loss": 11 / step})


def run_id_of(run_dir: RunDir) -> str:
    return str(read_json(run_dir.tracking)["run_id"])


def sent_step(run_dir: RunDir) -> int:
    """The newest training step that has arrived according to tracking.json."""
    return int(read_json(run_dir.tracking)["sent"].get("train", 0)) if run_dir.tracking.exists() else 0


def curves_on_server(uri: str, run_id: str, events: tuple[str, ...] = ("train", "validation")) -> dict[str, Curve]:
    client = MlflowClient(tracking_uri=uri)
    keys = [key for key in client.get_run(run_id).data.metrics if key.split("/")[0] in events]
    return {key: [(m.step, m.value, m.timestamp) for m in client.get_metric_history(run_id, key)] for key in keys}


def curves_in_file(run_dir: RunDir) -> dict[str, Curve]:
    curves: dict[str, Curve] = {}
    for record in read_records(run_dir.metrics):
        for key, value in record.items():
            if key not in ("event", "step", "time", "batch_digest"):
                point = (record["step"], value, int(record["time"] * 1000))
                curves.setdefault(f"{record['event']}/{key}", []).append(point)
    return curves


def store_of(run_dir: RunDir) -> str:
    """The address of the store without a server."""
    return f"sqlite:///{run_dir.path.parent}/mlflow.db"
