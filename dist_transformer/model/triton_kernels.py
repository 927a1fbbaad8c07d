# mypy: ignore-errors
"""Kernels in Triton, for CUDA: attention of short rows, sum and norm (gpu_kernels.py), and the gradient of logits (loss.py).

Importing this needs Triton. Axes within a kernel: i queries, j keys, d dimensions of a head.
"""

import triton
import triton.language as tl


@triton.jit
def _tile(base, start, number, stride, i, d):
    return tl.load(base + (start + i)[:, None] * stride + d[None], mask=(i < number)[:, None], other=0.0)


@triton.jit
def _store(base, values, start, number, stride, i, d):
    places = base + (start + i)[:, None] * stride + d[None]
    tl.store(places, values.to(base.dtype.element_ty), mask=(i < number)[:, None])


@triton.jit
def _row(q_starts, k_starts):
    """Returns the first token of the program's row and their number, of the queries' and of the keys' side."""
    row = tl.program_id(0)
    q_start, k_start = tl.load(q_starts + row), tl.load(k_starts + row)
    return q_start, tl.load(q_starts + row + 1) - q_start, k_start, tl.load(k_starts + row + 1) - k_start


@triton.jit
def _weights(query, key, i, j, num_k, scale, CAUSAL: tl.constexpr):
    is_seen = (j < num_k)[None] & ((i[:, None] >= j[None]) | (not CAUSAL))
    scores = tl.where(is_seen, tl.dot(query, tl.trans(key)) * scale, float("-inf"))
    weights = tl.exp(scores - tl.max(scores, 1)[:, None])
    return weights / tl.sum(weights, 1)[:, None]


@triton.jit
def attend(
    q, k, v, out, q_starts, k_starts, q_stride, kv_stride, out_stride, scale,
    CAUSAL: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """A program computes a head of a row, of up to Q queries and K keys."""
    i, j, d = tl.arange(0, Q), tl.arange(0, K), tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    q_start, num_q, k_start, num_k = _row(q_starts, k_starts)
    query, key = _tile(q, q_start, num_q, q_stride, i, d), _tile(k, k_start, num_k, kv_stride, j, d)
    value = _tile(v, k_start, num_k, kv_stride, j, d)
    weights = _weights(query, key, i, j, num_k, scale, CAUSAL)
    _store(out, tl.dot(weights.to(value.dtype), value), q_start, num_q, out_stride, i, d)


@triton.jit
def attend_backward(
    q, k, v, of_out, of_q, of_k, of_v, q_starts, k_starts, q_stride, kv_stride, out_stride, scale,
    CAUSAL: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The weights are computed again: a row is whole in its program, so that nothing else need be kept."""
    i, j, d = tl.arange(0, Q), tl.arange(0, K), tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    q_start, num_q, k_start, num_k = _row(q_starts, k_starts)
    query, key = _tile(q, q_start, num_q, q_stride, i, d), _tile(k, k_start, num_k, kv_stride, j, d)
    value, gradient = _tile(v, k_start, num_k, kv_stride, j, d), _tile(of_out, q_start, num_q, out_stride, i, d)
    weights = _weights(query, key, i, j, num_k, scale, CAUSAL)
    of_weights = tl.dot(gradient, tl.trans(value))
    mean = tl.sum(weights * of_weights, 1)
    of_scores = (weights * (of_weights - mean[:, None]) * scale).to(query.dtype)
    _store(of_v, tl.dot(tl.trans(weights.to(gradient.dtype)), gradient), k_start, num_k, kv_stride, j, d)
    _store(of_k, tl.dot(tl.trans(of_scores), query), k_start, num_k, kv_stride, j, d)
    _store(of_q, tl.dot(of_scores, key), q_start, num_q, q_stride, i, d)


@triton.jit
def gradient_of_logits(
    logits, targets, mean_logits, losses, nlls, gradients, num_pieces, smoothing, scale, BLOCK: tl.constexpr
):
    """A program computes a token: normaliser, losses, then the gradient of its logits but for the part alike for all."""
    token = tl.program_id(0).to(tl.int64)
    logits += token * num_pieces
    gradients += token * num_pieces
    target, n = tl.load(targets + token), tl.arange(0, BLOCK)
    most, total = tl.full((BLOCK,), -1e30, tl.float32), tl.zeros((BLOCK,), tl.float32)
    for first in range(0, num_pieces, BLOCK):
        logit = tl.load(logits + first + n, mask=first + n < num_pieces, other=float("-inf"))
        newest = tl.maximum(most, logit)
        total = total * tl.exp(most - newest) + tl.exp(logit - newest)
        most = newest
    highest = tl.max(most, 0)
    normaliser = highest + tl.log(tl.sum(total * tl.exp(most - highest), 0))
    nll = normaliser - tl.load(logits + target)
    loss = (1.0 - smoothing) * nll
    if smoothing > 0.0:  # the mean logit may be infinite
        loss += smoothing * (normaliser - tl.load(mean_logits + token))
    tl.store(losses + token, loss)
    tl.store(nlls + token, nll)
    for first in range(0, num_pieces, BLOCK):
        logit = tl.load(logits + first + n, mask=first + n < num_pieces, other=float("-inf"))
        gradient = (tl.exp(logit - normaliser) - tl.where(first + n == target, 1.0 - smoothing, 0.0)) * scale
        tl.store(gradients + first + n, gradient.to(gradients.dtype.element_ty), mask=first + n < num_pieces)


@triton.jit
def add_norm(x, y, weight, bias, added, out, means, scales, size, epsilon, BLOCK: tl.constexpr):
    """A program computes a token: x + y, then its layer norm."""
    token, n = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    places, is_in = token * size + n, n < size
    values = tl.load(x + places, mask=is_in, other=0.0).to(tl.float32)
    values += tl.load(y + places, mask=is_in, other=0.0).to(tl.float32)
    rounded = values.to(added.dtype.element_ty)
    tl.store(added + places, rounded, mask=is_in)
    values = rounded.to(tl.float32)
    mean = tl.sum(values, 0) / size
    centred = tl.where(is_in, values - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / size + epsilon)
    normed = centred * scale * tl.load(weight + n, mask=is_in, other=0.0).to(tl.float32)
    normed += tl.load(bias + n, mask=is_in, other=0.0).to(tl.float32)
    tl.store(out + places, normed.to(out.dtype.element_ty), mask=is_in)
    tl.store(means + token, mean)
    tl.store(scales + token, scale)


@triton.jit
def add_norm_backward(
    added, of_out, weight, means, scales, of_added, of_weights, of_biases, num_tokens, size, BLOCK: tl.constexpr
):
    """A program computes every so manieth token, and sums their parts of the gradients of weight and bias."""
    program, n = tl.program_id(0), tl.arange(0, BLOCK)
    is_in = n < size
    factor = tl.load(weight + n, mask=is_in, other=0.0).to(tl.float32)
    of_weight, of_bias = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for token in range(program, num_tokens, tl.num_programs(0)):
        places = token * size.to(tl.int64) + n
        gradient = tl.load(of_out + places, mask=is_in, other=0.0).to(tl.float32)
        values, scale = tl.load(added + places, mask=is_in, other=0.0).to(tl.float32), tl.load(scales + token)
        normed = tl.where(is_in, (values - tl.load(means + token)) * scale, 0.0)
        of_weight += gradient * normed
        of_bias += gradient
        of_normed = gradient * factor
        change = of_normed - normed * (tl.sum(of_normed * normed, 0) / size) - tl.sum(of_normed, 0) / size
        tl.store(of_added + places, (change * scale).to(of_added.dtype.element_ty), mask=is_in)
    tl.store(of_weights + program * size + n, of_weight, mask=is_in)
    tl.store(of_biases + program * size + n, of_bias, mask=is_in)
