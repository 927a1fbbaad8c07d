"""Sums of the bits of tensors: whether two ranks hold or compute the same, and whether memory at rest has changed.

The words of a tensor are added as integers, modulo 2**64: the same in any order and on any device, and different after any
single flipped bit. Several flips are missed only if their changes cancel exactly.
"""

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from dist_transformer.training.engine.optimizer import PARTS
from dist_transformer.training.engine.sharded_state import Fragment

ADDED_AT_ONCE = 2**20
"""Words that a CPU widens to 64 bits at once, in memory of its own."""


def bit_sum(tensors: Iterable[Tensor]) -> Tensor:
    """Returns the sum of the words of all tensors, on their device: int64, without axes."""
    sums = [_bit_sum(tensor) for tensor in tensors]
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.int64)


def _bit_sum(tensor: Tensor) -> Tensor:
    words = tensor.detach().view(torch.int32 if tensor.element_size() == 4 else torch.int16)
    if words.is_cuda or words.numel() <= ADDED_AT_ONCE:
        return words.sum(dtype=torch.int64)
    return torch.stack([part.sum(dtype=torch.int64) for part in torch.split(words.flatten(), ADDED_AT_ONCE)]).sum()


def sums_by_part(fragments: Sequence[Fragment]) -> Tensor:
    """Returns the sums of weights, moments and average, (len(PARTS),) on the CPU; over all ranks they do not depend on
    the number of ranks or the ZeRO stage. With `offload` and `freeze` weights may be on two devices."""
    sums = torch.zeros(len(PARTS), dtype=torch.int64)
    for at in {(each.part, each.values.device) for each in fragments}:
        sums[PARTS.index(at[0])] += bit_sum(f.values for f in fragments if (f.part, f.values.device) == at).cpu()
    return sums


class RestingSums:
    """Finds memory that changes while nothing writes it: `note` after it was written, `check` before it is used again.

    Differences are counted on the device, so that no check waits for it.
    """

    def __init__(self) -> None:
        self._noted: dict[str, Tensor] = {}
        self._changes: dict[str, Tensor] = {}

    def note(self, name: str, tensors: Iterable[Tensor]) -> None:
        self._noted[name] = bit_sum(tensors)

    def check(self, name: str, tensors: Iterable[Tensor]) -> None:
        """Compares with what was noted under the name, once; `name` is the kind of memory, perhaps with a number."""
        if (noted := self._noted.pop(name, None)) is not None:
            kind, change = name.split()[0], (bit_sum(tensors) != noted).long()
            self._changes[kind] = self._changes[kind] + change if kind in self._changes else change

    def forget(self, name: str) -> None:
        """Drops what was noted: the memory is written again."""
        self._noted.pop(name, None)

    def changed(self) -> list[str]:
        """Returns the kinds of memory that have changed at rest so far."""
        return [kind for kind, count in self._changes.items() if int(count)]


class GradientSums:
    """One number for each parameter of what a backward pass adds to its gradient, taken while the pass computes it.

    Attributes:
        is_exact: the number is the gradient's bit sum (int64), else its 2-norm (float64).
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters, self.is_exact = list(parameters), True
        self._found: dict[int, Tensor] | None = None
        self._is_kept = True
        for number, parameter in enumerate(self._parameters):
            parameter.register_hook(partial(self._computed, number))  # type: ignore[no-untyped-call]

    def start(self) -> None:
        """Begins with the next backward pass."""
        self._found = {}

    def take(self) -> Tensor:
        """Ends, and returns the numbers on the CPU, 0 for a parameter without a gradient (waits for the device)."""
        found, self._found = self._found, None
        assert found is not None
        zero = torch.zeros((), dtype=torch.int64 if self.is_exact else torch.float64)
        zero = zero.to(next(iter(found.values())).device) if found else zero
        return torch.stack([found.get(number, zero) for number in range(len(self._parameters))]).cpu()

    def of(self, loss: Tensor) -> Tensor:
        """Returns the numbers of a backward pass that adds to no gradient; of each only its number is kept."""
        self.start()
        self._is_kept = False
        try:
            torch.autograd.grad(loss, self._parameters, allow_unused=True)
        finally:
            self._is_kept = True
        return self.take()

    def _computed(self, number: int, gradient: Tensor) -> Tensor | None:
        if self._found is not None:
            norm = partial(torch.linalg.vector_norm, dtype=torch.float64)
            self._found[number] = _bit_sum(gradient) if self.is_exact else norm(gradient)
        return None if self._is_kept else gradient.new_zeros(()).expand_as(gradient)
