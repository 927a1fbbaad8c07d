"""Sharing the work of a preparation among any number of processes, on one or more machines with a common disk.

The work is divided into units: chunks of a corpus, parts of a comparison, ranges of a shuffle. No process assigns them: a process
claims a unit by its lock, writes its files, and finally its result; a unit with a result is done. The lock of a process
that died is free, so another one builds the unit, with the same result, since a unit depends on nothing but its number.

The folder `work` in the prepared folder, which is removed at the end, contains
    state.json                   results of one process for all: rows, tokenizer (scan.py)
    train-chunk-00000.json ...   results
    locks/, spill/, hashes/
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import BaseFileLock, FileLock, Timeout

from dist_transformer.data.manifest import MANIFEST_NAME
from dist_transformer.files import read_json, write_json

WORK_FOLDER = "work"
WAITING = "waiting for another process"
"""Stage that is reported while a process only waits."""


class WorkFinishedError(Exception):
    """Another process has completed the prepared folder, and is removing the work folder."""


class Work:
    """The units of the preparation in `folder`: their claims and results."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / WORK_FOLDER
        self._manifest = folder / MANIFEST_NAME
        self._done: set[str] = set()

    def is_done(self, unit: str) -> bool:
        """True if the unit has a result."""
        if unit not in self._done and self._path(unit).exists():
            self._done.add(unit)
        return unit in self._done

    def result(self, unit: str) -> Any:
        """Reads the result of a unit that is done; WorkFinishedError if it was removed since."""
        try:
            return read_json(self._path(unit))
        except FileNotFoundError:
            self._refuse_finished()
            raise

    def claim(self, unit: str) -> BaseFileLock | None:
        """Returns the lock of a unit, to be released after `finish`; None if it is done, or claimed elsewhere.

        Raises WorkFinishedError if the preparation is complete.
        """
        if self.is_done(unit):
            return None
        locks = self.folder / "locks"
        locks.mkdir(parents=True, exist_ok=True)
        # A soft lock, the fallback on file systems without locks, would outlive a process that dies.
        lock = FileLock(locks / f"{unit}.lock", fallback_to_soft=False)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            return None
        except FileNotFoundError:  # the work folder was removed meanwhile
            self._refuse_finished()
            raise
        # In this order: results are removed only after the manifest is written.
        if not self.is_done(unit) and not self._manifest.exists():
            return lock
        lock.release()
        self._refuse_finished()
        return None

    @contextmanager
    def claimed(self, unit: str) -> Iterator[bool]:
        """Claims a unit for the duration of a block; yields True if the claim succeeded."""
        lock = self.claim(unit)
        try:
            yield lock is not None
        finally:
            if lock is not None:
                lock.release()

    def is_free(self, unit: str) -> bool:
        """True if the unit is neither done nor claimed."""
        with self.claimed(unit) as is_ours:
            return is_ours

    def finish(self, unit: str, result: Any) -> None:
        """Marks the unit as done; its files must be on the disk."""
        write_json(self._path(unit), result)

    def _path(self, unit: str) -> Path:
        return self.folder / f"{unit}.json"

    def _refuse_finished(self) -> None:
        if self._manifest.exists():
            raise WorkFinishedError


class ChunkClaims:
    """Claims chunks for this process while it reads a corpus: those that are free when the reading reaches them."""

    def __init__(self, work: Work, corpus: str, chunk_rows: int) -> None:
        self.num_chunks = 0
        """Number of chunks in the part of the corpus that was read."""
        self._work, self._corpus, self._chunk_rows = work, corpus, chunk_rows
        self._locks: dict[int, BaseFileLock] = {}

    def wants(self, first_row: int) -> bool:
        """True if the batch from this row on is in a claimed chunk; to be called for every batch in order."""
        chunk = first_row // self._chunk_rows
        if chunk == self.num_chunks:
            self.num_chunks += 1
            if lock := self._work.claim(chunk_unit(self._corpus, chunk)):
                self._locks[chunk] = lock
        return chunk in self._locks

    def finish(self, chunk: int, result: Any) -> None:
        """Marks a claimed chunk as done."""
        self._work.finish(chunk_unit(self._corpus, chunk), result)
        self._locks.pop(chunk).release()

    @property
    def unfinished(self) -> tuple[int, ...]:
        """Claimed chunks that are not marked as done."""
        return tuple(self._locks)

    def close(self) -> None:
        """Releases unfinished chunks to other processes."""
        for lock in self._locks.values():
            lock.release()
        self._locks.clear()


def chunk_unit(corpus: str, chunk: int) -> str:
    return f"{corpus}-chunk-{chunk:05d}"


def end_unit(corpus: str) -> str:
    """Unit whose result is the number of chunks of the corpus."""
    return f"{corpus}-end"


def range_unit(corpus: str, index: int) -> str:
    return f"{corpus}-range-{index:05d}"
