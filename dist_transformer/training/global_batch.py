"""Global batches, fetched one step ahead. While a step computes, the next one is fetched and counted over all ranks.

One small all-reduce per step carries everything the ranks must agree on: the number of target tokens that divides the
loss, whether any rank was asked to stop or still writes a checkpoint, the loss of the previous step, whether any rank
could not read its data, and the digest of the global batch.
"""

import math
import time
from collections import ChainMap, Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from dist_transformer.data.filters import RULES
from dist_transformer.data.loader.batching import straggler_ratio
from dist_transformer.data.loader.loader import LaneLoader, LocalStep, MicroBatch
from dist_transformer.data.loader.partition import Partition
from dist_transformer.data.loader.position import Quarantined
from dist_transformer.data.loader.window_request import digest_text
from dist_transformer.distributed.group import Ranks
from dist_transformer.errors import DataError, UserError

LARGEST_LOSS = 2.0**30
"""Maximum loss of a rank in a step, summed over tokens."""
LOSS_UNIT = 2.0**-20
"""Unit of the integers that losses are summed as, with the other counts: exact in any order of the ranks."""


def fixed_point(loss: float) -> tuple[int, int]:
    """Returns (loss in units of LOSS_UNIT, 0), or (0, 1) if it is not finite or so large that a sum could overflow."""
    return (round(loss / LOSS_UNIT), 0) if abs(loss) < LARGEST_LOSS else (0, 1)


def from_fixed_point(units: int, not_finite: int) -> float:
    """Converts a sum of `fixed_point` over the ranks to a number."""
    return math.nan if not_finite else units * LOSS_UNIT


@dataclass(frozen=True)
class RankStatus:
    """Values that a rank sends to the others along with its batch."""

    wants_stop: bool
    is_writing: bool
    """True while the rank's file of a checkpoint is not on disk."""
    loss_sum: float
    """Loss of the rank's micro-batches of the last computed step; 0 without one."""


@dataclass(frozen=True)
class GlobalBatch:
    """This rank's micro-batches of one step, and the sums over all ranks. None: a lane without rows in this epoch."""

    micro_batches: list[MicroBatch | None]
    partition: Partition
    lane_positions: dict[int, tuple[int, int]]
    """Positions (window, micro-batches handed out) of this rank's lanes after this step."""
    target_tokens: int
    source_tokens: int
    pairs: int
    padded_tokens: int
    straggler_ratio: float
    """Padded tokens of the largest micro-batch over the mean."""
    pairs_by_corpus: Counter[str]
    dropped: Counter[str]
    """Pairs by rule that were dropped from the windows begun in this step."""
    quarantined: tuple[Quarantined, ...]
    """Row groups of all ranks that were quarantined in the windows begun in this step."""
    fading_lanes: int
    """Lanes that still finish a window of the partition before."""
    stop: bool
    is_writing: bool
    """True if some rank still writes a checkpoint."""
    loss_sum: float
    """Loss of the last step computed before this batch was begun: the sum over every rank's `RankStatus`."""
    digest: str
    wait_seconds: float
    """Time that training waited for this batch."""

    @property
    def epoch(self) -> int:
        return self.partition.epoch


class GlobalBatchPrefetcher:
    """Fetches global batches one step ahead: `prefetch`, then `next`, in turn, on every rank.

    Args:
        batch: number of the next global batch.
    """

    def __init__(self, loader: LaneLoader, ranks: Ranks, corpora: tuple[str, ...], num_lanes: int, batch: int) -> None:
        self._loader, self._ranks = loader, ranks
        self._corpora, self._num_lanes, self._batch = corpora, num_lanes, batch
        self._error: UserError | None = None
        self._fetch_seconds: float | None = None

    def prefetch(self, status: RankStatus) -> None:
        """Fetches the next step and begins to sum it (collective; waits for other ranks only at a new stage)."""
        started = time.monotonic()
        if self._loader.must_repartition(self._batch):  # by new weights, from the positions of all lanes
            lanes = ChainMap(*self._ranks.all_gather_object(self._loader.lane_positions()))
            self._loader.repartition([lanes[lane] for lane in range(self._num_lanes)], self._batch)
        try:
            self._local = self._loader.next_step()
        except UserError as error:
            self._error, self._local = error, LocalStep([], Counter(), ())
        counts = self._count(self._local, status)
        self._names, self._totals = list(counts), self._ranks.start_sum(torch.tensor([*counts.values()]))
        is_first = self._fetch_seconds is None  # the first windows are read before training begins
        self._fetch_seconds = 0.0 if is_first else time.monotonic() - started

    def next(self) -> GlobalBatch:
        """Returns the step that was prefetched, with its sums (collective). `pairs` is 0 at the end of an epoch. Raises
        UserError: a rank could not read its data; every rank raises the same error."""
        started = time.monotonic()
        totals: dict[str, int] = dict(zip(self._names, self._totals.wait().tolist(), strict=True))
        padded = [totals[f"padded in lane {lane}"] for lane in range(self._num_lanes)]
        if totals["error"]:
            errors = [error for error in self._ranks.all_gather_object(self._error) if error is not None]
            raise errors[0].agreed() from self._error
        quarantined = self._ranks.all_gather_object(self._local.quarantined) if totals["quarantined"] else []
        self._batch += totals["pairs"] > 0
        return GlobalBatch(
            micro_batches=self._local.batches,
            partition=self._loader.partition,
            lane_positions=self._loader.lane_positions(),
            target_tokens=totals["target_tokens"],
            source_tokens=totals["source_tokens"],
            pairs=totals["pairs"],
            padded_tokens=sum(padded),
            straggler_ratio=straggler_ratio(padded),
            pairs_by_corpus=Counter({name: totals[f"pairs of {name}"] for name in self._corpora}),
            dropped=Counter({rule: count for rule in RULES if (count := totals[f"dropped by {rule}"])}),
            quarantined=tuple(row_group for of_rank in quarantined for row_group in of_rank),
            fading_lanes=totals["fading"],
            stop=totals["stop"] > 0,
            is_writing=totals["writing"] > 0,
            loss_sum=from_fixed_point(totals["loss"], totals["not_finite"]),
            digest=digest_text(totals["digest"]),
            wait_seconds=(self._fetch_seconds or 0.0) + time.monotonic() - started,
        )

    def start_epoch(self, status: RankStatus) -> None:
        """Prefetches the first step of the next epoch (collective)."""
        self._loader.start_epoch(self._batch)
        self.prefetch(status)

    def _count(self, local: LocalStep, status: RankStatus) -> dict[str, int]:
        """Returns what is summed over the ranks, in int64."""
        real = [batch for batch in local.batches if batch is not None]
        opened, positions = self._loader.partition.open_windows, self._loader.lane_positions()
        padded = {batch.lane: batch.shape.padded_tokens for batch in real}
        pairs = [batch.pairs_by_corpus(len(self._corpora)) for batch in real]
        loss, not_finite = fixed_point(status.loss_sum)
        return {
            "target_tokens": sum(batch.shape.target_tokens for batch in real),
            "source_tokens": sum(batch.shape.source_tokens for batch in real),
            "pairs": sum(batch.shape.pairs for batch in real),
            "quarantined": len(local.quarantined),
            "stop": int(status.wants_stop),
            "writing": int(status.is_writing),
            "loss": loss,
            "not_finite": not_finite,
            "error": int(self._error is not None),
            "fading": sum(window < len(opened[lane]) for lane, (window, _) in positions.items()),
            "digest": (sum(batch.digest() for batch in real) + 2**63) % 2**64 - 2**63,  # as int64 wraps
            **{f"padded in lane {lane}": padded.get(lane, 0) for lane in range(self._num_lanes)},
            **{f"dropped by {rule}": local.dropped[rule] for rule in RULES},
            **{f"pairs of {name}": sum(of[number] for of in pairs) for number, name in enumerate(self._corpora)},
        }


Step = TypeVar("Step", bound=Any)
"""One step, of one rank or of all ranks: with the numbers `pairs` and `epoch`."""


def next_with_pairs(fetch: Callable[[], Step], start_epoch: Callable[[], None], max_epochs: int | None) -> Step | None:
    """Returns the next step that has pairs, if necessary of the next epoch; None after the last epoch. Raises
    DataError: on every rank: a whole epoch has no pairs."""
    for _ in range(3):  # the end of an epoch, a short one before a new stage of a mixture, and the next from its start
        step = fetch()
        if max_epochs is not None and step.epoch >= max_epochs:  # lowered since the last start
            return None
        if step.pairs:
            return step
        if step.epoch + 1 == max_epochs:
            return None
        start_epoch()
    raise DataError(
        "a whole epoch has no pair to train on: all were dropped by data.filters, or their row groups quarantined; look "
        "at the log, and at the corpus with `dist-transformer data inspect`"
    ).agreed()
