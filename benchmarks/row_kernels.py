"""Triton kernels of row_attention.py; importing this needs Triton.

Axes within a kernel: i queries, j keys, d dimensions of a head. A tile is up to BLOCK tokens of a row. Attention is computed
block by block with running maxima and sums, as in FlashAttention (Dao et al., 2022), but with small blocks.
"""

import triton
import triton.language as tl


@triton.jit
def _tile(base, start, number, stride, head, i, d, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    places = (start + i)[:, None] * stride + head * SIZE + d[None]
    return tl.load(base + places, mask=(i < number)[:, None], other=0.0)


@triton.jit
def _store(base, values, start, number, stride, head, i, d, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    places = (start + i)[:, None] * stride + head * SIZE + d[None]
    tl.store(base + places, values.to(base.dtype.element_ty), mask=(i < number)[:, None])


@triton.jit
def _scores(query, key, i, j, num_k, scale, CAUSAL: tl.constexpr):  # type: ignore[no-untyped-def]
    is_seen = (j < num_k)[None] & ((i[:, None] >= j[None]) | (not CAUSAL))
    return tl.where(is_seen, tl.dot(query, tl.trans(key)) * scale, float("-inf"))


@triton.jit
def _find(tiles, num_tiles, tile, q_starts, k_starts):  # type: ignore[no-untyped-def]
    """Returns the block of a tile within its row, and first token and length of the row on both sides."""
    row, block = tl.load(tiles + tile), tl.load(tiles + num_tiles + tile)
    q_start, k_start = tl.load(q_starts + row), tl.load(k_starts + row)
    return block, q_start, tl.load(q_starts + row + 1) - q_start, k_start, tl.load(k_starts + row + 1) - k_start


@triton.jit
def forward(  # type: ignore[no-untyped-def]
    q, k, v, o, logs, q_starts, k_starts, q_tiles, k_tiles, q_stride, k_stride, v_stride, o_stride, num_tokens,
    num_q_tiles, num_k_tiles, scale, CAUSAL: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    block, q_start, num_q, k_start, num_k = _find(q_tiles, num_q_tiles, tl.program_id(0), q_starts, k_starts)
    if block * BLOCK < num_q:
        i, d = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, SIZE)
        query = _tile(q, q_start, num_q, q_stride, head, i, d, SIZE)
        most = tl.full((BLOCK,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        out = tl.zeros((BLOCK, SIZE), tl.float32)
        end = tl.minimum(num_k, (block + 1) * BLOCK) if CAUSAL else num_k
        for first in range(0, end, BLOCK):
            j = first + tl.arange(0, BLOCK)
            key = _tile(k, k_start, num_k, k_stride, head, j, d, SIZE)
            value = _tile(v, k_start, num_k, v_stride, head, j, d, SIZE)
            scores = _scores(query, key, i, j, num_k, scale, CAUSAL)
            newest = tl.maximum(most, tl.max(scores, 1))
            weights, kept = tl.exp(scores - newest[:, None]), tl.exp(most - newest)
            total = total * kept + tl.sum(weights, 1)
            out = out * kept[:, None] + tl.dot(weights.to(value.dtype), value)
            most = newest
        _store(o, out / tl.where(total > 0, total, 1.0)[:, None], q_start, num_q, o_stride, head, i, d, SIZE)
        tl.store(logs + head * num_tokens + q_start + i, most + tl.log(total), mask=i < num_q)


@triton.jit
def _gradient_of_scores(  # type: ignore[no-untyped-def]
    o, do, logs, query, key, value, i, j, d, q_start, num_q, num_k, o_stride, head, scale,
    CAUSAL: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Returns the attention weights, the gradient of their scores, and that of the output. `logs`: of the head."""
    gradient = _tile(do, q_start, num_q, o_stride, head, i, d, SIZE)
    out = _tile(o, q_start, num_q, o_stride, head, i, d, SIZE)
    log = tl.load(logs + q_start + i, mask=i < num_q, other=float("inf"))
    weights = tl.exp(_scores(query, key, i, j, num_k, scale, CAUSAL) - log[:, None])
    of_weights = tl.dot(gradient, tl.trans(value))
    mean = tl.sum(out.to(tl.float32) * gradient.to(tl.float32), 1)
    return weights, weights * (of_weights - mean[:, None]) * scale, gradient


@triton.jit
def backward(  # type: ignore[no-untyped-def]
    q, k, v, o, do, logs, dq, dk, dv, q_starts, k_starts, q_tiles, k_tiles, q_stride, k_stride, v_stride, o_stride,
    num_tokens, num_q_tiles, num_k_tiles, scale, CAUSAL: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The first programs compute the gradients of a tile of keys and values each, the others of a tile of queries."""
    tile, head, d = tl.program_id(0), tl.program_id(1), tl.arange(0, SIZE)
    logs += head * num_tokens
    if tile < num_k_tiles:
        block, q_start, num_q, k_start, num_k = _find(k_tiles, num_k_tiles, tile, q_starts, k_starts)
        if block * BLOCK < num_k:
            j = block * BLOCK + tl.arange(0, BLOCK)
            key = _tile(k, k_start, num_k, k_stride, head, j, d, SIZE)
            value = _tile(v, k_start, num_k, v_stride, head, j, d, SIZE)
            of_key, of_value = tl.zeros((BLOCK, SIZE), tl.float32), tl.zeros((BLOCK, SIZE), tl.float32)
            for first in range(block * BLOCK if CAUSAL else 0, num_q, BLOCK):
                i = first + tl.arange(0, BLOCK)
                query = _tile(q, q_start, num_q, q_stride, head, i, d, SIZE)
                weights, of_scores, gradient = _gradient_of_scores(
                    o, do, logs, query, key, value, i, j, d, q_start, num_q, num_k, o_stride, head, scale, CAUSAL, SIZE,
                )  # fmt: skip
                of_value += tl.dot(tl.trans(weights.to(gradient.dtype)), gradient)
                of_key += tl.dot(tl.trans(of_scores.to(query.dtype)), query)
            _store(dk, of_key, k_start, num_k, k_stride, head, j, d, SIZE)
            _store(dv, of_value, k_start, num_k, v_stride, head, j, d, SIZE)
    else:
        block, q_start, num_q, k_start, num_k = _find(q_tiles, num_q_tiles, tile - num_k_tiles, q_starts, k_starts)
        if block * BLOCK < num_q:
            i = block * BLOCK + tl.arange(0, BLOCK)
            query = _tile(q, q_start, num_q, q_stride, head, i, d, SIZE)
            of_query = tl.zeros((BLOCK, SIZE), tl.float32)
            end = tl.minimum(num_k, (block + 1) * BLOCK) if CAUSAL else num_k
            for first in range(0, end, BLOCK):
                j = first + tl.arange(0, BLOCK)
                key = _tile(k, k_start, num_k, k_stride, head, j, d, SIZE)
                value = _tile(v, k_start, num_k, v_stride, head, j, d, SIZE)
                _, of_scores, _ = _gradient_of_scores(
                    o, do, logs, query, key, value, i, j, d, q_start, num_q, num_k, o_stride, head, scale, CAUSAL, SIZE,
                )  # fmt: skip
                of_query += tl.dot(of_scores.to(key.dtype), key)
            _store(dq, of_query, q_start, num_q, q_stride, head, i, d, SIZE)
