"""Reading weights written by other programs."""

import warnings
from pathlib import Path
from pickle import UnpicklingError
from zipfile import is_zipfile

import torch
from torch import Tensor

from dist_transformer.errors import CheckpointError
from dist_transformer.interop.model_folder import open_safetensors


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file of safetensors or `torch.save` by name, on the CPU.

    Raises CheckpointError: the file is missing, damaged, or holds something other than tensors.
    """
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
