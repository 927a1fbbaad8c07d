"""What each record of the run folder becomes in MLflow.

metrics.jsonl  {"event": "train", "step": 50, "loss": 9.01}   the point (50, 9.01) of the curve train/loss
the spool      start        status RUNNING, tags, parameters, the file config.yaml
               checkpoint   a logged model that is only a reference: path, step, scores
               model        the same, and the files of the folder when they are small
               status       FINISHED, FAILED, KILLED, SCHEDULED
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_transformer.tracking.spool import local_files_refused

if TYPE_CHECKING:
    from dist_transformer.tracking.mlflow_door import TrackedRun


@dataclass(frozen=True)
class Point:
    """One value of one curve; `time_ms` is unix time in milliseconds."""

    key: str
    value: float
    step: int
    time_ms: int


@dataclass(frozen=True)
class Reference:
    """A checkpoint or model that stays where it is and is found in MLflow by its name, parameters and scores."""

    name: str
    kind: str
    parameters: Mapping[str, str]
    points: Sequence[Point]


def points_of(record: Mapping[str, Any]) -> list[Point]:
    """The numbers of one record of metrics.jsonl as curves `<event>/<key>`; texts are no curves and stay local."""
    numbers = {k: float(v) for k, v in record.items() if k not in ("step", "time") and isinstance(v, int | float)}
    return _points(record["event"], numbers, record)


def send_event(run: "TrackedRun", event: Mapping[str, Any]) -> None:
    """Deliver one record of the spool. Every kind may be delivered twice with the result of once."""
    match event["event"]:
        case "start":
            run.set_status("RUNNING", _time_ms(event))
            run.set_tags(event["tags"])
            run.log_parameters(event["parameters"])
            run.log_text(event["config"], "config.yaml")
        case "checkpoint":
            parameters = {"path": event["path"], "step": str(event["step"])}
            points = _points("checkpoint", event["metrics"], event)
            run.log_reference(Reference(Path(event["path"]).name, "checkpoint", parameters, points))
        case "model":
            digest = folder_digest(Path(event["path"]))
            run.set_tags({"model.path": event["path"], "model.sha256": digest})
            points = _points("model", event["metrics"], event)
            # Not named "model": MLflow would show it instead of the uploaded files, which are at that path.
            run.log_reference(Reference("final_model", "model", {"path": event["path"], "sha256": digest}, points))
            run.log_model_folder(Path(event["path"]))
        case "status":
            run.set_status(event["status"], _time_ms(event))


def folder_digest(folder: Path) -> str:
    """SHA-256 over the names and contents of all files of `folder`; a folder that is gone is refused, not awaited."""
    digest = hashlib.sha256()
    with local_files_refused():
        for file in files_of(folder):
            with file.open("rb") as content:
                line = f"{file.relative_to(folder)} {hashlib.file_digest(content, 'sha256').hexdigest()}\n"
            digest.update(line.encode())
    return digest.hexdigest()


def files_of(folder: Path) -> list[Path]:
    """All files below `folder`, sorted. Raises FileNotFoundError when it is no folder."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not there any more")
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _points(prefix: str, values: Mapping[str, float], record: Mapping[str, Any]) -> list[Point]:
    return [Point(f"{prefix}/{key}", value, record["step"], _time_ms(record)) for key, value in values.items()]


def _time_ms(record: Mapping[str, Any]) -> int:
    return int(record["time"] * 1000)
