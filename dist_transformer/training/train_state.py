"""Progress of a run, and the sums between two of its log lines."""

import time
from collections import Counter
from dataclasses import dataclass, field
from hashlib import blake2b

import torch

from dist_transformer.data.loader.position import Position


@dataclass
class TrainState:
    """Progress of a run, all saved in a checkpoint. `position` is that after the last batch trained on."""

    position: Position
    step: int = 0
    """Updates applied."""
    batches: int = 0
    """Global batches trained on: `step` plus those whose update was skipped."""
    skipped_updates: int = 0
    total_target_tokens: int = 0


@dataclass
class Interval:
    """Sums since the last log line; losses and times of this rank, counts over all ranks."""

    losses: torch.Tensor
    """Sums of loss and nll: (2,), fp64, on the device."""
    target_tokens: int = 0
    source_tokens: int = 0
    padded_tokens: int = 0
    straggler_sum: float = 0.0
    """Straggler ratios of the batches, summed up."""
    batches: int = 0
    pairs_by_corpus: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    """Pairs dropped by rule, of text that is tokenized on the fly."""
    wait_seconds: float = 0.0
    save_seconds: float = 0.0
    """Time that training waited for checkpoints."""
    validation_seconds: float = 0.0
    seconds_before: float = 0.0
    """Time of the part that an earlier start trained."""
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Time spent training in this interval, without validation and saving."""
        return self.seconds_before + time.monotonic() - self.started


def dropout_seed(seed: int, batches: int, lane: int) -> int:
    """Returns the seed of a micro-batch's dropout masks: the same on any number of ranks, with no state to save.

    It is a hash, as torch's generator on CPUs uses only the last 32 bits, in which sums would repeat.
    """
    return int.from_bytes(blake2b(f"{seed} {batches} {lane}".encode(), digest_size=8).digest()) >> 1


def seed_dropout(seed: int, device: torch.device) -> None:
    """Seeds the generators that dropout draws from, as `torch.manual_seed` does, which besides asks for every kind of device
    that torch knows: a stack trace for each that is not there, in every micro-batch."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
