"""Sums of gradients that have the same bits in every order, for `training.same_bits`.

A sum of floats depends on the order of its additions; a sum of multiples of one unit does not, as long as it stays under
2^53 units, where fp64 is exact. So the gradient of each lane is rounded to multiples of a unit before it is added to
another's (the pre-rounding of Demmel and Nguyen, "Fast Reproducible Floating-Point Summation", 2013).

    lane 0    0.0312500004...  ->  multiple of 2^-44 ┐
    lane 1   -0.0000719283...  ->  multiple of 2^-44 ├ exact sum in fp64, over lanes and ranks -> rounded to fp32, once
    lane 2    ...                                    ┘
"""

from collections.abc import Iterable

import torch
from torch import Tensor

GRADIENT_UNIT = 2.0**-44
"""Gradients above 1e-6 are multiples of it in fp32 already; at most 3e-14 is rounded off smaller ones. Sums are exact up to
2^9, which no gradient of a mean per token reaches before training has diverged."""
COARSE_UNIT, FINE_UNIT = 2.0**-20, 2.0**-46
"""Units of squares: sums of 2^28 of them are exact up to 2^33, their remainders too."""


def round_to_multiples(values: Tensor, unit: float) -> Tensor:
    """Rounds fp64 numbers below 2^51 units to multiples of `unit`, a power of 2, in place; what is not finite stays so."""
    shift = 1.5 * 2.0**52 * unit  # the last bit of a sum with it is worth one unit
    return values.add_(shift).sub_(shift)


def sums_of_squares(tensors: Iterable[Tensor]) -> Tensor:
    """Returns two fp64 numbers, whose sum is that of the squares of all elements: each the same bits in every order."""
    total = torch.zeros(2, dtype=torch.float64)
    for tensor in tensors:
        square = tensor.double().square_()
        coarse = round_to_multiples(square.clone(), COARSE_UNIT)
        fine = round_to_multiples(square.sub_(coarse), FINE_UNIT)
        total = total.to(tensor.device) + torch.stack([coarse.sum(), fine.sum()])
    return total


def norm_of(tensors: Iterable[Tensor]) -> Tensor:
    """Returns the 2-norm of all elements in fp64: the same bits in every order."""
    return sums_of_squares(tensors).sum().sqrt()
