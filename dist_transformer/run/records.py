"""Tolerant reading of the JSON files of runs, for commands that show a run and for a start that must not fail on them:
a file that is torn, damaged, edited by hand or of another version is used as far as possible.

A field that is known by its name and has a value of another type counts as absent, and so does null:

    {"event": "train", "step": "many", "loss": 2.5}  ->  {"event": "train", "loss": 2.5}
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from dist_transformer.config.metrics import MEASURES
from dist_transformer.files import MISPLACED, parse_json, patiently, read_json
from dist_transformer.run.tail import PIECE_BYTES, last_lines

Record = dict[str, Any]
_NOT_FINITE = Literal["nan", "inf", "-inf"]
_LISTS = ("sentences", "points", "datasets")
_WHOLE = Annotated[int, Field(gt=-(2**53), lt=2**53)]
_NUMBER = float | _NOT_FINITE
_MOMENT = Annotated[float, Field(ge=0, lt=1e11)]
"""Unix seconds up to the year 5138, within the range of Python's datetime."""

_TYPES: dict[Any, tuple[str, ...]] = {
    str: ("event", "state", "host", "boot", "job", "job_id", "slurm_job_id", "newest", "how", "reason", "token", "digest",
          "run_id", "run_uid", "run_name", "uid", "uri", "submitted_at", "status", "name", "path", "config", "context",
          "description", "source", "reference", "translation", "corpus", "batch_digest"),
    _WHOLE: ("step", "starts", "exit_code", "attempt", "num_ranks", "pid", "since_step", "went_on_from", "best_step",
             "task", "pairs", "beam_size", "number", "source_vocabulary", "target_vocabulary", "newest_step",
             "without_progress", "suspended"),
    _MOMENT: ("time", "started", "began", "before_seen", "save_seconds", "write_seconds", "validation_seconds", "stop_seconds"),
    _NUMBER: ("target_tokens", "data_wait_share", "learning_rate", "tokens_per_second", "exact_match", *MEASURES),
    bool: ("requeued", "is_best", "fixed", "by_hand"),
    dict[str, Any]: ("recipe", "corpora", "early_stopping", "validation", "decoding", "overrides", "made_of"),
    dict[str, str]: ("tags", "parameters", "stages"),
    dict[str, _NUMBER]: ("metrics",),
    list[dict[str, Any]]: _LISTS,
    list[str]: ("kept",),
}  # fmt: skip
_VALIDATORS: dict[str, Any] = {}
for _kind, _names in _TYPES.items():
    _VALIDATORS |= dict.fromkeys(_names, TypeAdapter(_kind).validator)


def sound(record: Record) -> Record:
    """Returns the usable fields of a record, and of the records in it."""
    used = {name: value for name, value in record.items() if _is_sound(name, value)}
    return used | {name: [*map(sound, used[name])] for name in _LISTS if name in used}


def read_record(path: Path) -> Record:
    """Reads a JSON file of a run to show it: empty if there is none, or it cannot be read now."""
    return _record_of(lambda: read_json(path))


def read_record_patiently(path: Path) -> Record:
    """Reads a JSON file of a run to decide by it: empty if there is none. Raises MachineError: its disk does not answer."""
    return _record_of(lambda: patiently(path, lambda: read_json(path), MISPLACED))


def _record_of(read: Callable[[], Any]) -> Record:
    try:
        record = read()
    except (OSError, ValueError):
        return {}
    return sound(record) if isinstance(record, dict) else {}


def records_of(lines: Iterable[str | bytes]) -> Iterator[Record]:
    """Yields the JSON objects of lines; skips a line that is torn or being written."""
    for line in lines:
        try:
            record = parse_json(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield sound(record)


def _is_sound(name: str, value: Any) -> bool:
    if name in _VALIDATORS:
        return bool(_VALIDATORS[name].isinstance_python(value, strict=True))
    return type(value) is not int or abs(value) < 2**1000


def records_of_training(metrics: Path, max_bytes: int = PIECE_BYTES) -> Iterator[dict[str, Any]]:
    """Yields the records of training at the end of metrics.jsonl that have a time and a step, newest first."""
    records = records_of(last_lines(metrics, max_bytes))
    return (r for r in records if r.get("event") == "train" and {"step", "time"} <= r.keys())
