"""The only door to MLflow: thin calls of MlflowClient. Nothing here touches MLflow's fluent state (active run, global
tracking address): its defaults block for minutes when the server is away, and its exit hooks set a wrong status.

Every call raises ServerTrouble when the server is away or busy, ServerRefused when it will never take the data.
"""

import logging
import math
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from dist_transformer.config.credentials import without_credentials
from dist_transformer.run_dir import replacing
from dist_transformer.tracking.messages import Point, Reference, files_of
from dist_transformer.tracking.spool import (
    Memory,
    ServerRefused,
    ServerTrouble,
    Target,
    local_files_refused,
)

# By default MLflow tries for 4 minutes (server down) or 20 (frozen) and then raises; the shipper does the waiting.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
# Read when mlflow is imported: compute nodes often have no network, and a training run reports to its owner only.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")

from filelock import FileLock
from mlflow import MlflowClient
from mlflow.entities import LoggedModel, Metric, Param, RunTag, ViewType
from mlflow.exceptions import MlflowException
from sqlalchemy.exc import SQLAlchemyError

logger = logging.getLogger(__name__)

# MLflow's own use of SQLAlchemy, said once into every training log; nothing its users can change.
warnings.filterwarnings("ignore", message="The ``noload`` loader strategy is deprecated")

RUN_UID_TAG = "dist_transformer.run_uid"
REPLACES_TAG = "dist_transformer.replaces_run"
REFUSALS = {"INVALID_PARAMETER_VALUE", "ENDPOINT_NOT_FOUND", "NOT_IMPLEMENTED", "RESOURCE_DOES_NOT_EXIST"}
METRICS_A_BATCH = 900
"""The server takes 1,000."""
PARAMETERS_A_BATCH = 100
MOST_RUNS = 10_000
"""Of one search; a sweep has 1,000."""
LONGEST_KEY = 250
LONGEST_PARAMETER = 500
LONGEST_TAG = 5000
LARGEST_UPLOAD_BYTES = 200 * 2**20
DATABASE_LOCK_SECONDS = 60
ENDED = {"FINISHED", "FAILED", "KILLED"}

Item = TypeVar("Item")


class TrackedRun:
    """One run on one server."""

    def __init__(self, client: MlflowClient, run_id: str, experiment_id: str) -> None:
        self._client = client
        self.run_id = run_id
        self.experiment_id = experiment_id

    def log_points(self, points: Sequence[Point]) -> None:
        """Exact repeats (key, time, step, value) are dropped by the server: sending twice is harmless."""
        with translated_errors():
            self._log_points(points, None)

    def log_parameters(self, parameters: Mapping[str, str]) -> None:
        """Log new ones; a changed one becomes the tag param_drift.<key>: MLflow refuses to change parameters."""
        cut = {valid_key(key): value[:LONGEST_PARAMETER] for key, value in parameters.items()}
        with translated_errors():
            stored = self._client.get_run(self.run_id).data.params
            for chunk in chunks([Param(k, v) for k, v in cut.items() if k not in stored], PARAMETERS_A_BATCH):
                self._client.log_batch(self.run_id, params=chunk, synchronous=True)
        changed = {key: value for key, value in cut.items() if stored.get(key, value) != value}
        self.set_tags({f"param_drift.{key}": f"{stored[key]} -> {value}" for key, value in changed.items()})

    def set_tags(self, tags: Mapping[str, str]) -> None:
        entities = [RunTag(valid_key(key), value[:LONGEST_TAG]) for key, value in tags.items()]
        with translated_errors():
            for chunk in chunks(entities, PARAMETERS_A_BATCH):
                self._client.log_batch(self.run_id, tags=chunk, synchronous=True)

    def set_status(self, status: str, time_ms: int) -> None:
        """RUNNING, SCHEDULED (will go on), FINISHED, FAILED or KILLED; the last three with the time of the end."""
        with translated_errors():
            if status in ENDED:
                self._client.set_terminated(self.run_id, status=status, end_time=time_ms)
            else:
                self._client.update_run(self.run_id, status=status)

    def statuses_with_tag(self, tag: str, value: str) -> list[str]:
        """The status of every run of the experiment that has this tag."""
        with translated_errors():
            found = self._client.search_runs([self.experiment_id], f"tags.`{tag}` = '{value}'", max_results=MOST_RUNS)
            return [run.info.status for run in found]

    def log_text(self, text: str, name: str) -> None:
        with translated_errors(), local_files_refused(), artifact_errors():
            self._client.log_text(self.run_id, text, name)

    def log_reference(self, reference: Reference) -> None:
        """An external logged model, made once: one that is complete on the server is left as it is."""
        with translated_errors():
            model = self._find_reference(reference) or self._client.create_logged_model(
                self.experiment_id,
                name=reference.name,
                source_run_id=self.run_id,
                params=dict(reference.parameters),
                tags={"mlflow.model.isExternal": "true"},
                model_type=reference.kind,
            )
            if model.status != "READY":
                self._log_points(reference.points, model.model_id)
                self._client.finalize_logged_model(model.model_id, "READY")

    def log_model_folder(self, folder: Path) -> None:
        """Upload a model folder below LARGEST_UPLOAD_BYTES; of a larger one only its configuration and README."""
        with translated_errors(), local_files_refused(), artifact_errors():
            if sum(file.stat().st_size for file in files_of(folder)) <= LARGEST_UPLOAD_BYTES:
                self._client.log_artifacts(self.run_id, str(folder), "model")
                return
            for name in ("config.json", "README.md"):
                if (folder / name).exists():
                    self._client.log_artifact(self.run_id, str(folder / name), "model")

    def _log_points(self, points: Sequence[Point], model_id: str | None) -> None:
        finite = (point for point in points if math.isfinite(point.value))
        metrics = [Metric(valid_key(p.key), p.value, p.time_ms, p.step, model_id=model_id) for p in finite]
        for chunk in chunks(metrics, METRICS_A_BATCH):
            self._client.log_batch(self.run_id, metrics=chunk, synchronous=True)

    def _find_reference(self, reference: Reference) -> LoggedModel | None:
        query = f"name = '{reference.name}' AND source_run_id = '{self.run_id}'"
        found = self._client.search_logged_models([self.experiment_id], filter_string=query)
        same = (model for model in found if dict(model.params) == dict(reference.parameters))
        return next(same, None)


def open_run(target: Target, memory: Memory) -> TrackedRun:
    """The run of this run folder on the server: the one remembered, else the one with our tag, else a new one."""
    with translated_errors():
        client = _client(target.uri)
        found = _run_by_id(client, memory.run_id) if memory.run_id else None
        if found is None:
            experiment_id = _experiment_id(client, target)
            found = _run_by_uid(client, experiment_id, memory.run_uid) or _new_run(client, experiment_id, memory)
        if found.info.lifecycle_stage == "deleted":
            logger.warning("MLflow run %s had been deleted on the server and is restored", found.info.run_id)
            client.restore_run(found.info.run_id)
        return TrackedRun(client, found.info.run_id, found.info.experiment_id)


@contextmanager
def artifact_errors() -> Iterator[None]:
    """Around uploads: a store's client (boto3, Azure, ...) has errors of its own, and may not be installed."""
    try:
        yield
    except (MlflowException, OSError, SQLAlchemyError, ServerTrouble):
        raise
    except ImportError as error:
        raise ServerRefused(f"the artifact store needs a package that is not installed: {error}") from None
    except Exception as error:  # noqa: BLE001
        raise ServerTrouble(explanation(f"the artifact store: {type(error).__name__}: {error}")) from None


@contextmanager
def translated_errors() -> Iterator[None]:
    """Turns the errors of MLflow, its connections and its database into ServerTrouble; others are bugs and pass."""
    try:
        yield
    except MlflowException as error:
        kind = ServerRefused if error.error_code in REFUSALS else ServerTrouble
        raise kind(explanation(str(error))) from None
    except (OSError, SQLAlchemyError) as error:
        raise ServerTrouble(explanation(f"{type(error).__name__}: {error}")) from None


def explanation(message: str) -> str:
    """The server's answer on one line without credentials, with the remedy where the cause is known."""
    answer = " ".join(without_credentials(message).split())[:500]
    if "Invalid Host header" in message:
        answer += " (start the server with --allowed-hosts 'NAME,NAME:*', NAME being the host of tracking.uri)"
    return answer


def valid_key(key: str) -> str:
    """A key MLflow accepts: letters, digits, _ - . space : / and at most LONGEST_KEY of them."""
    return re.sub(r"[^\w\-. :/]", "_", key)[:LONGEST_KEY]


def chunks(items: Sequence[Item], size: int) -> Iterator[list[Item]]:
    rest = iter(items)
    while chunk := list(islice(rest, size)):
        yield chunk


def _client(uri: str) -> MlflowClient:
    if uri.startswith("sqlite:///"):
        _create_database(Path(uri.removeprefix("sqlite:///").split("?")[0]))
    return MlflowClient(tracking_uri=uri)


def _create_database(database: Path) -> None:
    """Make a missing sqlite store, whole or not at all: two makers at once, or one killed half-way, would break it."""
    if database.exists():
        return
    database.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{database}.lock", timeout=DATABASE_LOCK_SECONDS):
        if not database.exists():
            with replacing(database) as temporary:
                MlflowClient(tracking_uri=f"sqlite:///{temporary}").search_experiments(max_results=1)


def _experiment_id(client: MlflowClient, target: Target) -> str:
    experiment = client.get_experiment_by_name(target.experiment)
    if experiment is None:
        served = target.uri.startswith(("http://", "https://", "databricks"))
        location = None if served else target.artifact_root.resolve().as_uri()
        return str(client.create_experiment(target.experiment, artifact_location=location))
    if experiment.lifecycle_stage == "deleted":
        logger.warning("MLflow experiment %r had been deleted on the server: restored", target.experiment)
        client.restore_experiment(experiment.experiment_id)
    return str(experiment.experiment_id)


def _run_by_id(client: MlflowClient, run_id: str) -> Any | None:
    try:
        return client.get_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        logger.warning("MLflow run %s is not on the server any more", run_id)
        return None


def _run_by_uid(client: MlflowClient, experiment_id: str, run_uid: str) -> Any | None:
    query = f"tags.`{RUN_UID_TAG}` = '{run_uid}'"
    found = client.search_runs([experiment_id], query, run_view_type=ViewType.ALL, max_results=1)
    return found[0] if found else None


def _new_run(client: MlflowClient, experiment_id: str, memory: Memory) -> Any:
    tags = {RUN_UID_TAG: memory.run_uid} | ({REPLACES_TAG: memory.run_id} if memory.run_id else {})
    return client.create_run(experiment_id, int(memory.created * 1000), tags, memory.run_name)
