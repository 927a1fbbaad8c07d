"""Pairs that repeat earlier ones, exactly or nearly, in bounded memory.

Each chunk of a corpus leaves the keys of its pairs (see sentences.py), and their signatures where they are needed, in
files that are compared a partition of the range of keys at a time. Of pairs that are alike the first in the order of the
corpora stays, so the result does not depend on which process read which chunk.

Near-duplicates are found by MinHash with locality-sensitive hashing: four bytes of a signature are a band, and pairs with
an equal band are compared by their whole signatures with the first and with the last pair before that has it. (Signatures
by datasketch take seven times as long, more than all other rules together.)
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dist_transformer.data.filters import REPETITION_RULES, KeptText
from dist_transformer.data.sentences import SIGNATURE, Keys
from dist_transformer.files import replacing

PARTITION_HASHES = 1 << 24
"""Number of keys that are compared at a time: 128 MiB."""
CANDIDATES = 1 << 18
"""Number of pairs whose signatures are compared at a time."""
Ints = NDArray[np.int64]
Repeated = dict[str, Ints]
"""Numbers of the rows that repeat others, by rule."""


class ChunkKeys:
    """Row numbers, keys and signatures of the pairs of a chunk, collected batch by batch."""

    def __init__(self) -> None:
        self._rows: list[Ints] = []
        self._keys: list[Keys] = []
        self._signatures: list[NDArray[np.uint8]] = []

    def add(self, text: KeptText, first_row: int) -> None:
        """Appends the pairs of a batch."""
        self._rows.append(text.positions + first_row)
        self._keys.append(text.keys)
        self._signatures.append(text.signatures)

    def save(self, path: Path) -> None:
        """Writes the files that `mark_repeated` reads."""
        save_hashes(_file(path, "rows"), np.concatenate(self._rows))
        save_hashes(_file(path, "keys"), np.concatenate(self._keys))
        signatures = [each for each in self._signatures if each.size] or [np.empty((0, SIGNATURE), np.uint8)]
        save_hashes(_file(path, "bands"), np.ascontiguousarray(np.concatenate(signatures).view(np.uint32).T))


def load_repeated(path: Path, rules: Sequence[str]) -> Repeated:
    """Reads the rows of a chunk that `mark_repeated` found for some rules."""
    return {rule: np.array(load_hashes(_file(path, rule))) for rule in rules}


def mark_repeated(corpora: Sequence[tuple[Sequence[Path], dict[str, float]]]) -> None:
    """Finds the rows that each of REPETITION_RULES drops, for `load_repeated`. Memory: a partition of keys, a byte a pair.

    Args:
        corpora: paths of the chunks, and thresholds, of each corpus in order; corpora without a rule take no part in it.
    """
    chunks = [(path, thresholds) for paths, thresholds in corpora for path in paths]
    begins = [0, *accumulate(len(load_hashes(_file(path, "rows"))) for path, _ in chunks)]
    marks = np.zeros(begins[-1], np.int8)
    for number, rule in enumerate(REPETITION_RULES, start=1):
        own = [
            (path, begin, limits[rule]) for (path, limits), begin in zip(chunks, begins, strict=False) if rule in limits
        ]
        pairs = _Pairs([path for path, _, _ in own], np.array([begin for _, begin, _ in own], np.int64))
        limits_of_chunks = np.array([limit for _, _, limit in own])
        for places in (pairs.too_many if rule == "duplicates" else pairs.too_similar)(limits_of_chunks):
            marks[places[marks[places] == 0]] = number
        for (path, limits), begin, end in zip(chunks, begins, begins[1:], strict=False):
            if rule in limits:
                save_hashes(_file(path, rule), load_hashes(_file(path, "rows"))[marks[begin:end] == number])


@dataclass(frozen=True)
class _Pairs:
    """The pairs of some chunks by their places in the order of the corpora: those of chunk n begin at `begins[n]`."""

    paths: Sequence[Path]
    begins: Ints

    def too_many(self, limits: NDArray[np.float64]) -> Iterator[Ints]:
        """Yields the places of pairs of which there are as many as allowed before."""
        for places, firsts in self.alike(lambda path: load_hashes(_file(path, "keys"))):
            yield places[np.arange(len(places)) - firsts >= limits[self._chunks(places)]]

    def too_similar(self, limits: NDArray[np.float64]) -> Iterator[Ints]:
        """Yields the places of pairs of which one that is at least so similar stands before."""
        for band in range(SIGNATURE // 4):
            for places, firsts in self.alike(lambda path, band=band: load_hashes(_file(path, "bands"))[band]):  # type: ignore[misc]
                later = np.flatnonzero(firsts < np.arange(len(places)))
                for begin in range(0, len(later), CANDIDATES):
                    these = later[begin : begin + CANDIDATES]
                    own, least = self._signatures(places[these]), limits[self._chunks(places[these])]
                    others = [self._signatures(places[each]) for each in (firsts[these], these - 1)]
                    yield places[these[np.max([np.mean(own == each, axis=1) for each in others], axis=0) >= least]]

    def alike(self, keys_of: Callable[[Path], Any]) -> Iterator[tuple[Ints, Ints]]:
        """Yields the places of all pairs, those of equal keys in a row in their order, and where in it each key begins.

        A file is open only while its part is copied.
        """
        num_partitions = math.ceil(sum(len(keys_of(path)) for path in self.paths) / PARTITION_HASHES)
        for part in range(num_partitions):
            values, places = [], []
            for path, begin in zip(self.paths, self.begins, strict=True):
                keys = keys_of(path)
                low, high = ((1 << 8 * keys.itemsize) * n // num_partitions for n in (part, part + 1))
                inside = np.flatnonzero((keys >= low) & (keys <= high - 1))
                values.append(keys[inside])
                places.append(inside + begin)
            joined = np.concatenate(values)
            order = np.argsort(joined, kind="stable")
            is_first = np.concatenate([[True], np.diff(joined[order]) != 0])[: len(order)]
            yield np.concatenate(places)[order], np.maximum.accumulate(np.where(is_first, np.arange(len(order)), 0))

    def _chunks(self, places: Ints) -> Ints:
        return np.searchsorted(self.begins, places, side="right") - 1

    def _signatures(self, places: Ints) -> NDArray[np.uint8]:
        chunks, found = self._chunks(places), np.empty((len(places), SIGNATURE // 4), np.uint32)
        for chunk in np.unique(chunks).tolist():
            own = chunks == chunk
            found[own] = load_hashes(_file(self.paths[chunk], "bands"))[:, places[own] - self.begins[chunk]].T
        return found.view(np.uint8)


def load_hashes(path: Path) -> Any:
    """Maps the numbers of a file into memory, without reading them yet."""
    return np.load(path, mmap_mode="r")


def _file(path: Path, name: str) -> Path:
    return path.with_name(f"{path.name}.{name}.npy")


def save_hashes(path: Path, values: NDArray[Any]) -> None:
    """Writes numbers to a file, for `load_hashes`."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.save(file, values)
