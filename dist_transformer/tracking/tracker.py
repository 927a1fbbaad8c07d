"""Tracking of a run in MLflow, called by training on rank 0. Every call writes a line and returns.

A start in four calls; between them training appends to metrics.jsonl, which the shipper reads:

    tracker = Tracker(run_dir, config.tracking, config.run.name, config.run.root, run_id)
    tracker.start(parameters, tags, config_text, datasets)
    tracker.checkpoint_saved(1000, path, {"loss": 2.31}, is_best=True, kept=["step_00001000"])
    tracker.close("FINISHED")
"""

import getpass
import logging
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from dist_transformer.config.credentials import cleaned, tracking_address, without_credentials
from dist_transformer.config.loading import load_config
from dist_transformer.config.schema import DecodingConfig, TrackingConfig
from dist_transformer.errors import UserError
from dist_transformer.files import FULL, MISPLACED, read_json, repeatedly
from dist_transformer.run.folder import RunDir
from dist_transformer.run.metrics_log import add_line, event_line, read_records
from dist_transformer.run.records import read_record, sound
from dist_transformer.tracking import outbox
from dist_transformer.tracking.messages import send_model
from dist_transformer.tracking.shipper import BackgroundShipper, Delivery, Shipper

logger = logging.getLogger(__name__)

Status = Literal["FINISHED", "FAILED", "KILLED", "SCHEDULED"]
"""Status at the end of a start. SCHEDULED: stopped with everything saved, to be resumed."""

CLOSE_SECONDS = 10
"""Time that the end of a run waits for the server to take the rest; `track sync` sends what is left."""
BUSY_SECONDS = 60.0
"""Time beyond CLOSE_SECONDS at the end of a finished run for a server that takes data, or the model."""

STORE = "mlflow.db"

_WORDS = {"model": "{} model", "languages": "{}", "precision": "{}"}
_COUNTS = {"num_ranks": "rank", "num_nodes": "node"}

SYNC_ATTEMPTS = 3
SYNC_WAIT_SECONDS = 1.0


class Tracker:
    """Tracks one run folder in MLflow. Only `close` waits for the server, for a limited time."""

    def __init__(
        self, run_dir: RunDir, settings: TrackingConfig, run_name: str, default_store: Path, run_id: str
    ) -> None:
        """Takes the folder of runs, `default_store`, whose mlflow.db is used if `settings.uri` names no server.

        `run_id`: the unique id of this run, stored in its checkpoints. A folder of which only checkpoints are left
        continues in the same MLflow run, which has the id as a tag.
        """
        self._run_dir = run_dir
        self._settings = settings
        self._has_model = False
        self._pending: list[bytes] = []
        state = delivery_state_of(run_dir, run_name, run_id)
        self._shipper = BackgroundShipper(Shipper(run_dir, target_of(settings, run_dir, default_store), state))

    def start(
        self,
        parameters: Mapping[str, str],
        tags: Mapping[str, str],
        config_text: str,
        datasets: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Begins tracking: once at every start of the run folder. The run on the server is created in the background.

        `datasets`: for each corpus `name`, `context` (training, validation or test), `digest`, `source`, and further
        values (rows, tokens).
        """
        self._add(
            "start",
            parameters=cleaned(parameters),
            tags=cleaned({**standard_tags(tags), **tags}),
            config=without_credentials(config_text),
            datasets=cleaned([*datasets]),
            description=without_credentials(description(tags, datasets, self._run_dir.path)),
        )
        self._shipper.start()

    def checkpoint_saved(
        self, step: int, path: Path, metrics: Mapping[str, float], is_best: bool, kept: Sequence[str]
    ) -> None:
        """Adds a reference to a checkpoint, found in MLflow by its scores; nothing is uploaded.

        `is_best`: best of all so far by validation.metric. `kept`: names of the checkpoint folders that still exist.
        """
        finite = {key: float(value) for key, value in metrics.items() if math.isfinite(value)}
        self._add("checkpoint", step=step, path=str(path.absolute()), metrics=finite, is_best=is_best, kept=list(kept))

    def samples_written(self, step: int) -> None:
        """Reports that samples.jsonl has grown."""
        self._add("samples", step=step)

    def profile_written(self, table: Path) -> None:
        """Adds the table of `train --profile`; traces are not sent."""
        self._add("profile", path=_within(self._run_dir, table))

    def report_written(self) -> None:
        """Reports that report.html was made anew."""
        self._add("figures")

    def model_written(self, folder: Path) -> None:
        """Adds the exported model folder: uploaded if it is small enough, else its path and digest."""
        if event := usable_model(self._run_dir, self._settings, folder):
            self._add("model", **event)
            self._has_model = True

    def close(self, status: Status) -> None:
        """Waits at most CLOSE_SECONDS for the server; BUSY_SECONDS more at the end of a finished run while it takes data.

        Not at others: a stop must end in time, an error at once. Undelivered events stay in the run folder for a later job.
        """
        self._add("status", is_last=True, status=status)
        began = time.monotonic()
        busy_seconds = BUSY_SECONDS if status == "FINISHED" else 0.0
        if not self._shipper.close(CLOSE_SECONDS, busy_seconds, has_upload=self._has_model):
            hint = f"dist-transformer track sync {self._run_dir.quoted}"
            seconds = time.monotonic() - began
            logger.warning("MLflow did not take everything in %.0f s. To send the rest: %s", seconds, hint)

    def _add(self, event: str, is_last: bool = False, **details: Any) -> None:
        """Writes one event. Those that the disk does not take are kept in memory, and written with a later one."""
        self._pending.append(event_line(event, details))
        path = self._run_dir.tracking_events
        try:
            repeatedly(path, self._write, (*MISPLACED, *FULL), "written") if is_last else self._write()
        except OSError as error:
            what = "last events are lost" if is_last else "events are kept in memory until the disk takes them"
            logger.warning("%s: %s; its %s", path, error, what)

    def _write(self) -> None:
        while self._pending:
            add_line(self._run_dir.tracking_events, self._pending[0])
            del self._pending[0]


def standard_tags(tags: Mapping[str, str]) -> dict[str, str]:
    """The tags that MLflow's pages have columns for: user, source, git commit."""
    found = {
        "mlflow.source.name": " ".join(["dist-transformer", *sys.argv[1:]]),
        "mlflow.source.type": "JOB" if "SLURM_JOB_ID" in os.environ else "LOCAL",
    }
    with suppress(KeyError, OSError, ImportError):  # a container may not know the user's name
        found["mlflow.user"] = getpass.getuser()
    if "git_commit" in tags:
        found["mlflow.source.git.commit"] = tags["git_commit"]
    return found


def description(tags: Mapping[str, str], datasets: Sequence[Mapping[str, Any]], run_folder: Path) -> str:
    """A few lines in Markdown: model, corpora, hardware, location of the run folder. Unknown items are omitted:

    base model of 63,000,000 parameters, en-de, fp16, 16 ranks, 2 nodes
    - wmt14 (training): 4,500,000 rows
    - run folder: n1:/runs/wmt14
    """
    first = [text.format(tags[key]) for key, text in _WORDS.items() if key in tags]
    first += [f"{tags[key]} {noun}{'' if tags[key] == '1' else 's'}" for key, noun in _COUNTS.items() if key in tags]
    if {"model", "num_parameters"} <= tags.keys():
        first[0] += f" of {int(tags['num_parameters']):,} parameters"
    lines = [", ".join(first), *(f"- {_corpus(values)}" for values in datasets)]
    return "\n".join([*lines, f"- run folder: {platform.node()}:{run_folder.absolute()}"])


def _corpus(values: Mapping[str, Any]) -> str:
    context = f" ({values['context']})" if "context" in values else ""
    rows = f": {values['rows']:,} rows" if "rows" in values else ""
    return f"{values['name']}{context}{rows}"


def sync(run_dir: RunDir, settings: TrackingConfig, default_store: Path) -> Delivery:
    """Sends everything of a run folder that its server does not have yet, in the foreground.

    Raises UserError with the server's answer if it does not accept it.
    """
    shipper = Shipper(run_dir, target := target_of(settings, run_dir, default_store), delivery_state_of(run_dir))
    return _insisting(shipper.deliver_all, target, f"the history of {run_dir.path}")


def log_model(run_dir: RunDir, settings: TrackingConfig, default_store: Path, folder: Path) -> Delivery:
    """Sends a run's history, then a model folder made of it, in the foreground; registered according to `settings`.

    Raises UserError if it is no model folder, is too large, does not translate, or the server does not accept it.
    """
    target, state = target_of(settings, run_dir, default_store), delivery_state_of(run_dir)
    shipper = Shipper(run_dir, target, state)
    event = {"time": time.time(), **model_event(run_dir, settings, folder), "by_hand": True}
    if (size := outbox.megabytes_of(folder)) > outbox.UPLOAD_MEGABYTES:
        raise UserError(
            f"{folder}: {size:.0f} MB, above the {outbox.UPLOAD_MEGABYTES} MB that are uploaded; put it where others can read it"
        )

    def send() -> Delivery:
        from dist_transformer.tracking import mlflow_client

        delivery = shipper.deliver()
        try:
            send_model(mlflow_client.open_run(target, state), event, run_dir)
        except outbox.ServerRefused as refusal:
            raise UserError(f"{folder}: {refusal}") from None
        return delivery

    return _insisting(send, target, f"the model {folder}")


def model_event(run_dir: RunDir, settings: TrackingConfig, folder: Path) -> dict[str, Any]:
    """Event of the outbox for a model folder, with the decoding settings of the run's configuration."""
    config = load_config(run_dir.config, check_files=False) if run_dir.config.is_file() else None
    return {
        "step": _step_of(run_dir, folder),
        "path": _within(run_dir, folder),
        "decoding": DecodingConfig(**config.decoding.model_dump()).model_dump(mode="json") if config else {},
        **settings.model_dump(include={"register_as", "alias"}),
    }


def usable_model(run_dir: RunDir, settings: TrackingConfig, folder: Path) -> dict[str, Any]:
    """Returns the event of `model_event`; {}, with a warning, of a folder that is none of a model."""
    try:
        return model_event(run_dir, settings, folder)
    except (OSError, ValueError, UserError) as error:
        logger.warning("MLflow does not get the model %s: %s", folder, error)
        return {}


def delivery_state_of(run_dir: RunDir, run_name: str | None = None, run_id: str | None = None) -> outbox.DeliveryState:
    """The delivery state in the run folder; else a new one, of the run that has this id, by default that in run.json."""
    run_id = run_id or read_record(run_dir.state).get("run_id")
    state = outbox.load_delivery_state(run_dir.tracking, run_name or run_dir.name, run_id)
    recorded = run_dir.tracking_events.stat().st_size if run_dir.tracking_events.is_file() else 0
    if any(state.offset(channel) > recorded for channel in outbox.CHANNELS):  # of a shorter outbox: all of it is new
        state.outbox_offset, state.ahead = 0, {}
    return state


def _insisting(send: Callable[[], Delivery], target: outbox.Target, what: str) -> Delivery:
    for attempt in range(1, SYNC_ATTEMPTS + 1):
        try:
            return send()
        except outbox.FolderTrouble as trouble:
            raise UserError(
                f"{what} cannot be sent: {trouble}\nExpected a run folder that this user may read and write, which records what "
                "MLflow has. Run the command as the owner of the folder, or mend its disk"
            ) from trouble
        except outbox.ServerTrouble as trouble:
            if attempt == SYNC_ATTEMPTS:
                raise UserError(
                    f"MLflow at {without_credentials(target.uri)} does not take {what}.\n"
                    f"Its answer: {trouble}\n"
                    "Nothing is lost: check the address (tracking.uri) and the server, then run the command again."
                ) from trouble
        time.sleep(SYNC_WAIT_SECONDS)
    raise AssertionError("the last attempt returns or raises")


def target_of(settings: TrackingConfig, run_dir: RunDir, default_store: Path) -> outbox.Target:
    """Destination of the run's tracking: its address, else the store of its folder of runs.

    That folder may have been moved since the run began in `default_store`; a run that was moved out of it keeps its
    store.
    """
    here = run_dir.path.absolute().parent
    has_moved = (here / STORE).exists() or not default_store.is_dir()
    root = here if has_moved else default_store
    return outbox.Target(
        tracking_address(settings) or store_uri(root), settings.experiment, root.resolve() / "mlartifacts"
    )


def store_uri(root: Path) -> str:
    """The store of the runs in `root` that needs no server: one sqlite file."""
    return f"sqlite:///{root.resolve() / STORE}"


def _step_of(run_dir: RunDir, model: Path) -> int:
    """The training step recorded in a model folder, else the newest one of the run.

    Raises ValueError for a model folder whose config.json is no JSON object.
    """
    config = read_json(model / "config.json") if (model / "config.json").is_file() else {}
    if not isinstance(config, dict):
        raise ValueError(f"{model}/config.json: expected a JSON object")
    said: int | None = sound(config).get("step")
    return said if said is not None else max((r.get("step", 0) for r in read_records(run_dir.metrics)), default=0)


def _within(run_dir: RunDir, path: Path) -> str:
    """Relative path if inside the run folder, which may have been moved when the outbox is sent; else absolute."""
    inside = path.absolute().is_relative_to(run_dir.path.absolute())
    return str(path.absolute().relative_to(run_dir.path.absolute()) if inside else path.absolute())
