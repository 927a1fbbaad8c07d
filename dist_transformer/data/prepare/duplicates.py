"""Pairs that repeat earlier ones, exactly or nearly, in bounded memory: docs/data.md.

Each chunk of a corpus leaves the keys of its pairs (see sentences.py), and their signatures where they are needed, in
files that are compared a partition of the range of keys at a time.

Near-duplicates are found by MinHash with locality-sensitive hashing: four bytes of a signature are a band, and pairs with
an equal band are compared by their whole signatures with the first and with the last pair before that has it.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dist_transformer.data.filters import REPETITION_RULES, KeptText
from dist_transformer.data.sentences import SIGNATURE, Keys
from dist_transformer.files import replacing

PARTITION_HASHES = 1 << 24
"""Number of keys that are compared at a time: 1 GB of memory with their places and the sorting."""
CANDIDATES = 1 << 18
"""Number of pairs whose signatures are compared at a time."""
Ints = NDArray[np.int64]
Repeated = dict[str, Ints]
"""Numbers of the rows that repeat others, by rule."""
BatchKeys = tuple[Ints, Keys, NDArray[np.uint8]]


def batch_keys(text: KeptText, first_row: int) -> BatchKeys:
    """Returns the row numbers, keys and signatures of the pairs of a batch."""
    return text.positions + first_row, text.keys, text.signatures


def save_keys(path: Path, batches: Sequence[BatchKeys]) -> None:
    """Writes the files of a chunk that `Comparison` reads, from the keys of its batches."""
    rows, keys, signatures = zip(*batches, strict=True)
    save_hashes(_file(path, "rows"), np.concatenate(rows))
    _save_sorted(path, "keys", np.concatenate(keys)[None])
    held = [each for each in signatures if each.size] or [np.empty((0, SIGNATURE), np.uint8)]
    bands = np.ascontiguousarray(np.concatenate(held).view(np.uint32).T)
    save_hashes(_file(path, "bands"), bands)
    _save_sorted(path, "bands", bands)


def load_repeated(path: Path, rules: Sequence[str]) -> Repeated:
    """Reads the rows of a chunk that `Comparison.mark` wrote for some rules."""
    return {rule: np.array(load_hashes(_file(path, rule))) for rule in rules}


class Comparison:
    """The comparison of the pairs of all chunks, in parts that any processes find, in any order.

    Args:
        corpora: paths of the chunks, and thresholds, of each corpus in order; corpora without a rule take no part in it.
        progress: called for every file that is read, so that a stop request is taken.
    """

    def __init__(
        self, corpora: Sequence[tuple[Sequence[Path], dict[str, float]]], progress: Callable[[], None]
    ) -> None:
        self._chunks = [(path, thresholds) for paths, thresholds in corpora for path in paths]
        # A pair's place is its number in the order of the corpora: those of chunk n begin at `_begins[n]`.
        self._begins = np.cumsum([0, *(len(load_hashes(_file(path, "rows"))) for path, _ in self._chunks)])
        self._progress = progress
        self._parts = [part for rule in REPETITION_RULES for part in self._parts_of(rule)]
        self.num_parts = len(self._parts)

    def find(self, number: int) -> None:
        """Finds the pairs of a part that repeat others, and writes them to a file. Memory: a partition of keys."""
        rule = self._parts[number][0]
        places, firsts = self._alike(*self._parts[number])
        later = np.flatnonzero(firsts < np.arange(len(places)))
        limits = np.array([limits.get(rule, 0) for _, limits in self._chunks])[self._chunks_of(places[later])]
        # Of equal pairs those repeat others of which there are as many as allowed before.
        values = later - firsts[later] if rule == "duplicates" else self._similarities(places, firsts, later)
        save_hashes(self._found(number), places[later[values >= limits]])

    def mark(self) -> None:
        """Writes the files for `load_repeated`, once all parts are found. Memory: a byte a pair."""
        marks = np.zeros(self._begins[-1], np.int8)
        for number, (rule, *_) in enumerate(self._parts):
            places = load_hashes(self._found(number))
            marks[places[marks[places] == 0]] = REPETITION_RULES.index(rule) + 1
        for (path, limits), begin, end in zip(self._chunks, self._begins, self._begins[1:], strict=False):
            self._progress()
            for number, rule in enumerate(REPETITION_RULES, start=1):
                if rule in limits:
                    save_hashes(_file(path, rule), load_hashes(_file(path, "rows"))[marks[begin:end] == number])

    def _parts_of(self, rule: str) -> list[tuple[str, int, int, int]]:
        """Returns (rule, band, number of the partition, number of all partitions) of each part."""
        pairs = sum(np.diff(self._begins)[number] for number, (_, limits) in enumerate(self._chunks) if rule in limits)
        partitions, bands = math.ceil(pairs / PARTITION_HASHES), 1 if rule == "duplicates" else SIGNATURE // 4
        return [(rule, band, part, partitions) for band in range(bands) for part in range(partitions)]

    def _alike(self, rule: str, band: int, part: int, num_partitions: int) -> tuple[Ints, Ints]:
        """Returns the places of all pairs of a partition, those of equal keys in a row in their order, and where in it
        each key begins. Of a file only this part is read, and it is open only while that is copied."""
        values, places = [], []
        for (path, limits), begin in zip(self._chunks, self._begins, strict=False):
            self._progress()
            if rule in limits:
                keys, order = _load_sorted(path, "keys" if rule == "duplicates" else "bands")[:, band]
                low, high = ((1 << 8 * keys.itemsize) * n // num_partitions for n in (part, part + 1))
                first = np.searchsorted(keys, keys.dtype.type(low))
                last = np.searchsorted(keys, keys.dtype.type(high - 1), side="right")
                values.append(np.array(keys[first:last]))
                places.append(order[first:last].astype(np.int64) + begin)
        joined = np.concatenate(values)
        order = np.argsort(joined, kind="stable")
        is_first = np.concatenate([[True], np.diff(joined[order]) != 0])[: len(order)]
        return np.concatenate(places)[order], np.maximum.accumulate(np.where(is_first, np.arange(len(order)), 0))

    def _similarities(self, places: Ints, firsts: Ints, later: Ints) -> NDArray[np.float64]:
        """Returns the similarity of pairs to the first or to the last one before that has their band, the higher one."""
        found = [np.empty(0)]
        for begin in range(0, len(later), CANDIDATES):
            these = later[begin : begin + CANDIDATES]
            own, *others = (self._signatures(places[each]) for each in (these, firsts[these], these - 1))
            found.append(np.max([np.mean(own == each, axis=1) for each in others], axis=0))
        return np.concatenate(found)

    def _signatures(self, places: Ints) -> NDArray[np.uint8]:
        chunks, found = self._chunks_of(places), np.empty((len(places), SIGNATURE // 4), np.uint32)
        for chunk in np.unique(chunks).tolist():
            self._progress()
            own = chunks == chunk
            found[own] = load_hashes(_file(self._chunks[chunk][0], "bands"))[:, places[own] - self._begins[chunk]].T
        return found.view(np.uint8)

    def _chunks_of(self, places: Ints) -> Ints:
        return np.searchsorted(self._begins, places, side="right") - 1

    def _found(self, number: int) -> Path:
        return _file(self._chunks[0][0].with_name("+repeated"), f"{number:05d}")


def _save_sorted(path: Path, name: str, keys: NDArray[Any]) -> None:
    """Writes keys (bands, pairs) of a chunk, those of each band sorted, and the numbers of their pairs."""
    order = np.argsort(keys, axis=1, kind="stable")
    save_hashes(_file(path, f"{name}.sorted"), np.stack([np.take_along_axis(keys, order, 1), order.astype(keys.dtype)]))


def _load_sorted(path: Path, name: str) -> Any:
    """Maps the array (2, bands, pairs) of `_save_sorted`; makes it first for a chunk of the version before."""
    if not _file(path, f"{name}.sorted").exists():
        _save_sorted(path, name, np.atleast_2d(load_hashes(_file(path, name))))
    return load_hashes(_file(path, f"{name}.sorted"))


def load_hashes(path: Path) -> Any:
    """Maps the numbers of a file into memory, without reading them yet."""
    return np.load(path, mmap_mode="r")


def _file(path: Path, name: str) -> Path:
    return path.with_name(f"{path.name}.{name}.npy")


def save_hashes(path: Path, values: NDArray[Any]) -> None:
    """Writes numbers to a file, for `load_hashes`."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.save(file, values)
