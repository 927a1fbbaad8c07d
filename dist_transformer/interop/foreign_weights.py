"""Weights written by other programs: reading them, and extending the rows of their matrices to a multiple of 8."""

import warnings
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from zipfile import is_zipfile

import torch
from torch import Tensor

from dist_transformer.errors import CheckpointError
from dist_transformer.interop.model_folder import open_safetensors

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
    Raises CheckpointError: `matrix` has an unexpected number of rows."""
    if len(matrix) != rows.imported:
        raise CheckpointError(
            f"the imported weights have a matrix of {len(matrix)} rows for a vocabulary of {rows.imported}: expected a row "
            "for each piece; give the tokenizer and the settings that the model was trained with"
        )
    copies = matrix[rows.unknown_id].expand(rows.copies_of_unknown, *matrix.shape[1:])
    shape = (rows.all - rows.imported - rows.copies_of_unknown, *matrix.shape[1:])
    return torch.cat([matrix, copies, torch.full(shape, filler, dtype=matrix.dtype)])


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file of safetensors or `torch.save` by name, on the CPU. Raises CheckpointError: the file is
    missing, damaged, or holds something other than tensors."""
    if path.is_dir():
        raise CheckpointError(f"{path}: is a folder, expected a file of weights.")
    if path.suffix == ".safetensors":
        with open_safetensors(path) as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    try:
        # Only tensors are read: anything else in a pickle is refused.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of damaged bytes, which end in one message below
            content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file, expected weights.") from error
    except UnpicklingError as error:
        # torch's own message advises to execute the file.
        if is_zipfile(path):
            raise CheckpointError(f"{path}: holds a pickled model, not its weights; save model.state_dict()") from error
        raise CheckpointError(f"{path}: damaged, or not weights that torch.save wrote. Copy it again.") from error
    except Exception as error:  # damaged bytes are commands to the unpickler: it may raise anything
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path}: damaged, or not weights ({reason}). Copy it again.") from error
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(f"{path}: expected tensors by name, what torch.save(model.state_dict(), ...) writes")
    return content
