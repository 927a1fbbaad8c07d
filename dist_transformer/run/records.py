"""Tolerant reading of the JSON files of runs, for commands that show a run and for a start that must not fail on them:
a file that is torn, damaged, edited by hand or of another version is used as far as possible.

A field that is known by its name and has a value of another type counts as absent, and so does null:

    {"event": "train", "step": "many", "loss": 2.5}  ->  {"event": "train", "loss": 2.5}
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from dist_transformer.files import parse_json, read_json
from dist_transformer.run.tail import PIECE_BYTES, last_lines

Record = dict[str, Any]
_LATEST = 1e11
"""Upper limit of times in unix seconds (the year 5138), within the range of Python's datetime."""
_NOT_FINITE = ("nan", "inf", "-inf")
_LISTS = ("sentences", "points", "datasets")


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_whole(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**53


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) or value in _NOT_FINITE


def _is_moment(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < _LATEST


def _is_flag(value: Any) -> bool:
    return type(value) is bool


def _is_mapping(value: Any) -> bool:
    return isinstance(value, dict)


def _is_list_of_mappings(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_mapping, value))


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _maps_to(is_one: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(is_one, value.values()))


_KINDS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(
        ("event", "state", "host", "boot", "job", "job_id", "slurm_job_id", "newest", "how", "reason", "token", "digest",
         "run_id", "run_uid", "run_name", "uid", "uri", "submitted_at", "status", "name", "path", "config", "context",
         "description", "source", "reference", "translation", "corpus", "batch_digest"),
        _is_text,
    ),
    **dict.fromkeys(
        ("step", "starts", "exit_code", "attempt", "num_ranks", "pid", "since_step", "went_on_from", "best_step", "task",
         "pairs", "beam_size", "number", "source_vocabulary", "target_vocabulary", "newest_step", "without_progress"),
        _is_whole,
    ),
    **dict.fromkeys(("time", "started", "began", "before_seen", "save_seconds", "validation_seconds"), _is_moment),
    **dict.fromkeys(("target_tokens", "data_wait_share"), _is_number),
    **dict.fromkeys(
        ("loss", "nll", "learning_rate", "tokens_per_second", "bleu", "chrf", "comet", "plugin", "exact_match"),
        _is_number,
    ),
    **dict.fromkeys(("requeued", "is_best", "fixed", "by_hand"), _is_flag),
    **dict.fromkeys(("recipe", "corpora", "early_stopping", "validation", "decoding", "overrides"), _is_mapping),
    **dict.fromkeys(("tags", "parameters", "stages"), _maps_to(_is_text)),
    "metrics": _maps_to(_is_number),
    **dict.fromkeys(_LISTS, _is_list_of_mappings),
    "kept": _is_list_of_texts,
}  # fmt: skip


def sound(record: Record) -> Record:
    """Returns the usable fields of a record, and of the records in it."""
    used = {name: value for name, value in record.items() if _is_sound(name, value)}
    return used | {name: [*map(sound, used[name])] for name in _LISTS if name in used}


def read_record(path: Path) -> Record:
    """Reads a JSON file of a run; empty if there is none, or it cannot be read."""
    try:
        record = read_json(path)
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
    kind = _KINDS.get(name)
    if kind is not None:
        return kind(value)
    return type(value) is not int or abs(value) < 2**1000


def records_of_training(metrics: Path, max_bytes: int = PIECE_BYTES) -> Iterator[dict[str, Any]]:
    """Yields the records of training at the end of metrics.jsonl that have a time and a step, newest first."""
    records = records_of(last_lines(metrics, max_bytes))
    return (r for r in records if r.get("event") == "train" and {"step", "time"} <= r.keys())
