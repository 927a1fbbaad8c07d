"""Keys and requests of windows: the lane and number of a window, and its rows. partition.py plans them."""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

PURPOSE_PLAN = 1
PURPOSE_WINDOW = 2
PURPOSE_SAMPLING = 3
PURPOSE_SAMPLES = 4
PURPOSE_MODIFIERS = 5

CORPUS_SHIFT = 44
"""Shift in the row id of a batch, which is (corpus number << 44) + row number in that corpus."""


def random_generator(seed: int, purpose: int, *index: int) -> np.random.Generator:
    """Returns the generator of one purpose: the same arguments give the same numbers on every machine."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, purpose, *index])))


def order_probe() -> str:
    """Returns a digest of permutations of a fixed seed: numpy does not guarantee them across versions (NEP 19)."""
    random = random_generator(1, PURPOSE_WINDOW, 2)
    drawn = [random.permutation(count) for count in (2, 100, 3000)]
    return blake2b(np.concatenate(drawn).astype("<i8").tobytes(), digest_size=8).hexdigest()


def lane_digest(lane: int, row_ids: NDArray[np.int64]) -> int:
    """Returns a signed 64-bit hash of a micro-batch's lane and row ids."""
    text = lane.to_bytes(8, "little") + row_ids.tobytes()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little", signed=True)


def digest_text(sum_of_lanes: int) -> str:
    """Returns the recorded form of a global batch's digest: the sum of its lanes' hashes modulo 2 ** 64."""
    return f"{sum_of_lanes % 2**64:016x}"


def batch_digest(lanes: Mapping[int, NDArray[np.int64]]) -> str:
    """Returns the digest of a global batch from the row ids of its lanes."""
    return digest_text(sum(lane_digest(lane, rows) for lane, rows in lanes.items()))


@dataclass(frozen=True)
class WindowKey:
    """Key of one window of the run. `segment` counts the partitions of an epoch: 0 unless it was repartitioned."""

    epoch: int
    segment: int
    lane: int
    window: int

    def __str__(self) -> str:
        again = f", cut {self.segment} times" if self.segment else ""
        return f"window {self.window} of lane {self.lane} of epoch {self.epoch}{again}"


@dataclass(frozen=True)
class RowSlice:
    """Rows `first` to `last` (exclusive) of one row group. `corpus` is an index in `Manifest.training`."""

    corpus: int
    row_group: int
    first: int
    last: int
    pass_number: int = 0  # earlier passes over the corpus; not in positions of older checkpoints


@dataclass(frozen=True)
class WindowRequest:
    """Input of a loader process for a window; the same request gives the same window everywhere. `quarantined`: (corpus,
    row group) of row groups that were quarantined when the window was first built."""

    key: WindowKey
    slices: tuple[RowSlice, ...]
    quarantined: tuple[tuple[int, int], ...] = ()
