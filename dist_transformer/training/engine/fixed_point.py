"""Sums of gradients that have the same bits in every order, for `training.same_bits`: docs/architecture.md.

A sum of floats depends on the order of its additions; a sum of multiples of one unit does not, as long as it stays under
2^53 units, where fp64 is exact: the pre-rounding of Demmel and Nguyen, "Fast Reproducible Floating-Point Summation", 2013.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

GRADIENT_UNIT = 2.0**-44
"""Gradients above 1e-6 are multiples of it in fp32 already; at most 3e-14 is rounded off smaller ones. Sums are exact up to
2^9, which no gradient of a mean per token reaches before training has diverged."""
COARSE_UNIT, FINE_UNIT = 2.0**-20, 2.0**-46
"""Units of squares: sums of 2^28 of them are exact up to 2^33, those of their remainders always."""
CPU_CHUNK = 2**16
"""Elements that a CPU computes at once, so that what lies between two operations stays in its cache."""


def sum_with(total: Tensor | None, gradient: Tensor) -> Tensor:
    """Adds a lane's flat gradient in fp32, rounded, to the sum of others' in fp64, in place; None: there are no others."""
    if total is None:
        total = torch.zeros_like(gradient, dtype=torch.float64)
    for part, values in zip(_chunks(total), _chunks(gradient), strict=True):
        part += _rounded(values.double(), GRADIENT_UNIT)
    return total


def sums_of_squares(tensors: Iterable[Tensor]) -> Tensor:
    """Returns two numbers in fp64, whose sum is that of the squares of all elements: each the same bits in every order."""
    sums = []
    for values in (chunk for tensor in tensors for chunk in _chunks(tensor)):
        square = values.double().square_()
        coarse = _rounded(square.clone(), COARSE_UNIT)
        fine = _rounded(square.sub_(coarse), FINE_UNIT)
        sums.append(torch.stack([coarse.sum(), fine.sum()]))
    return torch.stack(sums).sum(0)


def norm_of(tensors: Iterable[Tensor]) -> Tensor:
    """Returns the 2-norm of all elements in fp64: the same bits in every order."""
    return sums_of_squares(tensors).sum().sqrt()


def _rounded(values: Tensor, unit: float) -> Tensor:
    """Rounds numbers in fp64 below 2^51 units to multiples of `unit`, in place; what is not finite stays so."""
    shift = 1.5 * 2.0**52 * unit  # the last bit of a sum with it is worth one unit
    return values.add_(shift).sub_(shift)


def _chunks(values: Tensor) -> tuple[Tensor, ...]:
    flat = values.view(-1)
    return torch.split(flat, CPU_CHUNK) if values.is_cpu else (flat,)
