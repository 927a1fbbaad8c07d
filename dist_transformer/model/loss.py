"""Label-smoothed cross-entropy (5.4) directly from hidden states, without a tensor of all logits.

Axes: N tokens, R real (not padding) tokens, C real tokens of one chunk, D model, V vocabulary.

The fp32 logits of a micro-batch are the largest tensor of training by far (25,000 tokens x 37,000 pieces: 3.7 GB, and
as much again for their gradient). Here they exist for a chunk of tokens at a time, in one buffer: the chunk's loss is
computed, its gradients with respect to hidden states and weight are computed with it, and the next chunk's logits
overwrite its own; the backward pass only scales these gradients. The idea is that of Liger Kernel's fused linear
cross-entropy (Hsu et al., 2024).

With label smoothing e the gradient of a token's logits is p - (1 - e) onehot(target) - e / V. The last part is the same
for all tokens and pieces, so it needs no pass over the logits: both products are corrected instead, the one with the
weight by e times the weight's mean row, the one with the hidden states by e / V times their sum.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dist_transformer.model import gpu_kernels
from dist_transformer.model.cpu_kernels import faster_products

CHUNK_TOKENS = 4096
"""Tokens whose logits exist at once on GPUs: 606 MB of fp32 for 37,000 pieces. 1,024 took 1.3 times as long on an H200."""
CPU_CHUNK_TOKENS = 256
"""Chunk on CPUs, where logits in the cache are faster (8 MB for 8,000 pieces) and small products are no slower."""

HALF_GRADIENT_SCALE = 2.0**12
"""Scale for fp16 only: gradients of logits lie in [-1, 1], most of them under fp16's smallest normal number, 6e-5. They
are multiplied by it before they are rounded for the matrix products, whose fp32 results are divided by it again."""


def label_smoothed_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    target_N: Tensor,
    label_smoothing: float,
    pad_id: int | None = None,
    bias_V: Tensor | None = None,
    num_real: int | None = None,
    counts_hits: bool = False,
) -> tuple[Tensor, ...]:
    """Sums over the real targets of (label-smoothed loss, negative log-likelihood): natural logarithm, fp32 scalars.

    Equal to `F.cross_entropy(hidden @ weight.T + bias, target, reduction="sum", ignore_index=pad_id,
    label_smoothing=...)` on fp32 logits. Targets equal to `pad_id` cost nothing; `num_real` is the number of the others,
    without which the host waits for the GPU to count them. Only the first sum has a gradient. Matrix products run in
    the autocast type if autocast is on, otherwise in the type of `hidden_ND`; all else is fp32 (fp64 for fp64).

    With `counts_hits` also the number of real targets that are the likeliest token (int64); then without gradients.
    """
    device_type = hidden_ND.device.type
    matmul_dtype = _matmul_dtype(hidden_ND.dtype, device_type)
    # Inside a Function gradients always seem off, so their need is determined here.
    has_gradient = torch.is_grad_enabled() and not counts_hits
    needs_gradient = tuple(
        has_gradient and tensor is not None and tensor.requires_grad for tensor in (hidden_ND, weight_VD, bias_V)
    )
    with torch.autocast(device_type, enabled=False), torch.set_grad_enabled(has_gradient):
        sums: tuple[Tensor, ...] = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
            hidden_ND, weight_VD, bias_V, target_N,
            label_smoothing, pad_id, num_real, matmul_dtype, counts_hits, needs_gradient,
        )  # fmt: skip
    return sums if counts_hits else sums[:2]


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Computes the gradients in the forward pass; the backward pass multiplies them by the incoming scalar. They are
    stored in fp32 until then: as they lack the loss scale, they would underflow in fp16."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        target_N: Tensor,
        label_smoothing: float,
        pad_id: int | None,
        num_real: int | None,
        matmul_dtype: torch.dtype,
        counts_hits: bool,
        needs_gradient: tuple[bool, bool, bool],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Computes both sums, and counts the targets that are the likeliest if asked to. `needs_gradient`: True for
        each of hidden states, weight and bias that needs one."""
        wide = torch.float64 if hidden_ND.dtype == torch.float64 else torch.float32
        real_R = _real(target_N, pad_id, num_real)
        hidden_RD, target_R = hidden_ND[real_R].to(matmul_dtype), target_N[real_R]
        multiplied_weight_VD = weight_VD.to(matmul_dtype)
        mean_weight_D = multiplied_weight_VD.mean(0, dtype=wide)
        gradient_scale = HALF_GRADIENT_SCALE if matmul_dtype == torch.float16 else 1.0

        loss_sum, nll_sum = hidden_ND.new_zeros(2, dtype=wide).unbind()
        num_hits = target_N.new_zeros(())
        hidden_gradient_RD, done = torch.empty_like(hidden_RD, dtype=wide), 0
        _, needs_weight, needs_bias = needs_gradient
        is_ours = hidden_ND.is_cuda and matmul_dtype.itemsize == 2 and gpu_kernels.has_kernels()
        gradient_of = gpu_kernels.gradient_of_logits if is_ours else gradient_in_place
        weight_gradient_VD = torch.zeros_like(weight_VD, dtype=wide) if needs_weight else None
        bias_gradient_V = torch.zeros_like(bias_V, dtype=wide) if bias_V is not None and needs_bias else None
        for hidden_CD, target_C, logits_CV in _chunks(hidden_RD, target_R, multiplied_weight_VD, bias_V, wide):
            if counts_hits:
                num_hits = num_hits + (logits_CV.argmax(1) == target_C).sum()
            mean_logit_C = hidden_CD.to(wide) @ mean_weight_D
            if bias_V is not None:
                mean_logit_C = mean_logit_C + bias_V.mean(dtype=wide)
            if not any(needs_gradient):
                chunk_loss, chunk_nll = _turn_into_probabilities(logits_CV, target_C, mean_logit_C, label_smoothing)
            else:
                chunk_loss, chunk_nll, gradient_CV = gradient_of(
                    logits_CV, target_C, mean_logit_C, label_smoothing, gradient_scale, matmul_dtype
                )
                if bias_gradient_V is not None:
                    bias_gradient_V += gradient_CV.sum(0, dtype=wide)
                _product_into(hidden_gradient_RD[done : done + len(target_C)], gradient_CV, multiplied_weight_VD)
                done += len(target_C)
                if weight_gradient_VD is not None:
                    _add_product(weight_gradient_VD, gradient_CV.T, hidden_CD)
            loss_sum, nll_sum = loss_sum + chunk_loss, nll_sum + chunk_nll
        if any(needs_gradient):
            share = label_smoothing * gradient_scale
            hidden_gradient_RD.sub_(mean_weight_D, alpha=share)
            if weight_gradient_VD is not None:
                weight_gradient_VD.sub_(hidden_RD.sum(0, dtype=wide), alpha=share / len(weight_VD))
            if bias_gradient_V is not None:
                bias_gradient_V -= len(target_R) * share / len(weight_VD)
            ctx.save_for_backward(hidden_gradient_RD, weight_gradient_VD, bias_gradient_V, real_R)
        ctx.gradient_scale = gradient_scale
        ctx.hidden_shape, ctx.hidden_dtype, ctx.weight_dtype = hidden_ND.shape, hidden_ND.dtype, weight_VD.dtype
        ctx.mark_non_differentiable(nll_sum, num_hits)
        return loss_sum, nll_sum, num_hits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        hidden_gradient_RD, weight_gradient_VD, bias_gradient_V, real_R = ctx.saved_tensors
        factor = loss_gradient / ctx.gradient_scale
        hidden_gradient_ND = hidden_gradient_RD.new_zeros(ctx.hidden_shape, dtype=ctx.hidden_dtype)
        hidden_gradient_ND.index_copy_(0, real_R, (hidden_gradient_RD * factor).to(ctx.hidden_dtype))
        if weight_gradient_VD is not None:
            weight_gradient_VD = (weight_gradient_VD * factor).to(ctx.weight_dtype)
        if bias_gradient_V is not None:
            bias_gradient_V = (bias_gradient_V * factor).to(ctx.weight_dtype)
        return hidden_gradient_ND, weight_gradient_VD, bias_gradient_V, *[None] * 7


def _real(target_N: Tensor, pad_id: int | None, num_real: int | None) -> Tensor:
    """Returns the indices (R,) of the real targets."""
    if pad_id is None:
        return torch.arange(len(target_N), device=target_N.device)
    is_real_N = target_N != pad_id
    if num_real is None:
        return is_real_N.nonzero().squeeze(1)
    # An index beyond the last is an error: `num_real` is too large.
    return torch.nonzero_static(is_real_N, size=num_real, fill_value=len(target_N)).squeeze(1)


def _chunks(
    hidden_RD: Tensor, target_R: Tensor, weight_VD: Tensor, bias_V: Tensor | None, wide: torch.dtype
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields hidden states, targets and logits of each chunk; the logits overwrite those of the previous chunk."""
    size = min(CHUNK_TOKENS, CPU_CHUNK_TOKENS) if hidden_RD.is_cpu else CHUNK_TOKENS
    buffer_CV = weight_VD.new_empty(min(size, len(target_R)), len(weight_VD), dtype=wide)
    for hidden_CD, target_C in zip(torch.split(hidden_RD, size), torch.split(target_R, size), strict=True):
        logits_CV = buffer_CV[: len(target_C)]
        _product_into(logits_CV, hidden_CD, weight_VD.T)
        yield hidden_CD, target_C, logits_CV if bias_V is None else logits_CV.add_(bias_V)


def _turn_into_probabilities(
    logits_CV: Tensor, target_C: Tensor, mean_logit_C: Tensor, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    """Applies softmax in place. Returns (loss, negative log-likelihood), summed over the chunk."""
    highest_C, at_target_C = logits_CV.amax(1), logits_CV.gather(1, target_C[:, None]).squeeze(1)
    torch.softmax(logits_CV, 1, out=logits_CV)
    # The likeliest piece has at least 1 / V: its logarithm gives the normaliser without another pass of exponentials.
    log_normaliser_C = highest_C - logits_CV.amax(1).log()
    nll_C = log_normaliser_C - at_target_C
    if not label_smoothing:  # the mean logit may be infinite
        return nll_C.sum(), nll_C.sum()
    loss_C = (1 - label_smoothing) * nll_C + label_smoothing * (log_normaliser_C - mean_logit_C)
    return loss_C.sum(), nll_C.sum()


def gradient_in_place(
    logits_CV: Tensor, target_C: Tensor, mean_logit_C: Tensor, label_smoothing: float, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (loss, negative log-likelihood), summed over the chunk, and the gradient of the logits but for its part that
    is the same for all, times `scale`; overwrites the logits."""
    loss, nll = _turn_into_probabilities(logits_CV, target_C, mean_logit_C, label_smoothing)
    logits_CV.scatter_add_(1, target_C[:, None], logits_CV.new_full((len(target_C), 1), label_smoothing - 1))
    return loss, nll, (logits_CV.mul_(scale) if scale != 1 else logits_CV).to(dtype)


def _matmul_dtype(dtype: torch.dtype, device_type: str) -> torch.dtype:
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
    # CPUs without fp16 arithmetic multiply fp16 matrices some 30 times slower than fp32 ones.
    return torch.float32 if dtype == torch.float16 and device_type == "cpu" else dtype


def _product_into(product: Tensor, left: Tensor, right: Tensor) -> None:
    """Computes a matrix product; on CUDA without rounding the fp32 accumulator to a 16-bit type in between."""
    if left.dtype == product.dtype:
        with faster_products(left):
            torch.mm(left, right, out=product)
    elif left.is_cuda:
        torch.mm(left, right, out_dtype=product.dtype, out=product)
    else:
        product.copy_(left @ right)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds a matrix product in place; on CPUs it makes a tensor for it where the types are not the same."""
    if left.dtype == total.dtype:
        with faster_products(left):
            total.addmm_(left, right)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right
