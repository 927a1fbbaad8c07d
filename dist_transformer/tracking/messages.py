"""Conversion of the records of a run folder for MLflow.

metrics.jsonl  {"event": "train", "step": 50, "loss": 9.01}   the point (50, 9.01) of the curve train/loss
the outbox     start        status RUNNING, tags, description, parameters, the file config.yaml, the corpora
               checkpoint   a logged model that is only a reference: path, step, scores; tags of best and deleted ones
               samples      the table samples.json: the newest SAMPLES_BYTES of samples.jsonl
               profile      the table of a profile
               figures      the file report.html
               model        a logged model that MLflow can serve, registered on request
               evaluation   points evaluation/<corpus>/<measure>
               status       FINISHED, FAILED, KILLED, SCHEDULED

A path in the outbox is relative if it lies inside the run folder, because that may be moved before it is sent.
"""

import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_transformer.files import file_sha256
from dist_transformer.run.folder import RunDir
from dist_transformer.run.records import records_of
from dist_transformer.run.tail import lines_backwards
from dist_transformer.tracking.outbox import CannotBeSent, Model, Point, files_of, local_files_refused

if TYPE_CHECKING:
    from dist_transformer.tracking.mlflow_client import TrackedRun

_EVENTS: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "start": (("status", "words", "files"), {"time", "tags", "parameters", "config"}),
    "checkpoint": (("words",), {"time", "path", "step", "metrics"}),
    "samples": (("files",), set()),
    "profile": (("files",), {"path"}),
    "figures": (("figures",), set()),
    "model": (("model",), {"time", "path", "step"}),
    "evaluation": (("words",), {"time", "name", "step", "metrics"}),
    "status": (("status",), {"time", "status"}),
}
"""The channels of each event, and the values that it needs."""
REPLACED = ("samples", "figures")  # they send a file as it is by then: of several that wait, the last is enough
OVERRIDDEN = ("is_best", "kept")  # of checkpoints that wait, the last that says it is enough: it sets the tags of all
STATUSES = ("RUNNING", "SCHEDULED", "FINISHED", "FAILED", "KILLED")
SAMPLE_COLUMNS = ("step", "corpus", "number", "fixed", "source", "reference", "translation")
SAMPLES_BYTES = 4 << 20  # at most: the whole file, sent at each validation, would add up by the square of their number


def points_of(record: Mapping[str, Any]) -> list[Point]:
    """The finite numbers of one record of metrics.jsonl as points of curves `<event>/<key>`; the rest stays local."""
    numbers = {
        key: float(value)
        for key, value in record.items()
        if key not in ("step", "time") and isinstance(value, int | float) and abs(value) <= sys.float_info.max
    }
    return _points(record["event"], numbers, record)


def goes_by(event: Mapping[str, Any], channel: str) -> bool:
    """True if a part of this event of the outbox is sent over channel `channel`."""
    return event["event"] in _EVENTS and channel in _EVENTS[event["event"]][0]


def send_event(run: "TrackedRun", event: Mapping[str, Any], channel: str, run_dir: RunDir) -> None:
    """Sends the parts of an event of the outbox that go over channel `channel`. Sending twice has the effect of once.

    Raises ServerTrouble; CannotBeSent for a damaged event.
    """
    if not _EVENTS[event["event"]][1] <= event.keys() or event.get("status", "RUNNING") not in STATUSES:
        raise CannotBeSent("its record is damaged")
    match channel, event["event"]:
        case "status", _:
            run.set_status(event.get("status", "RUNNING"), _time_ms(event))
        case "words", "start":
            run.set_tags(event["tags"])
            run.log_parameters(event["parameters"])
            if "description" in event:
                run.describe(event["description"])
            run.log_datasets(event.get("datasets", []))
        case "words", "checkpoint":
            _send_checkpoint(run, event)
        case "words", "evaluation":
            run.log_all_points(_points(f"evaluation/{event['name']}", event["metrics"], event))
        case "files", "start":
            run.log_text(event["config"], "config.yaml")
            run.log_long_parameters(event["parameters"])
        case "files", "samples":
            run.log_table(sample_rows(run_dir.samples), SAMPLE_COLUMNS, "samples.json")
        case "files", "profile":
            run.log_file(_of_run(run_dir, event["path"]))
        case "figures", "figures":
            run.log_file(_of_run(run_dir, run_dir.report.name))
        case "model", "model":
            send_model(run, event, run_dir)


def _send_checkpoint(run: "TrackedRun", event: Mapping[str, Any]) -> None:
    from dist_transformer.tracking import mlflow_models

    name, parameters = Path(event["path"]).name, {"path": event["path"], "step": str(event["step"])}
    points = _points("checkpoint", event["metrics"], event)
    is_best = bool(event.get("is_best"))
    if is_best:
        run.set_tags({"best_checkpoint": name})  # MLflow's pages show no tags of a logged model
    if event.keys() & OVERRIDDEN:  # first, as its reference may be refused: earlier ones have left the tags to it
        mlflow_models.mark_checkpoints(run, name if is_best else None, event.get("kept"))
    mlflow_models.log_reference(run, name, parameters, points, mlflow_models.CHECKPOINT, is_best)


def send_model(run: "TrackedRun", event: Mapping[str, Any], run_dir: RunDir) -> None:
    """Sends a model folder; if it is the run's own, its path and digest become tags of the run.

    Raises ServerRefused if the folder is gone or cannot be registered.
    """
    from dist_transformer.tracking import mlflow_models

    folder = run_dir.path / event["path"]
    with local_files_refused(folder):
        is_own = folder.resolve().is_relative_to(run_dir.path.resolve())
        if not is_own and not all((folder / name).is_file() for name in ("config.json", "model.safetensors")):
            raise CannotBeSent(f"{folder} is no model folder")
        _refuse_links_out(folder, files_of(folder))
    digest = folder_digest(folder)
    if folder.absolute() == run_dir.model.absolute():
        run.set_tags({"model.path": str(folder.absolute()), "model.sha256": digest})
    said = {name: event[name] for name in ("decoding", "register_as", "alias", "by_hand") if name in event}
    mlflow_models.log_model(run, Model(folder.absolute(), digest, event["step"], run_dir.upload, **said))


def _of_run(run_dir: RunDir, path: str) -> Path:
    """Path of a file or folder of the run. Raises CannotBeSent if it is outside: whoever made the run folder must not choose
    which files of this machine are sent to a server."""
    _refuse_links_out(run_dir.path, [run_dir.path / path])
    return run_dir.path / path


def _refuse_links_out(folder: Path, files: Iterable[Path]) -> None:
    """Raises CannotBeSent for a file that is not in the folder, be it through a link."""
    real = folder.resolve()
    for file in files:
        if not file.resolve().is_relative_to(real):
            raise CannotBeSent(f"{file} leads out of {folder}")


def sample_rows(samples: Path) -> Iterator[list[Any]]:
    """The newest sentences of samples.jsonl, each as a row of SAMPLE_COLUMNS, in the order of the file."""
    newest = [*lines_backwards(samples, max_bytes=SAMPLES_BYTES)][:0:-1] if samples.is_file() else ()
    for record in (r for r in records_of(newest) if {"step", "corpus", "sentences"} <= r.keys()):
        for sentence in record["sentences"]:
            yield [record["step"], record["corpus"], *(sentence.get(column) for column in SAMPLE_COLUMNS[2:])]


def folder_digest(folder: Path) -> str:
    """SHA-256 over the names and contents of all files of `folder` but the model card, to which `evaluate` adds scores.

    Raises CannotBeSent if the folder is gone.
    """
    digest = hashlib.sha256()
    with local_files_refused(folder):
        for file in (each for each in files_of(folder) if each != folder / "README.md"):
            digest.update(f"{file.relative_to(folder)} {file_sha256(file)}\n".encode())
    return digest.hexdigest()


def _points(prefix: str, values: Mapping[str, float], record: Mapping[str, Any]) -> list[Point]:
    return [Point(f"{prefix}/{key}", value, record["step"], _time_ms(record)) for key, value in values.items()]


def _time_ms(record: Mapping[str, Any]) -> int:
    return int(record["time"] * 1000)
