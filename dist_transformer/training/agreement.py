"""Values that the ranks agree on with each global batch: the mean loss of a step, and whether a checkpoint is on disk.

A rank sends them when it begins to fetch a batch and reads the sums when it takes that batch, one step later: no rank
waits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dist_transformer.distributed.group import Ranks
from dist_transformer.training.checkpoint.saver import CheckpointSaver
from dist_transformer.training.divergence import LossMonitor
from dist_transformer.training.global_batch import GlobalBatch, RankStatus, fixed_point, from_fixed_point

UncheckedLoss = tuple[int, float | None, bool]
"""Step, loss per token (None: not finite), and `StepLoss.is_of_other_text`."""


@dataclass(frozen=True)
class StepLoss:
    """Loss of one step on its way to the divergence monitor; `loss_sum` is this rank's."""

    step: int
    target_tokens: int
    loss_sum: float
    is_of_other_text: bool
    """True for the first steps of a mixture with other weights, until all lanes have it: earlier losses are no measure of it."""


class Agreement:
    """State of at most two losses and one checkpoint: pending (known to this rank) and in flight (sent to the others).

    `apply` and `restore` raise `Diverged` where the monitor does.
    """

    def __init__(self, ranks: Ranks, monitor: LossMonitor, saver: CheckpointSaver) -> None:
        self._ranks, self._monitor, self._saver = ranks, monitor, saver
        self.pending_loss: StepLoss | None = None
        """The loss of the last batch, for the next `status`."""
        self._loss_in_flight: StepLoss | None = None
        self._save_asked_about: int | None = None

    def status(self, wants_stop: bool) -> RankStatus:
        """The values that this rank sends, once for each batch."""
        self._loss_in_flight, self.pending_loss = self.pending_loss, None
        self._save_asked_about = self._saver.step_in_flight
        loss_sum = self._loss_in_flight.loss_sum if self._loss_in_flight is not None else 0.0
        return RankStatus(wants_stop, self._saver.is_writing(), loss_sum)

    def apply(self, batch: GlobalBatch) -> None:
        """Checks the loss that arrived with `batch`, and commits a checkpoint that is on the disk of every rank."""
        if (loss := self._loss_in_flight) is not None:
            self._loss_in_flight = None
            self._check(loss.step, batch.loss_sum / loss.target_tokens, loss.is_of_other_text)
        # The ranks sent their status before the last step: it may be about an earlier checkpoint than that in flight.
        asked, in_flight = self._save_asked_about, self._saver.step_in_flight
        if not batch.is_writing and in_flight is not None and asked == in_flight:
            self._saver.finish()

    def state(self) -> list[UncheckedLoss]:
        """Losses that the monitor has not seen, for a checkpoint: a resumed run checks them first (collective)."""
        waiting = [loss for loss in (self._loss_in_flight, self.pending_loss) if loss is not None]
        sums = self._ranks.all_reduce_sum(torch.tensor([fixed_point(w.loss_sum) for w in waiting], dtype=torch.int64))
        losses = [from_fixed_point(*pair) for pair in sums.reshape(-1, 2).tolist()]
        return [
            (w.step, loss / w.target_tokens if math.isfinite(loss) else None, w.is_of_other_text)
            for w, loss in zip(waiting, losses, strict=True)
        ]

    def restore(self, state: Sequence[UncheckedLoss]) -> None:
        """Checks the losses that `state` put into a checkpoint."""
        for step, loss, is_of_other_text in state:
            self._check(step, math.nan if loss is None else loss, is_of_other_text)

    def _check(self, step: int, loss: float, is_of_other_text: bool) -> None:
        if is_of_other_text:
            self._monitor.begin_anew()
        self._monitor.add(step, loss)
