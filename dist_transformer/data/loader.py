"""The loader: hands a rank the micro-batches of its lanes, step by step, and knows the position to resume from.

    loader = LaneLoader(source, lanes=[0, 2], position=Position.start(num_lanes=4), ...)
    batches = loader.next_step()      # one micro-batch for each lane, None where the lane's epoch has ended
    loader.position()                 # advanced by what was handed out, never by what was only prefetched

Rank r of W owns the lanes r, r + W, ... A lane that has no rows left in the epoch gives None until `start_epoch`, which
the training loop calls on all ranks together once no lane of any rank has rows left.
"""

import itertools
import multiprocessing
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from dist_transformer.data.plan import EpochPlan, WindowKey
from dist_transformer.data.window import BatchShape, Window, WindowReader
from dist_transformer.errors import DataError, MachineError
from dist_transformer.stop_request import ignore_stop_signals


@dataclass(frozen=True)
class MicroBatch:
    """What one rank computes at once. All ids are int64; padding is at the end of each row.

    source_BS: source tokens ending with end-of-sentence. target_in_BT: decoder input, beginning with begin-of-sentence.
    target_out_BT: what it must predict, ending with end-of-sentence.
    """

    lane: int
    shape: BatchShape
    source_BS: torch.Tensor
    target_in_BT: torch.Tensor
    target_out_BT: torch.Tensor
    row_ids: torch.Tensor

    def digest(self) -> int:
        """A signed 64-bit hash of lane and row ids. A step's digest is the sum over its lanes (mod 2**64)."""
        text = self.lane.to_bytes(8, "little") + self.row_ids.numpy().tobytes()
        return int.from_bytes(blake2b(text, digest_size=8).digest(), "little", signed=True)


@dataclass(frozen=True)
class Position:
    """Where the data stands: the epoch, and per lane (window, micro-batches of it handed out)."""

    epoch: int
    lanes: tuple[tuple[int, int], ...]

    @classmethod
    def start(cls, num_lanes: int, epoch: int = 0) -> "Position":
        return cls(epoch, ((0, 0),) * num_lanes)


@dataclass(frozen=True)
class WindowSource(Dataset[Window | DataError]):
    """The windows of a run by key, as a map-style dataset: workers hold no state."""

    reader: WindowReader
    group_rows: tuple[int, ...]
    num_lanes: int
    window_rows: int
    max_tokens: int
    seed: int
    _plans: dict[int, EpochPlan] = field(default_factory=dict, repr=False, compare=False)

    def plan(self, epoch: int) -> EpochPlan:
        """The plan of an epoch; those of the newest epochs asked for are kept."""
        if epoch not in self._plans:
            self._plans[epoch] = EpochPlan(self.group_rows, self.num_lanes, self.window_rows, self.seed, epoch)
            self._plans.pop(epoch - 2, None)
        return self._plans[epoch]

    def __getitem__(self, key: WindowKey) -> Window | DataError:
        """The window; an error as a value, since a loader process would wrap one that is raised into its traceback."""
        try:
            slices = self.plan(key.epoch).slices(key.lane, key.window)
            return self.reader.build(key, slices, self.max_tokens, self.seed)
        except DataError as error:
            return error


class LaneLoader:
    """Micro-batches of some lanes from a position on.

    Args:
        source: the windows.
        lanes: the lanes of this rank, ascending.
        position: of all lanes; those of other ranks are ignored.
        bos_id: begins every decoder input.
        num_workers: loader processes; 0 builds windows in this process.
        stall_seconds: a window that does not come within this time is an error.
    """

    def __init__(
        self,
        source: WindowSource,
        lanes: Sequence[int],
        position: Position,
        bos_id: int,
        num_workers: int,
        stall_seconds: int,
    ) -> None:
        self._source = source
        self._bos_id = bos_id
        self._stall_seconds = stall_seconds
        self._epoch = position.epoch
        self._lanes = {lane: position.lanes[lane] for lane in lanes}
        self._current: dict[int, Iterator[MicroBatch]] = {}
        self._early: dict[WindowKey, Window] = {}
        self._windows = iter(
            DataLoader(
                source,
                batch_size=None,
                sampler=_keys_from(source, dict(self._lanes), position.epoch),
                num_workers=num_workers,
                prefetch_factor=2 if num_workers else None,
                multiprocessing_context="forkserver" if num_workers else None,  # fork breaks pyarrow's threads
                worker_init_fn=_start_worker if num_workers else None,
                timeout=stall_seconds if num_workers else 0,
                collate_fn=_as_it_is,
            )
        )

    def next_step(self) -> list[MicroBatch | None]:
        """One micro-batch for each lane of this rank; None for a lane that has none left in this epoch.

        Raises:
            DataError: a shard is damaged.
            MachineError: the loader stalls, or one of its processes was killed.
        """
        return [self._next_of(lane) for lane in self._lanes]

    def start_epoch(self) -> None:
        """Begins the next epoch. Every rank calls it at the same step, when all lanes gave None."""
        self._epoch += 1
        self._lanes = dict.fromkeys(self._lanes, (0, 0))
        self._current = {}

    @property
    def epoch(self) -> int:
        return self._epoch

    def lane_positions(self) -> dict[int, tuple[int, int]]:
        """(window, handed out) of this rank's lanes."""
        return dict(self._lanes)

    def _next_of(self, lane: int) -> MicroBatch | None:
        while True:
            window, emitted = self._lanes[lane]
            if window >= self._source.plan(self._epoch).num_windows(lane):
                return None
            if lane not in self._current:
                batches = _micro_batches(self._fetch(WindowKey(self._epoch, lane, window)), self._bos_id)
                self._current[lane] = itertools.islice(batches, emitted, None)
            batch = next(self._current[lane], None)
            if batch is not None:
                self._lanes[lane] = (window, emitted + 1)
                return batch
            del self._current[lane]
            self._lanes[lane] = (window + 1, 0)

    def _fetch(self, key: WindowKey) -> Window:
        """The window of this key; those of other lanes that come before it are kept for their turn."""
        while key not in self._early:
            try:
                window = next(self._windows)
            except RuntimeError as error:
                if "timed out" in str(error):
                    raise MachineError(
                        f"no window within data.stall_seconds = {self._stall_seconds} s (waiting for epoch {key.epoch}, "
                        f"lane {key.lane}, window {key.window}): the disk or the loader process hangs; look at the "
                        "filesystem of the prepared folder, or raise data.stall_seconds"
                    ) from error
                if "exited unexpectedly" in str(error) or "killed by signal" in str(error):
                    raise MachineError(
                        f"a loader process ended ({error}): it was killed, perhaps for want of memory; lower "
                        "data.window_rows or data.loader_workers"
                    ) from error
                raise
            if isinstance(window, DataError):
                raise window
            self._early[window.key] = window
        return self._early.pop(key)


def _micro_batches(window: Window, bos_id: int) -> Iterator[MicroBatch]:
    tokens, row_ids = torch.from_numpy(window.tokens), torch.from_numpy(window.row_ids)
    token, row = 0, 0
    for shape in window.shapes:
        middle = token + shape.rows * shape.source_length
        end = middle + shape.rows * shape.target_length
        source = tokens[token:middle].view(shape.rows, -1).long()
        target = tokens[middle:end].view(shape.rows, -1).long()
        target_in = torch.cat([torch.full_like(target[:, :1], bos_id), target[:, :-1]], dim=1)
        rows = row_ids[row : row + shape.rows]
        yield MicroBatch(window.key.lane, shape, source, target_in, target, rows)
        token, row = end, row + shape.rows


def validation_batches(reader: WindowReader, max_tokens: int, bos_id: int) -> Iterator[MicroBatch]:
    """Every row of a split once, in micro-batches of neighbouring lengths; the same on every rank."""
    for window in reader.build_in_order(max_tokens):
        yield from _micro_batches(window, bos_id)


def _keys_from(source: WindowSource, lanes: dict[int, tuple[int, int]], epoch: int) -> Iterator[WindowKey]:
    """Keys of all windows to come, in the order in which lanes that advance evenly need them; without end."""
    for this_epoch in itertools.count(epoch):
        plan = source.plan(this_epoch)
        first = {lane: lanes[lane][0] if this_epoch == epoch else 0 for lane in lanes}
        for window in range(min(first.values()), max(plan.num_windows(lane) for lane in lanes)):
            for lane in lanes:
                if first[lane] <= window < plan.num_windows(lane):
                    yield WindowKey(this_epoch, lane, window)


def _start_worker(worker: int) -> None:
    ignore_stop_signals()
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_the_trainer, daemon=True).start()


def _end_with_the_trainer() -> None:
    """torch's own watch looks at the fork server, which lives as long as its workers: neither would ever end."""
    trainer = multiprocessing.parent_process()
    assert trainer is not None
    trainer.join()
    os._exit(0)


def _as_it_is(window: Any) -> Any:
    return window
