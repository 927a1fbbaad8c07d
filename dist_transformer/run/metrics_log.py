"""JSON lines that a run appends to: metrics.jsonl and audit.jsonl, the local record that every tracker reads.

    {"event": "train", "step": 50, "time": 1767225600.125, "loss": 9.01, "learning_rate": 1.7e-05}
    {"event": "validation", "step": 50, "time": 1767225603.5, "loss": 8.87, "bleu": 0.1}

A line is complete or recognisably torn (no newline at its end). NaN and infinities are the strings "nan", "inf",
"-inf", because JSON has no such numbers; they are read back as floats.
"""

import json
import logging
import math
import os
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import nullcontext, suppress
from io import FileIO
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from dist_transformer.errors import say
from dist_transformer.files import repeatedly, replacing
from dist_transformer.run.records import records_of
from dist_transformer.run.tail import end_of_last_line, lines_backwards, lines_from

logger = logging.getLogger(__name__)

Value = float | int | str
FIELDS = ("event", "step", "time")
"""Fields of every record; its other entries are its values."""
NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class MetricsLog:
    """Rank 0's append-only file of records, each written to `echo` too. Opening it removes what a crash left of a line or
    of a copy."""

    def __init__(self, path: Path, echo: TextIO | None = None) -> None:
        self.path, self._echo = path, echo
        path.parent.mkdir(parents=True, exist_ok=True)
        for left_over in path.parent.glob(f".{path.name}.[0-9]*.[0-9]*.tmp"):  # of a rewind that was killed
            left_over.unlink(missing_ok=True)
        _remove_torn_line(path)
        self._pending = b""
        self._file: FileIO | None = path.open("ab", buffering=0)
        self._end = self._file.tell()

    def append(self, event: str, step: int, values: Mapping[str, Any]) -> None:
        """Writes one record and passes it to the operating system, so that a killed process does not lose it. Records
        that the disk does not take are kept in memory, and written with a later one."""
        head: dict[str, Any] = {"event": event, "step": step, "time": round(time.time(), 3)}
        assert head.keys().isdisjoint(values), f"a value is named like a field of every record: {sorted(values)}"
        line = _encode(head | dict(values))
        if self._echo is not None:
            say(line[:-1], self._echo)
        self._pending += line.encode()
        try:
            self._write()
        except OSError as error:
            logger.warning("%s: %s; its records are kept in memory until the disk takes them", self.path, error)

    def rewind(self, last: int, field: str = "step", *, in_place: bool = False) -> None:
        """Drops the records beyond `last`: a run that resumes there writes them again, and none is there twice. Reads back
        to the newest of a step, batch or samples that is not beyond: others, as `goodput`, may be of an earlier step.
        `in_place`: cuts a file that may be huge; readers of the others see by a new file that it was cut."""
        self.close()
        end = self.path.stat().st_size + 1
        for line in lines_backwards(self.path, end - 1):
            record = _decode(line) or {}
            if record.get(field, last + 1) <= last and record["event"] in ("train", "batch", "samples"):
                break
            end -= len(line) + 1
        if any(record.get(field, 0) > last for record, _ in read_records_from(self.path, end)):
            kept = [_encode(record) for record, _ in read_records_from(self.path, end) if record.get(field, 0) <= last]
            with nullcontext(self.path) if in_place else replacing(self.path) as changed:
                if not in_place:
                    shutil.copyfile(self.path, changed)
                os.truncate(changed, end)
                with changed.open("a", encoding="utf-8") as file:
                    file.writelines(kept)
        self._end = self.path.stat().st_size

    def close(self) -> None:
        """Closes the file. Records that the disk does not take in several attempts are lost, with a warning."""
        try:
            repeatedly(self.path, self._write, (), "written")
        except OSError as error:
            logger.warning("%s: %s; its last records are lost", self.path, error)
        self._close()

    def _write(self) -> None:
        """Writes the pending records. What an attempt that failed has left of them in the file is cut off first."""
        try:
            if self._pending and self._file is None:
                self._file = self.path.open("ab", buffering=0)  # a handle that went stale never recovers
                self._file.truncate(self._end)
            while self._pending and self._file is not None:
                self._pending = self._pending[self._file.write(self._pending) :]
                self._end = self._file.tell()
        except OSError:
            self._close()
            raise

    def _close(self) -> None:
        file, self._file = self._file, None
        with suppress(OSError):
            if file is not None:
                file.close()


def add_event(path: Path, event: str, details: Mapping[str, Any]) -> None:
    """Appends one record to a file that several processes write to, one after the other. Raises OSError."""
    add_line(path, event_line(event, details))


def event_line(event: str, details: Mapping[str, Any]) -> bytes:
    """Returns the line of a record of this moment."""
    return _encode({"event": event, "time": round(time.time(), 3), **details}).encode()


def add_line(path: Path, line: bytes) -> None:
    """Appends one line as `add_event` does: without a buffer, which would write it after an error was raised."""
    _remove_torn_line(path)
    with path.open("ab", buffering=0) as file:
        while line:
            line = line[file.write(line) :]


def read_records(path: Path, *events: str) -> Iterator[dict[str, Any]]:
    """Yields the records of `path`, or only of `events`, oldest first; none if it is no file. Skips torn and damaged lines."""
    yield from (record for record, _ in read_records_from(path, 0, events))


def read_records_from(path: Path, offset: int, events: Collection[str] = ()) -> Iterator[tuple[dict[str, Any], int]]:
    """Yields the records after byte `offset`, each with the offset of its end, at which a later call may begin."""
    names = [f'"{event}"'.encode() for event in events]
    if not path.is_file():
        return
    for line, end in lines_from(path, offset):
        if names and not any(name in line for name in names):
            continue  # not parsed, which takes most of the time
        record = _decode(line)
        if record is None:
            logger.warning("%s: the line that ends at byte %d is damaged and skipped", path, end)
        elif not events or record["event"] in events:
            yield record, end


def newest_record(path: Path, event: str) -> dict[str, Any]:
    """Returns the last record of `event` that has a step, and reads only what follows it; {"step": 0}: there is none."""
    name = f'"{event}"'.encode()
    for line in islice(lines_backwards(path), 1, None) if path.is_file() else ():  # the first one is torn, or empty
        if name in line and "step" in (record := _decode(line) or {}) and record["event"] == event:
            return record
    return {"step": 0}


def _remove_torn_line(path: Path) -> None:
    """Truncates `path` after its last newline: the rest is an incomplete line."""
    if path.exists() and (whole := end_of_last_line(path)) < path.stat().st_size:
        os.truncate(path, whole)


def _encode(record: Mapping[str, Any]) -> str:
    """Returns one record as one line; bytes of a path that are not UTF-8 become `?`."""
    return json.dumps(finite(record), ensure_ascii=False, allow_nan=False).encode(errors="replace").decode() + "\n"


def finite(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a record with text in place of numbers that JSON does not have: nan, inf."""
    odd = {key: str(value) for key, value in record.items() if isinstance(value, float) and not math.isfinite(value)}
    return {**record, **odd}


def _decode(line: bytes) -> dict[str, Any] | None:
    record = next(records_of([line]), {})
    if "event" not in record:
        return None
    return {key: NOT_FINITE.get(value, value) if isinstance(value, str) else value for key, value in record.items()}
