"""What the device of a rank can do at most, and MFU: the share of it that training turns into the model's arithmetic."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dist_transformer.config.schema import ModelConfig
from dist_transformer.data.loader.loader import MicroBatch
from dist_transformer.model.cpu_kernels import faster_products
from dist_transformer.planning.flops import ModelFlops, add_flops, model_flops, published_flops
from dist_transformer.training.train_state import Interval

SHORT_SECONDS = 0.05
"""To find a peak that is not published, at each start."""
LONG_SECONDS = 1.0
"""For a profile."""
SMALLEST, LARGEST = 256, 16384
"""Rows of the matrices that are multiplied."""

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Peak:
    """FLOP/s of matrix products on the device of one rank; None for what is not known.

    Attributes:
        published: dense, by the data sheet.
        measured: of large products in the precision of the run (on CPUs: or in fp32, where that is faster), with the
            threads of the rank.
    """

    published: float | None
    measured: float | None

    @property
    def flops_per_second(self) -> float:
        """What MFU is a share of."""
        peak = self.published or self.measured
        assert peak, "one of them is always there"
        return peak

    def text(self) -> str:
        source = "published" if self.published else "measured"
        return f"{self.flops_per_second / 1e12:.4g} TFLOP/s a rank, {source}"


def peak_of(device: torch.device, precision: str, is_profiled: bool) -> Peak:
    """Measures for SHORT_SECONDS what is not published, and for LONG_SECONDS anything that is profiled."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    published = published_flops(name, precision)
    if published and not is_profiled:
        return Peak(published, None)
    dtypes = {DTYPES[precision]}
    if device.type == "cpu":
        dtypes.add(torch.float32)  # parts of a step there are fp32 in any precision, and faster so on many CPUs
    seconds = (LONG_SECONDS if is_profiled else SHORT_SECONDS) / len(dtypes)
    return Peak(published, max(measured_flops(device, dtype, seconds) for dtype in dtypes))


def measured_flops(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    """The best rate per second of products of square matrices that fit into about so many seconds, of the size that is
    fastest. No random state moves."""
    random = torch.Generator(device).manual_seed(0)
    end, best, size = time.perf_counter() + seconds, 0.0, SMALLEST
    while True:
        matrix = torch.rand(size, size, generator=random, device=device).to(dtype)
        with faster_products(matrix):
            took = min(_times(partial(matrix.mm, matrix), device, end))
        best = max(best, 2 * size**3 / took)
        # Those of twice the size take 8 times as long, and the first one is for warming up.
        if time.perf_counter() + 2 * 8 * took > end or size == LARGEST:
            return best
        size *= 2


def _times(call: Callable[[], Tensor], device: torch.device, end: float) -> Iterator[float]:
    """Seconds of a few calls, at least one, and not the first of all."""
    for number in range(5):
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        ended = time.perf_counter()
        if number:
            yield ended - began
            if ended > end:
                return


def flops_of_batches(model: ModelConfig, target_vocabulary: int, batches: Sequence[MicroBatch | None]) -> ModelFlops:
    """Model FLOPs of the real tokens of these micro-batches."""
    found = ModelFlops(0, 0, 0, 0)
    for shape in (batch.shape for batch in batches if batch is not None):
        one = model_flops(model, target_vocabulary, shape.pairs, shape.source_tokens, shape.target_tokens)
        found = add_flops(found, one)
    return found


@dataclass(frozen=True)
class Mfu:
    """MFU of a run.

    Attributes:
        flops_per_second: the peaks of all ranks together.
    """

    model: ModelConfig
    target_vocabulary: int
    flops_per_second: float

    def of(self, interval: Interval, seconds: float) -> float:
        """Model FLOPs of the interval's real tokens over what all ranks could have done in so many seconds.

        At most 1: a peak that training exceeds was measured while the machine did other things, too.
        """
        pairs = max(1, interval.pairs_by_corpus.total())
        tokens = interval.source_tokens, interval.target_tokens
        needed = model_flops(self.model, self.target_vocabulary, pairs, *tokens).total
        return min(1.0, needed / (seconds * self.flops_per_second))
