"""The plan: the rows of each window of each lane, as pure functions of seed, corpora and partition.

    planner = Planner(group_rows, num_lanes=8, window_rows=20_000, seed=1, stages=(Stage(0, None),))
    partition = planner.first_partition()
    plan = planner.plan(partition)
    plan.request(lane=3, window=0)         # WindowRequest(key, slices of row groups)

docs/architecture.md ("From text to micro-batches") says what streams, partitions and open windows are. A partition cuts each
pass in the quota of a stream into one equal range for each lane, so that the lanes go through a pass together. Nothing here
depends on ranks or loader processes.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from dist_transformer.data.loader import window_request
from dist_transformer.data.loader.window_request import RowSlice, WindowKey, WindowRequest

Piece = tuple[int, int, int]
"""(pass, first, last): rows of one pass over a corpus, in the order of that pass; of a lane (block, first, last)."""
Span = tuple[int, int]
"""(first, last), exclusive: rows of a stream, counted from its front."""
LanePositions = Sequence[tuple[int, int]]
"""Position of each lane: the number of its window, and the number of its micro-batches that were handed out."""


@dataclass(frozen=True)
class Stage:
    """Shares (any unit) in which corpora are drawn; None: by their rows.

    They hold from global batch `from_batch` on, but not before `after` = (corpus, so many rows of it) are drawn.
    """

    from_batch: int
    shares: tuple[int, ...] | None
    after: tuple[int, int] = (0, 0)


class StageInForce(NamedTuple):
    """The shares in force, and what the next stage waits for: (corpus, so many more rows of it); 0: for no rows."""

    shares: tuple[int, ...] | None
    waits_for: tuple[int, int]


@dataclass(frozen=True)
class Stream:
    """Rows yet to be drawn from one corpus: the pending pieces, then full passes from `next_pass` on."""

    pending: tuple[Piece, ...] = ()
    next_pass: int = 0

    @property
    def num_pending(self) -> int:
        """Number of rows of the pending pieces."""
        return self._bounds[-1]

    @cached_property
    def _bounds(self) -> list[int]:
        return _bounds_of(self.pending)

    def blocks(self, quota: int, rows_of_pass: int) -> list[Span]:
        """Splits the first `quota` rows at the start of each pass; all pending pieces are one block."""
        bounds = [0, *range(self.num_pending or rows_of_pass, quota, rows_of_pass), quota]
        return [(first, last) for first, last in pairwise(bounds) if last > first]

    def cut(self, first: int, last: int, rows_of_pass: int) -> Iterator[Piece]:
        """Yields rows `first` to `last` (exclusive), counted from the front of the stream."""
        yield from _clipped(self.pending, self._bounds, first, last)
        begin, end = max(first - self.num_pending, 0), last - self.num_pending
        for number in range(begin // rows_of_pass, -(-end // rows_of_pass)):
            start = number * rows_of_pass
            yield self.next_pass + number, max(begin - start, 0), min(end - start, rows_of_pass)

    def after(self, quota: int, left: Sequence[Span], rows_of_pass: int) -> "Stream":
        """Returns the stream without its first `quota` rows, of which the spans `left` return to the front."""
        pending = [piece for first, last in left for piece in self.cut(first, last, rows_of_pass)]
        whole_passes = -(-max(quota - self.num_pending, 0) // rows_of_pass)
        pending += self.cut(quota, self.num_pending + whole_passes * rows_of_pass, rows_of_pass)
        return Stream(tuple(pending), self.next_pass + whole_passes)


@dataclass(frozen=True)
class OpenWindow:
    """A window that was begun in an earlier partition, in which `emitted` of its micro-batches were handed out."""

    request: WindowRequest
    emitted: int


@dataclass(frozen=True)
class Partition:
    """One partition of (the rest of) an epoch into lanes.

    Attributes:
        number: number of earlier partitions of the epoch.
        quotas: rows of each corpus in this partition.
        shares: shares of its stage.
        open_windows: windows of each lane to finish before its own windows.
    """

    epoch: int
    number: int
    quotas: tuple[int, ...]
    shares: tuple[int, ...] | None
    streams: tuple[Stream, ...]
    open_windows: tuple[tuple[OpenWindow, ...], ...]


@dataclass(frozen=True)
class Planner:
    """Partitions epochs.

    Args:
        group_rows: rows of each row group of each corpus.
        num_lanes: V, the micro-batches of an optimizer step.
        window_rows: largest number of rows of a window.
        stages: in order, the first from batch 0; each begins only after the one before it.
    """

    group_rows: tuple[tuple[int, ...], ...]
    num_lanes: int
    window_rows: int
    seed: int
    stages: tuple[Stage, ...] = (Stage(0, None),)
    _orders: dict[tuple[int, int], "_PassOrder"] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Number of rows of each corpus."""
        return tuple(sum(groups) for groups in self.group_rows)

    def stage_at(self, batch: int, streams: Sequence[Stream]) -> StageInForce:
        """Returns the stage in force for a global batch of a partition that begins with these streams."""
        shares = self.stages[0].shares
        for stage in self.stages[1:]:
            corpus, rows = stage.after
            missing = rows - streams[corpus].next_pass * self.rows[corpus] + streams[corpus].num_pending
            if stage.from_batch > batch:
                break
            if missing > 0:
                return StageInForce(shares, (corpus, missing))
            shares = stage.shares
        return StageInForce(shares, (0, 0))

    def first_partition(self) -> Partition:
        return self._epoch(0, (Stream(),) * len(self.rows), 0)

    def after_epoch(self, partition: Partition, batch: int) -> Partition:
        """Returns the next epoch, after all rows of `partition` were used; `batch`: number of its first global batch."""
        return self._epoch(partition.epoch + 1, self._streams_after(partition, {}), batch)

    def repartition(self, partition: Partition, lanes: LanePositions, batch: int, num_lanes: int) -> Partition:
        """Partitions the rest of the epoch of `partition` into `num_lanes` lanes with the shares in force at `batch`."""
        plan = self.plan(partition)
        rests = [plan.rest(lane, *position) for lane, position in enumerate(lanes)]
        left = {c: _merged(span for _, spans in rests for span in spans[c]) for c in range(len(self.rows))}
        counts = [sum(last - first for first, last in spans) for spans in left.values()]
        streams = self._streams_after(partition, left)
        quotas, shares = self._quotas(tuple(counts), batch, streams)
        opened = [window for windows, _ in rests for window in windows]
        by_lane = [windows for windows, _ in rests]
        if num_lanes != len(lanes):
            by_lane = [tuple(opened[lane::num_lanes]) for lane in range(num_lanes)]
        return Partition(partition.epoch, partition.number + 1, quotas, shares, streams, tuple(by_lane))

    def plan(self, partition: Partition) -> "PartitionPlan":
        return PartitionPlan(self, partition)

    def slices(self, corpus: int, pieces: Iterator[Piece]) -> Iterator[RowSlice]:
        """Yields the rows of the pieces, as slices of row groups."""
        for number, first, last in pieces:
            yield from self._order(corpus, number).slices(first, last)

    def _epoch(self, epoch: int, streams: tuple[Stream, ...], batch: int) -> Partition:
        quotas, shares = self._quotas(self.rows, batch, streams)
        return Partition(epoch, 0, quotas, shares, streams, ((),) * self.num_lanes)

    def _quotas(
        self, rows: tuple[int, ...], batch: int, streams: Sequence[Stream]
    ) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """Returns quotas that sum up to `rows`, or end where the next stage begins, and the shares in force."""
        shares, (corpus, missing) = self.stage_at(batch, streams)
        quotas = rows if shares is None else apportion(sum(rows), shares)
        quota = quotas[corpus]
        # A stage that begins just behind them begins with them: no epoch of a few rows is left.
        if missing and quota and missing <= quota + quota // 10 + self.num_lanes:
            quotas = tuple(each * missing // quota for each in quotas)
        return quotas, shares

    def _streams_after(self, partition: Partition, left: dict[int, list[Span]]) -> tuple[Stream, ...]:
        streams = enumerate(zip(partition.streams, partition.quotas, self.rows, strict=True))
        return tuple(stream.after(quota, left.get(corpus, []), rows) for corpus, (stream, quota, rows) in streams)

    def _order(self, corpus: int, number: int) -> "_PassOrder":
        key = (corpus, number)
        if key not in self._orders:
            self._orders[key] = _PassOrder(self.group_rows[corpus], self.seed, corpus, number)
            for old in [k for k in self._orders if k[0] == corpus and k[1] < number - 1]:
                del self._orders[old]
        return self._orders[key]


class PartitionPlan:
    """The windows of one partition. The open windows of a lane come first in its numbering."""

    def __init__(self, planner: Planner, partition: Partition) -> None:
        self._planner, self._partition, self._num_lanes = planner, partition, len(partition.open_windows)
        # In each step, of perhaps thousands of passes.
        self._lane_pieces = cache(self._pieces_of)
        self._lane_bounds = cache(lambda *lane: _bounds_of(self._lane_pieces(*lane)))

    def num_windows(self, lane: int) -> int:
        return len(self._partition.open_windows[lane]) + self._num_own(lane)

    def emitted_before(self, lane: int, window: int) -> int:
        """Number of micro-batches of a window that were handed out in an earlier partition."""
        opened = self._partition.open_windows[lane]
        return opened[window].emitted if window < len(opened) else 0

    def request(self, lane: int, window: int) -> WindowRequest:
        """Returns the request for a window."""
        partition = self._partition
        opened = partition.open_windows[lane]
        if window < len(opened):
            return opened[window].request
        slices: list[RowSlice] = []
        for corpus, stream in enumerate(partition.streams):
            for span in self._spans_from(corpus, lane, *self._window_rows(corpus, lane, window - len(opened))):
                slices += self._planner.slices(corpus, stream.cut(*span, self._planner.rows[corpus]))
        return WindowRequest(WindowKey(partition.epoch, partition.number, lane, window), tuple(slices))

    def rest(self, lane: int, window: int, emitted: int) -> tuple[tuple[OpenWindow, ...], tuple[tuple[Span, ...], ...]]:
        """Returns what the lane has not handed out at this position: open windows, and spans of each corpus's stream."""
        opened = self._partition.open_windows[lane]
        left, own = opened[window:], max(window - len(opened), 0)
        if emitted:
            begun = OpenWindow(self.request(lane, window), emitted)
            left, own = (begun, *left[1:]), max(window + 1 - len(opened), 0)
        corpora = range(len(self._partition.streams))
        return left, tuple(tuple(self._rest_spans(corpus, lane, own)) for corpus in corpora)

    def _rest_spans(self, corpus: int, lane: int, own: int) -> Iterator[Span]:
        if own < self._num_own(lane):
            first, _ = self._window_rows(corpus, lane, own)
            yield from self._spans_from(corpus, lane, first, self._lane_bounds(corpus, lane)[-1])

    def _num_own(self, lane: int) -> int:
        rows = sum(self._lane_bounds(corpus, lane)[-1] for corpus in range(len(self._partition.quotas)))
        return -(-rows // self._planner.window_rows)

    def _window_rows(self, corpus: int, lane: int, own: int) -> Span:
        """Returns the rows of a window, counted from the lane's first row of the corpus."""
        rows, count = self._lane_bounds(corpus, lane)[-1], self._num_own(lane)
        return rows * own // count, rows * (own + 1) // count

    def _spans_from(self, corpus: int, lane: int, first: int, last: int) -> Iterator[Span]:
        """Yields rows `first` to `last` of a lane in the corpus, as spans of its stream."""
        pieces, bounds = self._lane_pieces(corpus, lane), self._lane_bounds(corpus, lane)
        return ((begin, end) for _, begin, end in _clipped(pieces, bounds, first, last))

    def _pieces_of(self, corpus: int, lane: int) -> tuple[Piece, ...]:
        """Returns the lane's range of each block of the stream. Ranges rotate, so that no lane's is always longer."""
        quota, stream = self._partition.quotas[corpus], self._partition.streams[corpus]
        blocks = enumerate(stream.blocks(quota, self._planner.rows[corpus]))
        return tuple((number, *self._range(lane + number, *block)) for number, block in blocks)

    def _range(self, place: int, first: int, last: int) -> Span:
        place, length = place % self._num_lanes, last - first
        return first + length * place // self._num_lanes, first + length * (place + 1) // self._num_lanes


class _PassOrder:
    """One pass over a corpus: its row groups permuted and concatenated."""

    def __init__(self, group_rows: Sequence[int], seed: int, corpus: int, number: int) -> None:
        self._corpus, self._number = corpus, number
        random = window_request.random_generator(seed, window_request.PURPOSE_PLAN, corpus, number)
        self._order = random.permutation(len(group_rows))
        self._ends = np.cumsum(np.asarray(group_rows, dtype=np.int64)[self._order])

    def slices(self, first: int, last: int) -> Iterator[RowSlice]:
        place = int(np.searchsorted(self._ends, first, side="right"))
        while first < last:
            begin = int(self._ends[place - 1]) if place else 0
            end = min(last, int(self._ends[place]))
            if end > first:
                yield RowSlice(self._corpus, int(self._order[place]), first - begin, end - begin, self._number)
            first, place = end, place + 1


def _bounds_of(pieces: Iterable[Piece]) -> list[int]:
    """Returns the place of the first row of each piece, counted from the front of the first one, then their rows."""
    return [*accumulate((last - first for _, first, last in pieces), initial=0)]


def _clipped(pieces: Sequence[Piece], bounds: Sequence[int], first: int, last: int) -> Iterator[Piece]:
    """Yields rows `first` to `last` (exclusive) of the pieces, which have these bounds; walks no other piece."""
    for place in range(bisect_right(bounds, first) - 1, bisect_left(bounds, last, hi=len(pieces))):
        number, begin, _ = pieces[place]
        shift = begin - bounds[place]
        yield number, shift + max(first, bounds[place]), shift + min(last, bounds[place + 1])


def _merged(spans: Iterable[Span]) -> list[Span]:
    merged: list[Span] = []
    for first, last in sorted(spans):
        if merged and merged[-1][1] == first:
            first = merged.pop()[0]
        merged.append((first, last))
    return merged


def apportion(rows: int, shares: Sequence[int]) -> tuple[int, ...]:
    """Divides `rows` by shares into integers, by cumulative rounding.

    The running total after each corpus is exact to half a row, so that no corpus is off by more than one.
    """
    total = sum(shares)
    ends = [(rows * running + total // 2) // total for running in accumulate(shares)]
    return tuple(end - begin for begin, end in zip([0, *ends], ends, strict=False))
