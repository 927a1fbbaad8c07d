"""The loader: yields the micro-batches of a rank's lanes, step by step, and keeps the position to resume from.

loader = LaneLoader(builder, planner, position, batch, [0, 2], settings)
step = loader.next_step()         # one micro-batch for each lane, None where the lane's epoch has ended
loader.lane_positions()           # advanced by micro-batches handed out, not by prefetched ones
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from dist_transformer.data.loader.partition import LanePositions, Partition, Planner
from dist_transformer.data.loader.position import Position, Quarantined
from dist_transformer.data.loader.window import BatchShape, Window, WindowBuilder
from dist_transformer.data.loader.window_request import CORPUS_SHIFT, WindowKey, WindowRequest, lane_digest
from dist_transformer.data.loader.workers import LoaderSettings, WindowStream
from dist_transformer.errors import MachineError

Quarantine = dict[WindowKey, tuple[tuple[int, int], ...]]
"""The quarantined (corpus, row group) pairs of each window."""
STALL_SHARE = 0.5
"""Share of training.hang_seconds to wait for a window: the loader can report what is missing, the watchdog could not."""


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch of one lane. All ids are int64; padding is at the end of each row.

    source_BS: source tokens ending with end-of-sentence. target_in_BT: decoder input, beginning with begin-of-sentence.
    target_out_BT: the tokens to predict, ending with end-of-sentence. row_ids: (B,), see CORPUS_SHIFT.
    """

    lane: int
    shape: BatchShape
    source_BS: torch.Tensor
    target_in_BT: torch.Tensor
    target_out_BT: torch.Tensor
    row_ids: torch.Tensor

    def digest(self) -> int:
        """Returns a signed 64-bit hash; a step's digest is the sum over its lanes (mod 2**64)."""
        return lane_digest(self.lane, self.row_ids.numpy())

    def pairs_by_corpus(self, num_corpora: int) -> list[int]:
        return torch.bincount(self.row_ids >> CORPUS_SHIFT, minlength=num_corpora).tolist()


@dataclass(frozen=True)
class LocalStep:
    """Micro-batches of this rank's lanes for a step; dropped rows, quarantined row groups of windows begun for it."""

    batches: list[MicroBatch | None]
    dropped: Counter[str]
    quarantined: tuple[Quarantined, ...]


class LaneLoader:
    """Loader of the micro-batches of some lanes from a position on.

    Args:
        builder: builds windows from requests, here or in a loader process.
        position: position of all lanes.
        batch: number of the next global batch.
        lanes: lanes of this rank, ascending.
        progress: called for each window received.

    Attributes:
        partition: that of the epoch, as it is cut now.
    """

    def __init__(
        self,
        builder: WindowBuilder,
        planner: Planner,
        position: Position,
        batch: int,
        lanes: Sequence[int],
        settings: LoaderSettings,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._planner, self._bos_id, self._progress = planner, settings.bos_id, progress
        self.partition, self._plan = position.partition, planner.plan(position.partition)
        self._lanes = {lane: position.lanes[lane] for lane in lanes}
        self._current: dict[int, Iterator[MicroBatch]] = {}
        self._quarantine: Quarantine = {}
        for row_group in position.quarantined:
            known = self._quarantine.get(row_group.key, ())
            self._quarantine[row_group.key] = (*known, (row_group.corpus, row_group.row_group))
        self._dropped: Counter[str] = Counter()
        self._newly_quarantined: list[Quarantined] = []
        # The first windows are built here: they are ready before the loader processes have started.
        here = {lane for lane, (window, _) in self._lanes.items() if window < self._plan.num_windows(lane)}
        requests = {lane: self._plan.request(lane, self._lanes[lane][0]) for lane in here}
        self._asked = {lane: _with_quarantined(each, self._quarantine) for lane, each in requests.items()}
        self._windows = WindowStream(builder, set(self._asked.values()), settings)
        self._read_ahead_from(batch, here)
        for lane in self._lanes.keys() - here:
            self._ask(lane)

    def next_step(self) -> LocalStep:
        """Returns one micro-batch for each lane of this rank; None for a lane that has none left in this epoch. Raises
        DataError, MachineError: a row group cannot be read, or no longer in a window that was begun with it; MachineError:
        the loader stalls, or one of its processes was killed."""
        batches = [self._next_of(lane) for lane in self._lanes]
        dropped, quarantined = self._dropped, tuple(self._newly_quarantined)
        self._dropped, self._newly_quarantined = Counter(), []
        return LocalStep(batches, dropped, quarantined)

    def start_epoch(self, batch: int) -> None:
        """Begins the next epoch with global batch number `batch`. Every rank calls it once all lanes return None."""
        foreseen = self._planner.after_epoch(self.partition, self._ahead_batch)
        self.partition = self._planner.after_epoch(self.partition, batch)
        self._plan = self._planner.plan(self.partition)
        self._lanes = dict.fromkeys(self._lanes, (0, 0))
        self._current = {}
        if self.partition != foreseen:
            self._restart(batch)

    def must_repartition(self, batch: int) -> bool:
        """True if other weights hold from `batch` on, or before the partition ends: every rank then calls `repartition`."""
        shares, (corpus, missing) = self._planner.stage_at(batch, self.partition.streams)
        return shares != self.partition.shares or 0 < missing < self.partition.quotas[corpus]

    def repartition(self, lanes: LanePositions, batch: int) -> None:
        """Repartitions the rest of the epoch. `lanes`: positions of all lanes of all ranks."""
        position = Position.start(self._planner.repartition(self.partition, lanes, batch, len(lanes)))
        self.partition, self._plan = position.partition, self._planner.plan(position.partition)
        self._current = {lane: batches for lane, batches in self._current.items() if self.partition.open_windows[lane]}
        self._lanes = {lane: position.lanes[lane] for lane in self._lanes}
        self._restart(batch)

    def lane_positions(self) -> dict[int, tuple[int, int]]:
        """Returns (window, micro-batches handed out) of this rank's lanes."""
        return dict(self._lanes)

    def _next_of(self, lane: int) -> MicroBatch | None:
        while True:
            window, emitted = self._lanes[lane]
            if window >= self._plan.num_windows(lane):
                return None
            if lane not in self._current:
                self._open(lane)
            batch = next(self._current[lane], None)
            if batch is not None:
                self._lanes[lane] = (window, emitted + 1)
                return batch
            del self._current[lane]
            self._lanes[lane] = (window + 1, self._plan.emitted_before(lane, window + 1))

    def _open(self, lane: int) -> None:
        window = self._windows.take(self._asked.pop(lane))
        self._progress()
        self._ask(lane)
        emitted = self._lanes[lane][1]
        if emitted:
            _refuse_other_rows(window)
        self._current[lane] = itertools.islice(micro_batches(window, lane, self._bos_id), emitted, None)
        if emitted == 0:
            self._dropped.update(window.dropped)
            self._newly_quarantined += window.quarantined

    def _restart(self, batch: int) -> None:
        """Discards the prefetched windows, and prefetches from the current positions of the lanes."""
        self._windows.restart()
        self._asked = {}
        self._read_ahead_from(batch, set(self._current))
        for lane in self._lanes:
            self._ask(lane)

    def _read_ahead_from(self, batch: int, at_hand: set[int]) -> None:
        """Plans the prefetch, assuming that the weights at `batch` do not change. Lanes `at_hand` have their window."""
        self._ahead_batch = batch
        first = {lane: window + (lane in at_hand) for lane, (window, _) in self._lanes.items()}
        self._ahead = {
            lane: _requests(self._planner, self.partition, batch, lane, window, self._quarantine)
            for lane, window in first.items()
        }

    def _ask(self, lane: int) -> None:
        """Requests the lane's next window: one per lane is requested or ready, however unevenly lanes advance."""
        if (request := next(self._ahead[lane], None)) is not None:
            self._asked[lane] = request
            self._windows.ask(request)


def _requests(
    planner: Planner, partition: Partition, batch: int, lane: int, first: int, quarantine: Quarantine
) -> Iterator[WindowRequest]:
    """Yields requests for all windows of a lane from `first` on, assuming that the weights at `batch` do not change.

    With few rows a lane may have none in one epoch and some in the next. The requests end only if it has none in any:
    that depends on the quotas, the pending rows of the streams and those before the next stage, which then repeat.
    """
    empty: set[tuple[tuple[int, ...], ...]] = set()
    while True:
        pending = tuple(stream.num_pending for stream in partition.streams)
        cut = (partition.quotas, pending, planner.stage_at(batch, partition.streams).waits_for)
        if cut in empty:
            return
        plan = planner.plan(partition)
        empty = set() if plan.num_windows(lane) else {*empty, cut}
        for window in range(first, plan.num_windows(lane)):
            yield _with_quarantined(plan.request(lane, window), quarantine)
        partition, first = planner.after_epoch(partition, batch), 0


def _with_quarantined(request: WindowRequest, quarantine: Quarantine) -> WindowRequest:
    return replace(request, quarantined=quarantine[request.key]) if request.key in quarantine else request


def _refuse_other_rows(window: Window) -> None:
    """Raises MachineError if a window that was begun has other rows now, lost or repeated unnoticed: a disk may be away."""
    newly = [group for group in window.quarantined if (group.corpus, group.row_group) not in window.request.quarantined]
    if newly:
        raise MachineError(
            f"{newly[0].place} cannot be read ({newly[0].reason}), but it could when {window.request.key} was "
            f"begun, so that it cannot be quarantined now. Restore the file, wait for its disk, or resume from a "
            "checkpoint before that window: move the newer ones out of the run's folder `checkpoints`."
        )


def micro_batches(window: Window, lane: int, bos_id: int) -> Iterator[MicroBatch]:
    """Yields the micro-batches of a window, in order."""
    tokens, row_ids = torch.from_numpy(window.tokens), torch.from_numpy(window.row_ids)
    token, row = 0, 0
    for shape in window.shapes:
        middle = token + shape.rows * shape.source_length
        end = middle + shape.rows * shape.target_length
        source = tokens[token:middle].view(shape.rows, -1).long()
        target = tokens[middle:end].view(shape.rows, -1).long()
        target_in = torch.cat([torch.full_like(target[:, :1], bos_id), target[:, :-1]], dim=1)
        yield MicroBatch(lane, shape, source, target_in, target, row_ids[row : row + shape.rows])
        token, row = end, row + shape.rows
