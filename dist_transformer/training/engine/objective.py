"""The training objective: the model with its loss, in the precision of the run."""

import torch
from torch import Tensor, nn

from dist_transformer.model.transformer import Transformer


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
        counts_hits: bool = False,
    ) -> tuple[Tensor, ...]:
        """Returns (label-smoothed loss, negative log-likelihood), each summed over the real target tokens.

        `num_targets` is their number; counting them here would wait for the GPU. With `counts_hits` it also returns how
        many of them are the likeliest token; then without gradients.
        """
        sums = self.model.token_sums if counts_hits else self.model.loss
        with self.autocast(source_BS.device):
            return sums(source_BS, target_in_BT, target_out_BT, self._label_smoothing, num_targets)

    def autocast(self, device: torch.device) -> torch.autocast:
        """Returns the autocast context of the run's precision, for direct calls of the model."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self._autocast)
