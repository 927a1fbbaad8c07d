"""The feed: global batches, one step ahead. While a step computes, the next one is fetched and counted over all ranks.

One small all-reduce a step carries everything the ranks must agree on: how many target tokens the loss is divided by,
whether any rank was asked to stop, whether any rank could not read its data, and the digest of the global batch.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dist_transformer.data.loader import LaneLoader, MicroBatch
from dist_transformer.distributed import Ranks
from dist_transformer.errors import UserError

TOTALS = ("target_tokens", "source_tokens", "pairs", "padded_tokens", "stop", "error", "digest")


@dataclass(frozen=True)
class GlobalBatch:
    """This rank's micro-batches of one step, and the sums over all ranks. None: a lane without rows in this epoch."""

    micro_batches: list[MicroBatch | None]
    epoch: int
    lane_positions: dict[int, tuple[int, int]]
    """(window, micro-batches handed out) of this rank's lanes after this step."""
    target_tokens: int
    source_tokens: int
    pairs: int
    padded_tokens: int
    stop: bool
    digest: str
    wait_seconds: float
    """How long training stood still for this batch."""


class Feed:
    """Hands out global batches. `wants_stop` is asked on every rank, once a step."""

    def __init__(self, loader: LaneLoader, ranks: Ranks, wants_stop: Callable[[], bool]) -> None:
        self._loader = loader
        self._ranks = ranks
        self._wants_stop = wants_stop
        self._error: UserError | None = None
        self.begin()

    def begin(self) -> None:
        """Fetches the next step and starts counting it (collective, does not wait for other ranks)."""
        started = time.monotonic()
        try:
            self._batches = self._loader.next_step()
        except UserError as error:
            self._error, self._batches = error, []
        real = [batch for batch in self._batches if batch is not None]
        self._totals = torch.tensor(
            [
                sum(b.shape.target_tokens for b in real),
                sum(b.shape.source_tokens for b in real),
                sum(b.shape.rows for b in real),
                sum(b.shape.padded_tokens for b in real),
                int(self._wants_stop()),
                int(self._error is not None),
                0,
            ],
            dtype=torch.int64,
        )
        for batch in real:
            self._totals[-1] += batch.digest()  # wraps, as int64 does: a sum modulo 2 ** 64
        self._work = self._ranks.start_sum(self._totals)
        self._fetch_seconds = time.monotonic() - started

    def wait(self) -> GlobalBatch:
        """The step that `begin` fetched, with its sums (collective). `pairs` is 0 at the end of an epoch.

        Raises:
            UserError: a rank could not read its data; every rank raises the same error.
        """
        started = time.monotonic()
        self._work.wait()
        totals = dict(zip(TOTALS, self._totals.tolist(), strict=True))
        if totals["error"]:
            errors = [error for error in self._ranks.gather(self._error) if error is not None]
            raise errors[0] from self._error
        return GlobalBatch(
            micro_batches=self._batches,
            epoch=self._loader.epoch,
            lane_positions=self._loader.lane_positions(),
            target_tokens=totals["target_tokens"],
            source_tokens=totals["source_tokens"],
            pairs=totals["pairs"],
            padded_tokens=totals["padded_tokens"],
            stop=totals["stop"] > 0,
            digest=f"{totals['digest'] % 2**64:016x}",
            wait_seconds=self._fetch_seconds + time.monotonic() - started,
        )

    def start_epoch(self) -> None:
        """Goes on with the next epoch (collective)."""
        self._loader.start_epoch()
        self.begin()
