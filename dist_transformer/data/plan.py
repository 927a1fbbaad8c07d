"""The plan: which rows of an epoch belong to which window of which lane, as a pure function.

    plan = EpochPlan(rows_of_row_groups, num_lanes=8, window_rows=20_000, seed=1, epoch=0)
    plan.slices(lane=3, window=0)   # [RowSlice(row_group=17, first=120, last=4096), RowSlice(4, 0, 1500)]

The row groups of the prepared corpus are permuted by (seed, epoch) and laid end to end; this sequence of rows is cut
into one equal range for each lane, and each range into equal windows. Nothing here knows ranks or workers, so the
global batches do not depend on them (promise P1); every row lies in exactly one window (P2).
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

PURPOSE_PLAN = 1
PURPOSE_WINDOW = 2


def random_generator(seed: int, purpose: int, *index: int) -> np.random.Generator:
    """The generator of one purpose: the same arguments give the same numbers on every machine."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, purpose, *index])))


@dataclass(frozen=True)
class WindowKey:
    """Names one window of the run."""

    epoch: int
    lane: int
    window: int


@dataclass(frozen=True)
class RowSlice:
    """Rows `first` to `last` (exclusive) of one row group."""

    row_group: int
    first: int
    last: int


@dataclass(frozen=True)
class EpochPlan:
    """Rows of one epoch, cut into lanes and windows.

    Args:
        group_rows: rows of each row group, in manifest order.
        num_lanes: V, the micro-batches of an optimizer step.
        window_rows: most rows of a window.
    """

    group_rows: tuple[int, ...]
    num_lanes: int
    window_rows: int
    seed: int
    epoch: int

    @cached_property
    def order(self) -> NDArray[np.int64]:
        """Row groups in the order of this epoch."""
        return random_generator(self.seed, PURPOSE_PLAN, self.epoch).permutation(len(self.group_rows))

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """Position after the last row of each row group, in the order of this epoch."""
        return np.cumsum(np.asarray(self.group_rows, dtype=np.int64)[self.order])

    @property
    def num_rows(self) -> int:
        return int(self.ends[-1]) if self.group_rows else 0

    def num_windows(self, lane: int) -> int:
        first, last = self._lane_range(lane)
        return -(-(last - first) // self.window_rows)

    def slices(self, lane: int, window: int) -> list[RowSlice]:
        """The rows of one window, as slices of row groups."""
        lane_first, lane_last = self._lane_range(lane)
        count, length = self.num_windows(lane), lane_last - lane_first
        first, last = lane_first + length * window // count, lane_first + length * (window + 1) // count
        place = int(np.searchsorted(self.ends, first, side="right"))
        slices = []
        while first < last:
            group = int(self.order[place])
            group_first = int(self.ends[place]) - self.group_rows[group]
            end = min(last, int(self.ends[place]))
            if end > first:
                slices.append(RowSlice(group, first - group_first, end - group_first))
            first, place = end, place + 1
        return slices

    def _lane_range(self, lane: int) -> tuple[int, int]:
        return self.num_rows * lane // self.num_lanes, self.num_rows * (lane + 1) // self.num_lanes
