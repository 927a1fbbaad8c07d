"""The mean of several checkpoints' weights (6.1: the last 5 for base, the last 20 for big)."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dist_transformer.errors import CheckpointError
from dist_transformer.interop.model_folder import open_safetensors

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class _Source:
    """A set of weights that is read tensor by tensor; `label` names it in messages."""

    label: str
    names: frozenset[str]
    tensor: Callable[[str], Tensor]


def average_weights(sources: Sequence[Weights | Path]) -> dict[str, Tensor]:
    """The fp32 mean of each tensor over `sources`: weights by name, or safetensors files of them.

    Summed in fp64, one tensor at a time, so files need no more memory than the result. Raises CheckpointError if there
    are no sources, one cannot be read, or they differ in names or shapes.
    """
    if not sources:
        raise CheckpointError("There are no checkpoints to average: expected at least one. Save one first.")
    with ExitStack() as stack:
        opened = [_open(source, index, stack) for index, source in enumerate(sources)]
        for other in opened[1:]:
            _check_same_names(opened[0], other)
        return {name: _mean(name, opened) for name in sorted(opened[0].names)}


def _open(source: Weights | Path, index: int, stack: ExitStack) -> _Source:
    if isinstance(source, Path):
        file = stack.enter_context(open_safetensors(source))
        return _Source(str(source), frozenset(file.keys()), file.get_tensor)
    return _Source(f"weights {index + 1}", frozenset(source), source.__getitem__)


def _check_same_names(first: _Source, other: _Source) -> None:
    if first.names != other.names:
        name = min(first.names ^ other.names)
        has, lacks = (first, other) if name in first.names else (other, first)
        raise CheckpointError(
            f"Checkpoints of different models cannot be averaged: {has.label} has {name}, {lacks.label} has not. "
            "Average checkpoints of one run only."
        )


def _mean(name: str, sources: Sequence[_Source]) -> Tensor:
    expected = sources[0].tensor(name).shape
    total = torch.zeros(expected, dtype=torch.float64)
    for source in sources:
        tensor = source.tensor(name)
        if tensor.shape != expected:
            raise CheckpointError(
                f"Checkpoints of different models cannot be averaged: {name} is {tuple(expected)} in "
                f"{sources[0].label} but {tuple(tensor.shape)} in {source.label}. Average checkpoints of one run only."
            )
        total += tensor.detach().to("cpu", torch.float64)
    return (total / len(sources)).float()
