"""Kernels for CPUs, where PyTorch's own are slower: matrix products, dropout masks, attention in 16-bit types.

Matrix products in fp32 use the faster of the two libraries that PyTorch has for CPUs. It multiplies fp32 matrices with
MKL, which uses AVX-512 on Intel's processors only. oneDNN, which it uses for bf16, uses AVX-512 on AMD's too: there a
product takes as little as half the time (benchmarks/README.md). The only way to select it for every layout and without
copies is to allow bf16 within fp32 products. oneDNN makes use of that permission only on processors with tiles (AMX);
elsewhere it computes in fp32. One test product verifies that before oneDNN is used.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

for variable, capacity in (("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64"), ("LRU_CACHE_CAPACITY", "32")):
    os.environ.setdefault(variable, capacity)
"""Smaller kernel caches: oneDNN compiles a kernel of up to a megabyte for each shape of a product, and keeps 1024;
PyTorch keeps as many handles to them. With sentences of all lengths that is more than a gigabyte, and compiling again
costs next to nothing. Both read their variable before the first such product, also one in bf16."""

PROCESSORS = Path("/proc/cpuinfo")
MANUFACTURER = "AuthenticAMD"
LARGEST_ERROR = 1e-5
"""Largest error of a product of random numbers, relative to its maximum: between fp32's 1e-6 and bf16's 1e-2."""


class Linear(nn.Linear):
    """Linear layer, x W^T + b, with the faster products."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)
        has_faster_products(self.weight)  # its test product runs now, and not in a step whose work is counted

    def forward(self, input: Tensor) -> Tensor:
        if not has_faster_products(input) or torch.is_autocast_enabled("cpu"):
            return super().forward(input)
        return _Linear.apply(input, self.weight, self.bias)  # type: ignore[no-any-return,no-untyped-call]


def has_faster_products(tensor: Tensor) -> bool:
    """True if `faster_products` has an effect on products of this tensor."""
    return tensor.is_cpu and tensor.dtype == torch.float32 and _onednn_is_faster()


def faster_products(tensor: Tensor) -> AbstractContextManager[None]:
    """Selects the faster library for products of matrices like this tensor. Not for attention: oneDNN starts its many
    small products too slowly."""
    return _by_onednn() if has_faster_products(tensor) else nullcontext()


@contextmanager
def _by_onednn() -> Iterator[None]:
    setting = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = setting.fp32_precision
    setting.fp32_precision = "bf16"
    try:
        yield
    finally:
        setting.fp32_precision = before


class _Linear(torch.autograd.Function):
    """The three products of `F.linear`, forward and backward, computed by oneDNN."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.has_bias = bias is not None
        with _by_onednn():
            return F.linear(input, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad
        gradient_NO = gradient.flatten(0, -2)
        with _by_onednn():
            of_input = (gradient_NO @ weight).view(input.shape) if needs_input else None
            of_weight = gradient_NO.T @ input.flatten(0, -2) if needs_weight else None
        of_bias = gradient_NO.sum(0) if ctx.has_bias and needs_bias else None
        return of_input, of_weight, of_bias


def dropout(input: Tensor, probability: float) -> Tensor:
    """Zeroes with a probability, a multiple of 1/65,536, and scales the rest to keep the mean.

    torch draws a mask in several times the time of its multiplication; here a mask takes 16 random bits an element from
    torch's generator.
    """
    return _Dropout.apply(input, probability)  # type: ignore[no-any-return, no-untyped-call]


class _Dropout(torch.autograd.Function):
    """The mask is of bytes: of a `bool`, comparing takes torch five times as long, and turning into numbers ten times."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, probability: float) -> Tensor:
        values = 1 << 16
        num_zeroed = min(round(probability * values), values - 1)
        words = torch.empty(-(-input.numel() // 4), dtype=torch.int64).random_(-(1 << 63), (1 << 63) - 1)
        numbers, is_kept = words.view(torch.int16)[: input.numel()], torch.empty(input.numel(), dtype=torch.uint8)
        is_kept = torch.ge(numbers, num_zeroed - values // 2, out=is_kept).view(input.shape)
        ctx.save_for_backward(is_kept)
        ctx.scale = values / (values - num_zeroed)
        return input.mul(is_kept).mul_(ctx.scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (is_kept,) = ctx.saved_tensors
        return gradient.mul(is_kept).mul_(ctx.scale), None


def attend_in_fp32(
    query_BHTK: Tensor, key_BHSK: Tensor, value_BHSV: Tensor, mask: Tensor | None, is_causal: bool
) -> Tensor:
    """Computes attention in fp32 for 16-bit inputs: torch's backward pass takes several times as long in their type."""
    mask = None if mask is None else mask.float()
    with torch.autocast("cpu", enabled=False):
        attended_BHTV = F.scaled_dot_product_attention(
            query_BHTK.float(), key_BHSK.float(), value_BHSV.float(), attn_mask=mask, is_causal=is_causal
        )
    return attended_BHTV.to(query_BHTK.dtype)


@cache
def _onednn_is_faster() -> bool:
    has_setting = torch.backends.mkldnn.is_available() and hasattr(torch.backends.mkldnn, "matmul")  # type: ignore[no-untyped-call]
    if not has_setting or torch.backends.cpu.get_cpu_capability() != "AVX512" or not _is_amd():
        return False
    matrix = torch.rand(64, 64, generator=torch.Generator().manual_seed(1))
    exact = matrix.double() @ matrix.double()
    with _by_onednn():
        error = (matrix @ matrix - exact).abs().max() / exact.max()
    return float(error) < LARGEST_ERROR


def _is_amd() -> bool:
    return PROCESSORS.exists() and MANUFACTURER in PROCESSORS.read_text(encoding="utf-8", errors="replace")
