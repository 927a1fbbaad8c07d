"""Names of the data order: which window of which lane, made of which rows. See segments.py for how they are cut."""

from dataclasses import dataclass

import numpy as np

PURPOSE_PLAN = 1
PURPOSE_WINDOW = 2
PURPOSE_SAMPLING = 3

CORPUS_SHIFT = 44
"""The row id in a batch is (corpus number << 44) + row number in that corpus."""


def random_generator(seed: int, purpose: int, *index: int) -> np.random.Generator:
    """The generator of one purpose: the same arguments give the same numbers on every machine."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, purpose, *index])))


@dataclass(frozen=True)
class WindowKey:
    """Names one window of the run. `segment` counts the cuts of an epoch into lanes: 0 unless it was cut anew."""

    epoch: int
    segment: int
    lane: int
    window: int


@dataclass(frozen=True)
class RowSlice:
    """Rows `first` to `last` (exclusive) of one row group. `corpus` is a number in `Manifest.training`."""

    corpus: int
    row_group: int
    first: int
    last: int


@dataclass(frozen=True)
class WindowRequest:
    """All that a loader process needs to build a window; the same request gives the same window everywhere.

    Attributes:
        without: (corpus, row group) of row groups that are left out, since they were when the window was first built.
    """

    key: WindowKey
    slices: tuple[RowSlice, ...]
    without: tuple[tuple[int, int], ...] = ()
