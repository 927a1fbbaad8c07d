"""The mean of several checkpoints' weights (6.1: the last 5 for base, the last 20 for big)."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from dist_transformer.errors import CheckpointError


def average_weights(
    sources: Sequence[Mapping[str, Tensor]], progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, Tensor]:
    """The fp32 mean of each tensor over `sources`, weights by name.

    Summed in fp64, one tensor at a time, so weights that are read on access need no more memory than the result. Raises
    CheckpointError if there are no sources, or they differ in names or shapes. `progress` is called
    with the number of tensors done and of all.
    """
    if not sources:
        raise CheckpointError("There are no checkpoints to average: expected at least one. Save one first.")
    names = set(sources[0])
    for number, other in enumerate(sources[1:], start=2):
        if names != set(other):
            name = min(names ^ set(other))
            has, lacks = (1, number) if name in names else (number, 1)
            raise CheckpointError(
                f"Checkpoints of different models cannot be averaged: weights {has} has {name}, weights {lacks} has not. "
                "Average checkpoints of one run only."
            )
    means = {}
    for number, name in enumerate(sorted(names), start=1):
        means[name] = _mean(name, sources)
        progress(number, len(names))
    return means


def _mean(name: str, sources: Sequence[Mapping[str, Tensor]]) -> Tensor:
    expected = sources[0][name].shape
    total = torch.zeros(expected, dtype=torch.float64)
    for number, source in enumerate(sources, start=1):
        tensor = source[name]
        if tensor.shape != expected:
            raise CheckpointError(
                f"Checkpoints of different models cannot be averaged: {name} is {tuple(expected)} in weights 1 but "
                f"{tuple(tensor.shape)} in weights {number}. Average checkpoints of one run only."
            )
        total += tensor.detach().to("cpu", torch.float64)
    return (total / len(sources)).float()
