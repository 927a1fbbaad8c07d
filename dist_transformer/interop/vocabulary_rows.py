"""Rows of imported matrices, extended to a multiple of 8."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dist_transformer.errors import CheckpointError

UNREACHABLE = -100.0
"""Output bias of the rows that fill up a vocabulary: never the likeliest, but with a finite loss."""


@dataclass(frozen=True)
class Rows:
    """Numbers of rows of a vocabulary's matrices: imported ones, copies of the unknown piece's, and all."""

    imported: int
    copies_of_unknown: int
    all: int
    unknown_id: int


def filled(matrix: Tensor, rows: Rows, filler: float) -> Tensor:
    """Returns `matrix`, then a copy of the unknown piece's row for each piece replaced by it, then rows of `filler`.

    Raises CheckpointError: `matrix` has an unexpected number of rows.
    """
    if len(matrix) != rows.imported:
        raise CheckpointError(
            f"the imported weights have a matrix of {len(matrix)} rows for a vocabulary of {rows.imported}: expected a row "
            "for each piece; give the tokenizer and the settings that the model was trained with"
        )
    copies = matrix[rows.unknown_id].expand(rows.copies_of_unknown, *matrix.shape[1:])
    shape = (rows.all - rows.imported - rows.copies_of_unknown, *matrix.shape[1:])
    return torch.cat([matrix, copies, torch.full(shape, filler, dtype=matrix.dtype)])
