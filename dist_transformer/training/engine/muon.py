"""Muon: matrices of layers change by their orthogonalized momentum, all other parameters by Adam.

Jordan et al., 2024 (https://kellerjordan.github.io/posts/muon/), with the scale of Liu et al., "Muon is Scalable for LLM
Training", 2025, at which one learning rate serves both. Embeddings, biases and norms stay Adam's.

A matrix is orthogonalized whole. Stages 1 and 2 cut it: there each rank updates the momentum of its share, gathers that of
all, and orthogonalizes the matrices of which it holds a part.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dist_transformer.model.attention import CrossAttention, SelfAttention
from dist_transformer.model.transformer import Transformer

MOMENTUM = 0.95
ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic Newton-Schulz iteration, as in `torch.optim.Muon`."""
SCALE = 0.2
"""Root mean square of an update of Adam, which that of a matrix is made to have."""
MOST_ELEMENTS = 2**25
"""Elements of the matrices of one batch, whose copies take some 16 bytes each."""

Rows = Mapping[nn.Parameter, Sequence[int]]
"""The matrices that Muon updates, and the rows of each that are matrices of their own, such as the query's and the key's."""


class AdamWithMuon(torch.optim.AdamW):
    """Adam for whole parameters of all groups but those with `rows`: stage 0, where a matrix is whole on every rank."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Updates all parameters that have a gradient."""
        groups, held = self.param_groups, []
        for group in groups:
            for p, rows in zip(group["params"], group.get("rows", ()), strict=False):
                if p.grad is not None:
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    update = moved(self.state[p]["exp_avg"], p.grad)
                    parts = zip(torch.split(p, [*rows]), torch.split(update, [*rows]), strict=True)
                    held += [(matrix, part, -group["lr"]) for matrix, part in parts]
        orthogonalize([update for _, update, _ in held])
        for matrix, update, rate in held:
            matrix.add_(update, alpha=rate)
        self.param_groups = [group for group in groups if "rows" not in group]
        try:
            return inspect.unwrap(torch.optim.AdamW.step)(self, closure)  # its decorator imports a compiler
        finally:
            self.param_groups = groups


def moved(momentum: Tensor, gradient: Tensor) -> Tensor:
    """Moves the momentum by a gradient, and returns Nesterov's: what it would be after the same gradient again."""
    momentum.lerp_(gradient, 1 - MOMENTUM)
    return gradient.lerp(momentum, MOMENTUM)


def orthogonalize(matrices: Sequence[Tensor]) -> None:
    """Turns each matrix (M, N) into U V^T of its singular value decomposition, nearly, times its scale.

    Those of one shape are computed in batches, because a GPU takes about as long to start such a product as to compute it.
    """
    for shape in dict.fromkeys(matrix.shape for matrix in matrices):
        alike = [matrix for matrix in matrices if matrix.shape == shape]
        size = max(1, MOST_ELEMENTS // shape.numel())
        for batch in (alike[first : first + size] for first in range(0, len(alike), size)):
            torch._foreach_copy_(batch, list(_orthogonalized(torch.stack(batch)) * (SCALE * math.sqrt(max(shape)))))


def _orthogonalized(matrices_BMN: Tensor) -> Tensor:
    is_tall = matrices_BMN.size(1) > matrices_BMN.size(2)
    x = (matrices_BMN.mT if is_tall else matrices_BMN).bfloat16()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).to(matrices_BMN.dtype)


def matrices_of(model: Transformer) -> Rows:
    """Returns the weights of all products in a model's layers."""
    parts = [part for layer in [*model.encoder_layers, *model.decoder_layers] for part in layer.modules()]
    wholes = [part.get_parameter("weight") for part in parts if isinstance(part, nn.Linear)]
    rows: dict[nn.Parameter, Sequence[int]] = {whole: [whole.size(0)] for whole in wholes}
    for part in parts:
        if isinstance(part, SelfAttention | CrossAttention):
            for packed, held in part.packed_rows(1.0, 1.0).items():
                rows[packed.get_parameter("weight")] = [number for number, _ in held]
    return rows
