"""Counts pairs that occur more than once, in bounded memory: every pair is a stable 64-bit hash in a sorted file.

At 10^9 different pairs about 27 share a hash with another one by chance (n^2 / 2^65).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dist_transformer.files import replacing

HASH_BYTES = 8
PARTITION_HASHES = 1 << 24
"""Number of hashes that are compared at a time: 128 MiB."""
HASH_LIMIT = 1 << 64

HashArray = NDArray[np.uint64]


@dataclass(frozen=True)
class Hashes:
    """A hash of each pair, and a hash of each source alone."""

    pairs: HashArray
    sources: HashArray

    @staticmethod
    def together(parts: Sequence["Hashes"]) -> "Hashes":
        """Returns the hashes of all parts."""
        return Hashes(np.concatenate([part.pairs for part in parts]), np.concatenate([part.sources for part in parts]))


def pair_hashes(sources: Sequence[str], targets: Sequence[str]) -> Hashes:
    """Hashes pairs, without white space around the sentences; the same text has the same hash everywhere."""
    source_bytes = [_bytes(text) for text in sources]
    pairs = (source + b"\n" + _bytes(target) for source, target in zip(source_bytes, targets, strict=True))
    return Hashes(_hashed(pairs), _hashed(source_bytes))


def save_hashes(path: Path, hashes: HashArray) -> None:
    """Writes the sorted hashes to a file for the functions below."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.save(file, np.sort(hashes))


def load_hashes(path: Path) -> HashArray:
    """Maps the hashes of a file into memory, without reading them yet."""
    hashes: HashArray = np.load(path, mmap_mode="r")
    return hashes


def count_repeated(files: Sequence[Path]) -> int:
    """Counts the hashes in all files that repeat another one: all of them except one of each value."""
    total = sum(len(load_hashes(path)) for path in files)
    num_partitions = math.ceil(total / PARTITION_HASHES)
    return total - sum(_num_different(files, part, num_partitions) for part in range(num_partitions))


def count_contained(hashes: HashArray, files: Iterable[Path]) -> int:
    """Counts the members of `hashes` that are in at least one of the files."""
    found = np.zeros(len(hashes), dtype=np.bool_)
    for path in files:
        sorted_hashes = load_hashes(path)
        if len(sorted_hashes):
            places = np.searchsorted(sorted_hashes, hashes)
            found |= sorted_hashes[np.minimum(places, len(sorted_hashes) - 1)] == hashes
    return int(np.count_nonzero(found))


def _num_different(files: Sequence[Path], part: int, num_partitions: int) -> int:
    """Counts different hashes in one partition of their range. A file is open only while its part is copied."""
    first, last = (HASH_LIMIT * index // num_partitions for index in (part, part + 1))
    pieces = []
    for path in files:
        hashes = load_hashes(path)
        begin = np.searchsorted(hashes, np.uint64(first))
        end = len(hashes) if last == HASH_LIMIT else np.searchsorted(hashes, np.uint64(last))
        pieces.append(np.array(hashes[begin:end]))
    values = np.sort(np.concatenate(pieces))
    return int(np.count_nonzero(np.diff(values))) + bool(len(values))


def _bytes(text: str) -> bytes:
    # A JSON file can contain half a surrogate pair, which is no UTF-8.
    return text.strip().encode("utf-8", errors="surrogatepass")


def _hashed(texts: Iterable[bytes]) -> HashArray:
    digests = b"".join(blake2b(text, digest_size=HASH_BYTES).digest() for text in texts)
    return np.frombuffer(digests, dtype="<u8").astype(np.uint64)
