"""The training objective: the model with its loss, in the precision of the run."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dist_transformer.model.transformer import JoinedShape, Transformer

if TYPE_CHECKING:  # at run time it would import pyarrow, whose threads forbid to fork ranks (forked_ranks.py)
    from dist_transformer.data.loader.loader import MicroBatch

SecondLoss = Callable[[Tensor, Tensor, Sequence[JoinedShape] | None], Tensor]
"""Takes source and target tokens after a forward pass; returns what is added to its loss, a sum over target tokens."""


class Objective(nn.Module):
    """The model's label-smoothed loss as a module, so that DeepSpeed sees one forward pass.

    bf16 is autocast over fp32 weights, until `round_layers`: the matrix products run in bf16, sums and updates stay in
    fp32. fp16 weights are made by DeepSpeed, which keeps fp32 masters.
    """

    def __init__(self, model: Transformer, label_smoothing: float, precision: str) -> None:
        super().__init__()
        self.model = model
        self._label_smoothing = label_smoothing
        self._autocast = precision == "bf16"
        self.second_loss: SecondLoss | None = None

    def round_layers(self) -> None:
        """Makes bf16 the type of the layers' weights and results, in place of autocast, which casts in each product."""
        self.model.round_layers(torch.bfloat16)
        self._autocast = False

    def forward(
        self,
        source_BS: Tensor,
        target_in_BT: Tensor,
        target_out_BT: Tensor,
        num_targets: int | None = None,
        shapes: Sequence[JoinedShape] | None = None,
        counts_hits: bool = False,
    ) -> tuple[Tensor, ...]:
        """Returns what `Transformer.loss` does for the same arguments, with the second loss in training."""
        with self.autocast(source_BS.device):
            if shapes is not None and self.model.is_padded(shapes, source_BS):
                rows, shapes = shapes[0].rows, None
                source_BS = source_BS.view(rows, -1)
                target_in_BT, target_out_BT = target_in_BT.view(rows, -1), target_out_BT.view(rows, -1)
            loss, *others = self.model.loss(
                source_BS, target_in_BT, target_out_BT, self._label_smoothing, num_targets, shapes, counts_hits
            )
            if self.second_loss is not None and torch.is_grad_enabled() and not counts_hits:
                loss = loss + self.second_loss(source_BS, target_out_BT, shapes)
            return loss, *others

    def autocast(self, device: torch.device) -> torch.autocast:
        """Returns the autocast context of the run's precision, for direct calls of the model."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self._autocast)


def inputs_of(
    batches: "Sequence[MicroBatch]", device: torch.device
) -> tuple[Tensor | Sequence[JoinedShape] | int | None, ...]:
    """Returns the arguments of an `Objective` for micro-batches that are computed as one: the sides on the device, with one
    copy for all of them, from page-locked memory, so that it is asynchronous; the number of target tokens; shapes if they are
    to be computed without padding: several, or on GPUs."""
    sides = [[getattr(batch, name) for batch in batches] for name in ("source_BS", "target_in_BT", "target_out_BT")]
    flat = torch.cat([tokens.flatten() for side in sides for tokens in side])
    flat = (flat.pin_memory() if device.type == "cuda" else flat).to(device, non_blocking=True)
    parts = torch.split(flat, [sum(tokens.numel() for tokens in side) for side in sides])
    num_targets = sum(batch.shape.target_tokens for batch in batches)
    shapes = [
        JoinedShape(s.rows, s.source_length, s.target_length, max(1, s.source_tokens), max(1, s.target_tokens))
        for s in (batch.shape for batch in batches)
    ]
    return *parts, num_targets, shapes
