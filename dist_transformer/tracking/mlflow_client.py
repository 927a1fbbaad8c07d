"""Adapter of MLflow: thin calls of MlflowClient. Nothing here touches MLflow's fluent state (active run, global
tracking address): its defaults block for minutes while the server is down, and its exit hooks set a wrong status.

Every call raises ServerTrouble if the server is down or busy, ServerRefused if it will never accept the data.
"""

import hashlib
import json
import logging
import math
import os
import re
import sqlite3
import warnings
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from dist_transformer.config.credentials import without_secrets
from dist_transformer.files import replacing
from dist_transformer.tracking import outbox

# By default MLflow retries for 4 minutes (server down) or 20 (frozen) and then raises; here the shipper retries.
# An empty variable counts as unset.
os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = os.environ.get("MLFLOW_HTTP_REQUEST_MAX_RETRIES") or "0"
os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = os.environ.get("MLFLOW_HTTP_REQUEST_TIMEOUT") or "10"
# Read when mlflow is imported: compute nodes often have no network, and a training run reports to its owner only.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
# Otherwise the end of a run prints the server's address, with the user and password that it may hold.
os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
# Otherwise a model gets the pyproject.toml of the current folder.
os.environ.setdefault("MLFLOW_UV_AUTO_DETECT", "false")
if os.path.expanduser("~") == "~":  # a user without a home, as in containers: the import of mlflow raises RuntimeError
    os.environ["HOME"] = "/nonexistent"

from filelock import FileLock
from google.protobuf.json_format import ParseError
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, Run, RunTag, ViewType
from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_TIMEOUT
from mlflow.exceptions import MlflowException
from sqlalchemy.exc import SQLAlchemyError

logger = logging.getLogger(__name__)

logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # it prints the traceback of what it raises too
# Caused by MLflow's use of SQLAlchemy and printed into every training log; its users cannot change it.
warnings.filterwarnings("ignore", message="The ``noload`` loader strategy is deprecated")

RUN_UID_TAG = "dist_transformer.run_uid"
REPLACES_TAG = "dist_transformer.replaces_run"
NOTE_TAG, OUR_NOTE_TAG = "mlflow.note.content", "dist_transformer.note_sha256"
TABLES_TAG = "mlflow.loggedArtifacts"
REFUSALS = ("ENDPOINT_NOT_FOUND", "NOT_IMPLEMENTED", "RESOURCE_DOES_NOT_EXIST")
KINDS_OF_ERRORS = {"INVALID_PARAMETER_VALUE": outbox.NotValid, **dict.fromkeys(REFUSALS, outbox.ServerRefused)}
REFUSING_STATUSES = {400, 404, 405, 413}
REMEDIES = {
    "Invalid Host header": "start the server with --allowed-hosts 'NAME,NAME:*', NAME being the host of tracking.uri",
    "CERTIFICATE_VERIFY_FAILED": "set MLFLOW_TRACKING_SERVER_CERT_PATH to a file with the certificate to be trusted",
    r"code 40[13]|40[13] Client Error|UNAUTHENTICATED|PERMISSION_DENIED": "set MLFLOW_TRACKING_USERNAME and "
    "MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, to what the server accepts",
    r"logged-models\S* failed with error code 404": "a server older than MLflow 3 has none",
    r"too many 5\d\d error responses": "the server's own log says why; perhaps its disk is full or its database is away",
    "^ModuleNotFoundError": "install it in the environment that trains, or give another address",
    "database is locked": "another process has held mlflow.db for long; see `A server for a team` in docs/mlflow.md",
    "readonly database": "was mlflow.db moved (a new start, or track sync, opens it again), or is it another user's (chmod g+w)?",
}
"""Remedies by a pattern in the server's answer."""
LOCK_SECONDS = 60
_PATHS = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
)
"""Tables and columns with the absolute path of an artifact."""
_NO_SERVER = (
    r"ConnectionPool\(host='(?P<host>[^']+)', port=(?P<port>\d+)\).*"
    r"(?P<cause>Connection refused|No route to host|Name or service not known|Network is unreachable|timed out)"
)
PARAMETERS_A_BATCH = 100
LONGEST_KEY = 250
LONGEST_PARAMETER = 500
"""Length that every server accepts; if a value is longer, the artifact parameters.json has all values uncut."""
LONGEST_TAG = 5000
CONTEXT_TAG = "mlflow.data.context"
LONGEST_DIGEST = 36
"""Length limit of MLflow; the dataset's profile has the full digest."""
_warn_once = cache(logger.warning)


class TrackedRun:
    """A run on an MLflow server."""

    def __init__(self, client: MlflowClient, run: Run) -> None:
        self.client = client
        self.run_id: str = run.info.run_id
        self.experiment_id: str = run.info.experiment_id
        self._newest_steps: dict[str, int] = {metric.key: metric.step for metric in run.data.to_proto().metrics}

    def newest_step(self, event: str) -> int:
        """Newest step of this event's curves when the run was opened; -1 without a point."""
        return max((step for key, step in self._newest_steps.items() if key.startswith(f"{event}/")), default=-1)

    def log_points(self, points: Sequence[outbox.Point]) -> None:
        """Sends the points after the newest steps that the server had when the run was opened.

        So no step is stored twice if an answer was lost, even if training was rolled back meanwhile.
        """
        fresh = [point for point in points if point.step > self._newest_steps.get(valid_key(point.key), -1)]
        self.log_all_points(fresh)

    def lost(self, points: Iterable[outbox.Point]) -> list[outbox.Point]:
        """The points that the server has not, of curves and steps that it had when the run was opened.

        Not those of steps that were trained again: of an attempt that was further before, the server has later steps.
        """
        known = dict[str, tuple[list[int], list[int]]]()  # steps, and the earliest time of each and those after it
        for key in self._newest_steps:
            with translated_errors():
                curve = sorted(self.client.get_metric_history(self.run_id, key), key=lambda metric: metric.step)
            times = accumulate((metric.timestamp for metric in reversed(curve)), min)
            known[key] = [metric.step for metric in curve], [*times][::-1]
        newest = {key: self.newest_step(key.split("/")[0]) for key in known}  # later steps are trained meanwhile
        return [p for p in points if p.step <= newest.get(key := valid_key(p.key), -1) and _lacks(*known[key], p)]

    def remove_doubles(self, run_id: str) -> None:
        """Deletes empty runs with our tag: a request to create a run may be executed after we gave up on it."""
        with translated_errors():
            for run in self.client.search_runs([self.experiment_id], f"tags.`{RUN_UID_TAG}` = '{run_id}'"):
                if run.info.run_id != self.run_id and not run.data.metrics and not run.data.params:
                    self.client.delete_run(run.info.run_id)

    def log_parameters(self, parameters: Mapping[str, str]) -> None:
        """Logs new parameters; a changed one becomes the tag param_drift.<key>: MLflow refuses to change parameters."""
        cut = {valid_key(key): value[:LONGEST_PARAMETER] for key, value in parameters.items()}
        with translated_errors():
            stored = self.client.get_run(self.run_id).data.params
            self._log("params", [Param(k, v) for k, v in cut.items() if k not in stored], PARAMETERS_A_BATCH)
        changed = {key: value for key, value in cut.items() if stored.get(key, value) != value}
        self.set_tags({f"param_drift.{key}": f"{stored[key]} -> {value}" for key, value in changed.items()})

    def log_long_parameters(self, parameters: Mapping[str, str]) -> None:
        """Uploads all parameters uncut, as a file, if one was cut."""
        if any(len(value) > LONGEST_PARAMETER for value in parameters.values()):
            self.log_text(json.dumps(dict(parameters), indent=1, ensure_ascii=False), "parameters.json")

    def set_tags(self, tags: Mapping[str, str]) -> None:
        entities = [RunTag(valid_key(key), value[:LONGEST_TAG]) for key, value in tags.items()]
        with translated_errors():
            self._log("tags", entities, PARAMETERS_A_BATCH)

    def set_status(self, status: str, time_ms: int) -> None:
        """Sets RUNNING, SCHEDULED (to be resumed), FINISHED, FAILED or KILLED; the last three with the end time."""
        with translated_errors():
            if status in ("FINISHED", "FAILED", "KILLED"):
                self.client.set_terminated(self.run_id, status=status, end_time=time_ms)
            else:
                self.client.update_run(self.run_id, status=status)

    def log_text(self, text: str, name: str) -> None:
        with translated_errors(), outbox.local_files_refused(), artifact_errors():
            self.client.log_text(self.run_id, text, name)

    def log_table(self, rows: Iterable[Sequence[Any]], columns: Sequence[str], name: str) -> None:
        """Replaces the table `name` (.json): MLflow's own log_table would append to it."""
        self.log_text(json.dumps({"columns": columns, "data": list(rows)}, ensure_ascii=False), name)
        with translated_errors():
            tables = json.loads(self.client.get_run(self.run_id).data.tags.get(TABLES_TAG, "[]"))
        entry = {"path": name, "type": "table"}
        if entry not in tables:
            self.set_tags({TABLES_TAG: json.dumps([*tables, entry])})

    def log_file(self, file: Path) -> None:
        with translated_errors(), outbox.local_files_refused(file), artifact_errors():
            self.client.log_artifact(self.run_id, str(file))

    def describe(self, text: str) -> None:
        """Sets the description on the run's page; one that a user has changed is kept."""
        with translated_errors():
            tags = self.client.get_run(self.run_id).data.tags
        found = tags.get(NOTE_TAG, "")
        if not found or _digest(found) == tags.get(OUR_NOTE_TAG):
            self.set_tags({NOTE_TAG: text, OUR_NOTE_TAG: _digest(text)})

    def log_all_points(self, points: Sequence[outbox.Point], model_id: str | None = None) -> None:
        """Logs points of the run, whatever the server has, that belong to one of its logged models, or to none."""
        finite = (point for point in points if math.isfinite(point.value))
        metrics = [Metric(valid_key(p.key), p.value, p.time_ms, p.step, model_id=model_id) for p in finite]
        with translated_errors():
            self._log("metrics", metrics, outbox.POINTS_A_BATCH)

    def log_datasets(self, datasets: Sequence[Mapping[str, Any]]) -> None:
        """Logs corpora with `name`, `digest`, `source` and `context`; other values (rows, tokens) go into the profile.

        The server identifies a corpus by name and digest: logged again, it is stored once.
        """
        inputs = []
        for values in (each for each in datasets if {"name", "digest", "source", "context"} <= each.keys()):
            name, context, source = values["name"], values["context"], str(values["source"])
            is_ours = source.startswith("{")  # a description of ours, else a folder
            kind, said = ("corpus", source) if is_ours else ("local", json.dumps({"uri": source}))
            profile = json.dumps({key: values[key] for key in values if key not in ("name", "context", "source")})
            dataset = Dataset(name, values["digest"][:LONGEST_DIGEST], kind, said, profile=profile)
            inputs.append(DatasetInput(dataset, [InputTag(CONTEXT_TAG, context)]))
        if inputs:
            with translated_errors():
                self.client.log_inputs(self.run_id, datasets=inputs)

    def _log(self, kind: str, entities: Sequence[Any], a_batch: int) -> None:
        for first in range(0, len(entities), a_batch):
            self.client.log_batch(self.run_id, **{kind: entities[first : first + a_batch]}, synchronous=True)


def _lacks(steps: Sequence[int], times: Sequence[int], point: outbox.Point) -> bool:
    place = bisect_left(steps, point.step)
    return (
        point.step not in steps[place : place + 1]
        and min(times[place : place + 1], default=point.time_ms) >= point.time_ms
    )


def open_run(target: outbox.Target, state: outbox.DeliveryState) -> TrackedRun:
    """The run of this run folder on the server: the recorded one, else the one with our tag, else a new one."""
    with translated_errors():
        if target.uri.startswith("sqlite:///"):
            _create_database(Path(target.uri.removeprefix("sqlite:///").split("?")[0]))
        client = MlflowClient(tracking_uri=target.uri)
        found = _run_by_id(client, state.mlflow_run_id) if state.mlflow_run_id else None
        if found is None:
            experiment_id = _experiment_id(client, target)
            found = _run_by_uid(client, experiment_id, state.run_id)
        if found is None:
            tags = {RUN_UID_TAG: state.run_id} | ({REPLACES_TAG: state.mlflow_run_id} if state.mlflow_run_id else {})
            found = client.create_run(experiment_id, int(state.created * 1000), tags, state.run_name)
        if not found.info.run_id or not found.info.experiment_id:
            raise outbox.ServerTrouble("its answers are not those of MLflow: something else is at this address")
        experiment = client.get_experiment(found.info.experiment_id).name
        if experiment != target.experiment:
            words = "MLflow run %s stays in experiment %r: MLflow cannot move a run to %r (tracking.experiment)"
            _warn_once(words, found.info.run_id, experiment, target.experiment)
        if found.info.lifecycle_stage == "deleted":
            _experiment_id(client, replace(target, experiment=experiment))  # restored too, if it was deleted
            logger.warning("MLflow run %s had been deleted on the server and is restored", found.info.run_id)
            client.restore_run(found.info.run_id)
        _follow_moved_artifacts(target, found.info.run_id, found.info.artifact_uri)
        return TrackedRun(client, found)


@contextmanager
def artifact_errors() -> Iterator[None]:
    """Context of uploads: a store's client (boto3, Azure, ...) raises its own errors, and may not be installed."""
    try:
        yield
    except (MlflowException, OSError, SQLAlchemyError, outbox.ServerTrouble):
        raise
    except ImportError as error:
        raise outbox.ServerRefused(f"the artifact store needs a package that is not installed: {error}") from None
    except Exception as error:  # noqa: BLE001
        raise outbox.ServerTrouble(explanation(f"the artifact store: {type(error).__name__}: {error}")) from None


@contextmanager
def patient_requests(seconds: float) -> Iterator[None]:
    """Context with a longer timeout of each request: a server stores a large file before it answers."""
    before = MLFLOW_HTTP_REQUEST_TIMEOUT.get()
    MLFLOW_HTTP_REQUEST_TIMEOUT.set(max(before, int(seconds)))
    try:
        yield
    finally:
        MLFLOW_HTTP_REQUEST_TIMEOUT.set(before)


@contextmanager
def translated_errors() -> Iterator[None]:
    """Converts errors of MLflow, its packages, connections and database into ServerTrouble; others are bugs and pass."""
    try:
        yield
    except MlflowException as error:
        if isinstance(error.__cause__, MlflowException):  # the server's answer, which MLflow takes for a wrong argument
            error = error.__cause__
        is_deleted = "'active' state" in str(error)  # opened again, the run is restored
        kind = outbox.ServerTrouble if is_deleted else KINDS_OF_ERRORS.get(error.error_code, outbox.ServerTrouble)
        raise kind(explanation(str(error))) from None
    except (OSError, ModuleNotFoundError, SQLAlchemyError, sqlite3.Error, ParseError) as error:
        # Only uploads arrive here with a status: other answers of the server are MlflowExceptions.
        status = getattr(getattr(error, "response", None), "status_code", None)
        kind = outbox.ServerRefused if status in REFUSING_STATUSES else outbox.ServerTrouble
        raise kind(explanation(f"{type(error).__name__}: {error}")) from None
    except ValueError as error:
        if not re.search("MLFLOW_|IPv[46]|netloc", str(error)):  # a variable or an address that MLflow cannot read
            raise
        raise outbox.ServerTrouble(explanation(str(error))) from None


def explanation(message: str) -> str:
    """The server's answer on one line without credentials, with a remedy if the cause is known."""
    answer = " ".join(without_secrets(message).split())[:500]
    if found := re.search(_NO_SERVER, answer):
        return f"no server answers at {found['host']}:{found['port']} ({found['cause'].lower()})"
    remedies = (remedy for sign, remedy in REMEDIES.items() if re.search(sign, message))
    return next((f"{answer} ({remedy})" for remedy in remedies), answer)


def valid_key(key: str) -> str:
    """A key that MLflow accepts: at most LONGEST_KEY letters, digits, _ - . space : / and no path with `.` or `..`."""
    parts = re.sub(r"[^\w\-. :/]", "_", key)[:LONGEST_KEY].rstrip("/").split("/")
    valid = "/".join(part if part.strip(".") else "_" for part in parts)
    return f"__{valid[2:]}" if valid.startswith("..") else valid


def _follow_moved_artifacts(target: outbox.Target, run_id: str, artifact_uri: str) -> None:
    """Updates the paths in the database of a store without a server that was moved together with its runs: the next
    upload would create the old folder again. Raises OSError, sqlite3.Error: the database cannot be written now."""
    database = Path(target.uri.removeprefix("sqlite:///"))
    new, old = target.artifact_root, artifact_uri.removesuffix(f"/{run_id}/artifacts")
    is_beside = database.parent == new.parent and old.startswith("file:") and old != new.as_uri()
    if not is_beside or Path(unquote(urlsplit(old).path)).exists():
        return
    with FileLock(f"{database}.lock", timeout=LOCK_SECONDS), closing(sqlite3.connect(database)) as store, store:
        for table, column in _PATHS:
            change = f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE substr({column} || '/', 1, ?) = ?"
            store.execute(change, (new.as_uri(), len(old) + 1, len(old) + 1, f"{old}/"))


def _create_database(database: Path) -> None:
    """Creates a missing sqlite store atomically: two processes at once, or one killed half-way, would break it."""
    if database.exists():
        return
    database.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{database}.lock", timeout=LOCK_SECONDS):
        if not database.exists():
            with replacing(database) as temporary:
                temporary.touch()  # sqlite would let nobody else write, whatever the umask
                MlflowClient(tracking_uri=f"sqlite:///{temporary}").search_experiments(max_results=1)


def _experiment_id(client: MlflowClient, target: outbox.Target) -> str:
    experiment = client.get_experiment_by_name(target.experiment)
    if experiment is None:
        served = target.uri.startswith(("http://", "https://", "databricks"))
        location = None if served else target.artifact_root.as_uri()
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


def _run_by_uid(client: MlflowClient, experiment_id: str, run_id: str) -> Any | None:
    found = client.search_runs([experiment_id], f"tags.`{RUN_UID_TAG}` = '{run_id}'", run_view_type=ViewType.ALL)
    return min(found, key=lambda run: (run.info.lifecycle_stage == "deleted", not run.data.metrics), default=None)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
