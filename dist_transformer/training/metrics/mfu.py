"""Peak FLOP/s of a rank's device, and MFU: the share of it that training uses for the model's arithmetic."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from dist_transformer.config.schema import ModelConfig
from dist_transformer.model.cpu_kernels import faster_products
from dist_transformer.planning.flops import model_flops, published_flops
from dist_transformer.training.train_state import Interval

PEAK_SECONDS = 0.05
"""Time to measure a peak that is not published, at each start."""
SMALLEST, LARGEST = 256, 16384
"""Limits of the rows of the matrices that are multiplied."""

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def peak_of(device: torch.device, precision: str) -> tuple[float, bool]:
    """Returns the FLOP/s of matrix products on the device of one rank, to which MFU is relative, and whether they are
    published: dense, by the data sheet. If they are not, measures for PEAK_SECONDS large products in the precision of the
    run (on CPUs: or in fp32, if that is faster), with the threads of the rank.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    if published := published_flops(name, precision):
        return published, True
    dtypes = {DTYPES[precision]}
    if device.type == "cpu":
        dtypes.add(torch.float32)  # parts of a step on CPUs are fp32 in any precision, which is faster on many CPUs
    return max(measured_flops(device, dtype, PEAK_SECONDS / len(dtypes)) for dtype in dtypes), False


def measured_flops(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    """Measures FLOP/s of products of square matrices, of the fastest size for which there are memory and time, about
    `seconds`; 0 if there is none. No global random state is used."""
    random = torch.Generator(device).manual_seed(0)
    end, best, size, took = time.perf_counter() + seconds, 0.0, SMALLEST, 0.0
    with suppress(RuntimeError, MemoryError):  # too little memory: a number for people ends no run
        # Products of twice the size take 8 times as long, and the first one is for warming up.
        while size <= LARGEST and (not best or time.perf_counter() + 2 * 8 * took <= end):
            matrix = torch.rand(size, size, generator=random, device=device).to(dtype)
            with faster_products(matrix):
                took = min(_times(partial(matrix.mm, matrix), device, end))
            best, size = max(best, 2 * size**3 / took), 2 * size
    return best


def _times(call: Callable[[], Tensor], device: torch.device, end: float) -> Iterator[float]:
    """Yields the seconds of a few calls, at least one, without the first, which warms up."""
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


def mfu_of(
    model: ModelConfig, target_vocabulary: int, flops_per_second: float, interval: Interval, seconds: float
) -> float:
    """Returns the model FLOPs of the interval's real tokens over the peaks of all ranks together in these seconds.

    At most 1: a peak that training exceeds was measured while the machine was busy with other work. 0 without a peak.
    """
    pairs = max(1, interval.pairs_by_corpus.total())
    needed = model_flops(model, target_vocabulary, pairs, interval.source_tokens, interval.target_tokens).total
    return min(1.0, needed / (seconds * (flops_per_second or float("inf"))))
