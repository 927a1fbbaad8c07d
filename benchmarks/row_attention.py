"""Attention of many short rows that lie end to end, by kernels in Triton (row_kernels.py), against torch's, row by row.

    python benchmarks/row_attention.py    # errors, and times on a GPU; without: TRITON_INTERPRET=1, Triton, numpy below 2.4

CUDA's attention kernels of torch work on blocks of 64 or 128 positions, sentences have 30.

Axes: N, M tokens of the queries' and of the keys' side, H heads, K head size, P projections of all heads (H K), R rows.
"""

import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 32
"""Queries and keys that the kernel computes at once: most sentences are one block."""
LAUNCH = {"num_warps": 4, "num_stages": 1}
"""Warps of a program, and copies of what a loop loads ahead: most loops have one turn."""


def _launch(kernel: str, num_tiles: int, tensors: Sequence[Tensor], num_heads: int, is_causal: bool) -> None:
    """Starts a kernel for each tile and head. `tensors`: q, k, v, o, others, the starts and last the tiles of both sides."""
    q, k, v, o, q_tiles, k_tiles = *tensors[:4], *tensors[-2:]
    import row_kernels

    size = o.shape[1] // num_heads
    sizes = [each.stride(0) for each in (q, k, v, o)] + [len(q), q_tiles.shape[1], k_tiles.shape[1]]
    settings = {"CAUSAL": is_causal, "BLOCK": BLOCK, "SIZE": size, **LAUNCH}
    getattr(row_kernels, kernel)[num_tiles, num_heads](*tensors, *sizes, size**-0.5, **settings)


def parts_of(queries: Tensor, others: Tensor | None) -> Sequence[Tensor]:
    """Returns queries, keys and values, views of their inputs."""
    return queries.chunk(3, 1) if others is None else (queries, *others.chunk(2, 1))


@torch.library.custom_op("dist_transformer::attend_rows", mutates_args=())
def attend_rows(
    queries: Tensor, others: Tensor | None, q_starts: Tensor, k_starts: Tensor, q_tiles: Tensor, k_tiles: Tensor,
    num_heads: int, causal: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of each row of queries to the row of keys and values with its number.

    Returns its output, (N, P), and the logarithms of the sums of its weights, (H, N).

    Args:
        queries: (N, P); or, if `others` is None, (N, 3 P), with keys and values.
        others: keys and values, (M, 2 P).
    """
    q, k, v = parts_of(queries, others)
    o, logs = q.new_empty(q.shape), q.new_empty((num_heads, len(q)), dtype=torch.float32)
    _launch("forward", q_tiles.shape[1], [q, k, v, o, logs, q_starts, k_starts, q_tiles, k_tiles], num_heads, causal)
    return o, logs


@torch.library.custom_op("dist_transformer::attend_rows_backward", mutates_args=())
def _attend_rows_backward(
    of_o: Tensor, queries: Tensor, others: Tensor | None, o: Tensor, logs: Tensor, q_starts: Tensor, k_starts: Tensor,
    q_tiles: Tensor, k_tiles: Tensor, num_heads: int, causal: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    of_queries = torch.empty_like(queries)
    of_others = queries.new_empty(0) if others is None else torch.empty_like(others)
    grads = parts_of(of_queries, None if others is None else of_others)
    tensors = [*parts_of(queries, others), o, of_o.contiguous(), logs, *grads, q_starts, k_starts, q_tiles, k_tiles]
    _launch("backward", q_tiles.shape[1] + k_tiles.shape[1], tensors, num_heads, causal)
    return of_queries, of_others


@attend_rows.register_fake
def _(queries: Tensor, others: Tensor | None, *about: Any) -> tuple[Tensor, Tensor]:
    (num_tokens, width), num_heads = queries.shape, about[-2]
    out = queries.new_empty((num_tokens, width // 3 if others is None else width))
    return out, queries.new_empty((num_heads, num_tokens), dtype=torch.float32)


@_attend_rows_backward.register_fake
def _(_: Tensor, queries: Tensor, others: Tensor | None, *__: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(queries), queries.new_empty(0) if others is None else torch.empty_like(others)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:2], *output, *inputs[2:6])
    ctx.about = inputs[6:]
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, of_o: Tensor, _of_logs: Tensor) -> tuple[Tensor | None, ...]:
    of_queries, of_others = _attend_rows_backward(of_o, *ctx.saved_tensors, *ctx.about)
    return of_queries, None if ctx.saved_tensors[1] is None else of_others, *[None] * 6


attend_rows.register_autograd(_gradients, setup_context=_keep)


def attend_one_by_one(
    queries: Tensor, others: Tensor | None, keys_R: Tensor, queries_R: Tensor, num_heads: int, is_causal: bool
) -> Tensor:
    """The reference: torch's attention for each row, whose starts are given. Queries without keys have zeros."""
    q, k, v = parts_of(queries, others)
    out = torch.zeros_like(q)
    for a, b, c, d in zip(queries_R[:-1], queries_R[1:], keys_R[:-1], keys_R[1:], strict=True):
        if b > a and d > c:
            heads = [x.unflatten(-1, (num_heads, -1)).transpose(0, 1) for x in (q[a:b], k[c:d], v[c:d])]
            out[a:b] = F.scaled_dot_product_attention(*heads, is_causal=is_causal).transpose(0, 1).flatten(1)
    return out


def tiles_of(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the row of each tile and its number there."""
    numbers = (lengths + BLOCK - 1) // BLOCK
    row_T = torch.repeat_interleave(torch.arange(len(lengths)), numbers)
    return row_T, torch.arange(len(row_T)) - (numbers.cumsum(0) - numbers)[row_T]


def filled(tensor: Tensor, size: int, value: int) -> Tensor:
    """Returns the tensor with `value` after it, up to `size` elements."""
    return F.pad(tensor, (0, size - len(tensor)), value=value)


def worst_error(device: str, dtype: torch.dtype, longest: int) -> float:
    """Returns the largest relative distance of the kernel's output and gradients from those of fp64, one row at a time."""
    torch.manual_seed(0)
    worst = 0.0
    for is_causal in (False, True):
        rows, num_heads, size = 7, 2, 64
        of_q = torch.randint(1, longest + 1, (rows,))
        of_k = (
            of_q if is_causal else torch.randint(1, longest + 1, (rows,)) * (torch.arange(rows) != 3)
        )  # one has no keys
        starts = [filled(F.pad(n.cumsum(0), (1, 0)), rows + 3, int(n.sum())) for n in (of_q, of_k)]
        tiles = [torch.stack([filled(part, len(part) + 2, fill) for part, fill in zip(tiles_of(n), (rows, 0), strict=True)])
                 for n in (of_q, of_k)]  # fmt: skip
        of_queries, of_others = (
            torch.Size([int(of_q.sum()), size * num_heads]),
            torch.Size([int(of_k.sum()), 2 * size * num_heads]),
        )
        shapes = [torch.Size([of_queries[0], 3 * of_queries[1]])] if is_causal else [of_queries, of_others]
        exact: list[Any] = [torch.randn(shape, dtype=dtype).double().requires_grad_() for shape in shapes]
        found = [x.detach().to(device, dtype).requires_grad_() for x in exact]
        none = [None] * (2 - len(exact))
        expected = attend_one_by_one(*exact, *none, starts[1], starts[0], num_heads, is_causal)
        gradient = torch.randn(expected.shape, dtype=dtype)
        out, _ = attend_rows(*found, *none, *(x.to(device) for x in (*starts, *tiles)), num_heads, is_causal)
        ours = [out, *torch.autograd.grad(out, found, gradient.to(device))]
        theirs = [expected, *torch.autograd.grad(expected, exact, gradient.double())]
        for one, other in zip(ours, theirs, strict=True):
            worst = max(worst, float((one.detach().cpu().double() - other.detach()).norm() / other.detach().norm()))
    return worst


def milliseconds(block: int, num_warps: int, mean: int, num_heads: int) -> float:
    """Returns what forward and backward of self-attention take for 28,000 tokens in rows of about `mean`, in bf16, on a GPU."""
    from triton import testing

    global BLOCK
    BLOCK, LAUNCH["num_warps"] = block, num_warps
    torch.manual_seed(0)
    lengths = torch.randint(mean * 3 // 4, mean * 5 // 4 + 1, (28_000 // mean,))
    starts, tiles = F.pad(lengths.cumsum(0), (1, 0)).cuda(), torch.stack(tiles_of(lengths)).cuda()
    packed = torch.randn(
        int(lengths.sum()), 3 * 64 * num_heads, dtype=torch.bfloat16, device="cuda", requires_grad=True
    )

    def both_passes() -> None:
        out, _ = attend_rows(packed, None, starts, starts, tiles, tiles, num_heads, True)
        torch.autograd.grad(out, packed, out)

    return float(testing.do_bench(both_passes, return_mode="median"))


def main() -> None:
    """Prints the errors of the kernels, and their times on a GPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if importlib.util.find_spec("triton") is None or (device == "cpu" and not os.environ.get("TRITON_INTERPRET")):
        print("not checked: this needs Triton, and a GPU or TRITON_INTERPRET=1 with numpy below 2.4")
        return
    for dtype in (torch.float32, torch.bfloat16 if device == "cuda" else torch.float16):
        for longest in (20, 100, 300):
            print(f"{dtype}, up to {longest} tokens: {worst_error(device, dtype, longest):.1e}")
    for mean in (14, 28, 60, 120) if device == "cuda" else ():
        for block, warps in ((16, 1), (16, 2), (32, 2), (32, 4), (64, 4), (64, 8)):
            found = [f"{heads} heads {milliseconds(block, warps, mean, heads):.3f} ms" for heads in (8, 16)]
            print(f"rows of about {mean}, block {block}, {warps} warps: {', '.join(found)}", flush=True)


if __name__ == "__main__":
    main()
