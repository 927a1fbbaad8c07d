"""The way of a step's loss to the monitor of divergence: computed with a batch, told with the next, heard with the one after."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dist_transformer.distributed.group import Ranks
from dist_transformer.training.divergence import LossMonitor
from dist_transformer.training.global_batch import fixed_point, from_fixed_point

ToJudge = tuple[int, float | None, bool]
"""Step, loss per token (None: not finite), and whether its text is another than that of the step before."""


@dataclass(frozen=True)
class StepLoss:
    """What the monitor is told of a step; `loss_sum` is this rank's."""

    step: int
    target_tokens: int
    loss_sum: float
    is_of_other_text: bool
    """The first one of a mixture with other weights: its loss is no measure of what was usual before."""


class LossesTold:
    """At most two losses on their way. `hear` and `restore` raise `Diverged` where the monitor does."""

    def __init__(self, monitor: LossMonitor, ranks: Ranks) -> None:
        self._monitor, self._ranks = monitor, ranks
        self._untold: StepLoss | None = None
        self._told: StepLoss | None = None

    def computed(self, loss: StepLoss) -> None:
        """The loss of the last batch."""
        self._untold = loss

    def tell(self) -> float:
        """This rank's sum for the others; 0 where no batch was computed since."""
        self._told, self._untold = self._untold, None
        return self._told.loss_sum if self._told is not None else 0.0

    def hear(self, loss_sum: float) -> None:
        """The sum of what all ranks told."""
        if self._told is not None:
            told, self._told = self._told, None
            self._judge(told.step, loss_sum / told.target_tokens, told.is_of_other_text)

    def state(self) -> list[ToJudge]:
        """The steps that the monitor has not heard of: a run that goes on from here judges them first (collective)."""
        waiting = [loss for loss in (self._told, self._untold) if loss is not None]
        sums = self._ranks.all_reduce_sum(torch.tensor([fixed_point(w.loss_sum) for w in waiting], dtype=torch.int64))
        losses = [from_fixed_point(*pair) for pair in sums.reshape(-1, 2).tolist()]
        return [
            (w.step, loss / w.target_tokens if math.isfinite(loss) else None, w.is_of_other_text)
            for w, loss in zip(waiting, losses, strict=True)
        ]

    def restore(self, state: Sequence[ToJudge]) -> None:
        """Judges what `state` gave to a checkpoint."""
        for step, loss, is_of_other_text in state:
            self._judge(step, math.nan if loss is None else loss, is_of_other_text)

    def _judge(self, step: int, loss: float, is_of_other_text: bool) -> None:
        if is_of_other_text:
            self._monitor.begin_anew()
        self._monitor.add(step, loss)
