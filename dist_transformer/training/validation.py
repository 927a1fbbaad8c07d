"""Loss on the validation corpus, its micro-batches dealt out to the ranks."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dist_transformer.data.loader import MicroBatch
from dist_transformer.distributed import Ranks
from dist_transformer.training.engine import Engine


@dataclass(frozen=True)
class ValidationResult:
    """Means over the target tokens of the validation corpus, natural logarithm."""

    loss: float
    nll: float
    target_tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.nll, 700.0))

    def metrics(self) -> dict[str, float]:
        """What records and checkpoints keep of it."""
        return {"loss": self.loss, "nll": self.nll, "perplexity": self.perplexity}


def validate(
    engine: Engine, batches: Sequence[MicroBatch], ranks: Ranks, progress: Callable[[], None]
) -> ValidationResult:
    """Loss without dropout on all of `batches` (collective); the same result on every rank.

    Rank r takes the micro-batches r, r + W, ...; where W does not divide their number, some ranks compute one more
    whose loss is not counted: ZeRO 3 needs the same number of forward passes everywhere. `progress` is called after each.
    """
    sums = torch.zeros(3, dtype=torch.float64)
    engine.train(False)
    with torch.no_grad():
        for first in range(0, len(batches), ranks.num_ranks):
            mine = first + ranks.rank
            batch = batches[min(mine, len(batches) - 1)]
            loss, nll = forward(engine, batch, ranks.device)
            if mine < len(batches):
                sums += torch.tensor([float(loss), float(nll), batch.shape.target_tokens], dtype=torch.float64)
            progress()
    engine.train()
    loss_sum, nll_sum, tokens = ranks.sum(sums).tolist()
    return ValidationResult(loss_sum / tokens, nll_sum / tokens, int(tokens))


def forward(engine: Engine, batch: MicroBatch, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, nll), each summed over the micro-batch's target tokens."""
    sides = (batch.source_BS, batch.target_in_BT, batch.target_out_BT)
    loss, nll = engine(*(side.to(device, non_blocking=True) for side in sides))
    return loss, nll
