"""Operations with kernels of our own for CUDA (triton_kernels.py): attention of short rows that lie end to end, the sum and
norm after a sub-layer, the gradient of logits.

torch's kernels of attention work on blocks of 64 or 128 positions, and sentences have 30; its gradient of a norm's weight
takes longer than all else of the norm; its softmax reads and writes the logits several times.
Axes: N tokens of all rows of queries, M of keys, P projections of all heads, R rows; C tokens, V vocabulary; D model.
"""

import functools
import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from dist_transformer.model.attention import Joined

log = logging.getLogger(__name__)

LONGEST = 128
"""Tokens of a row that one program can hold; 64 where it has less shared memory, as on GPUs for desktops."""
LARGEST_PROGRAM_BYTES = 163_840
"""Shared memory of the backward pass for LONGEST tokens and heads of 128."""
LEAST_ELEMENTS = 2**25
"""Hidden numbers of both sides of a pass, with padding, from which the rows are computed end to end: below, the GPU waits for
the host, to which a kernel of Triton costs more. On an H200 `base` was as fast both ways with 61,440 tokens, and 1.29 times as
fast with 122,880; `big` 1.34 times."""
LEAST_CAPABILITY = (8, 0)
"""Compute capability that Triton's compiler is made for: for a V100 (7.0) it takes minutes and gigabytes a kernel."""
Blocks = tuple[int, int]
NORM_PROGRAMS = 1056
"""Programs of the backward pass of a norm, each of which sums gradients of the weight."""
_properties_of = functools.cache(torch.cuda.get_device_properties)  # asked for at each attention


is_off = False
"""True: torch's kernels are used alone, as `begin_checks` finds right where a rank of the group has none of ours."""


def has_kernels() -> bool:
    """True if our kernels are used."""
    return not is_off and run_here()


@functools.cache
def run_here() -> bool:
    """True if Triton is installed and its kernels run here; else a warning says why not."""
    if torch.cuda.get_device_capability() < LEAST_CAPABILITY:
        log.warning("kernels    torch's alone, which are slower: ours need compute capability %d.%d", *LEAST_CAPABILITY)
        return False
    try:
        try_kernels("cuda")
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001  (Triton's, of its compiler, of the cache's disk: training goes on without)
        told = "kernels    torch's alone, which are slower: Triton needs a C compiler and Python's headers: %s: %s"
        log.warning(told, type(error).__name__, error)
        return False
    return True


def try_kernels(device: str) -> None:
    """Computes a little with each kernel."""
    half: dict[str, Any] = {"dtype": torch.float16, "device": device}
    row, ones, starts = torch.ones(1, 48, **half), torch.ones(48, **half), torch.arange(2, device=device)
    tries: tuple[tuple[Any, Any], ...] = (
        (_AttendRows, (row, None, starts, starts, 1, (16, 16), True)), (_AddNorm, (row, row, ones, ones, 1e-5)),
    )  # fmt: skip
    for function, inputs in tries:
        ctx = SimpleNamespace()  # not autograd, which in a layer that is computed again in backward would do so here
        ctx.save_for_backward = lambda *tensors, ctx=ctx: setattr(ctx, "saved_tensors", tensors)
        function.backward(ctx, function.forward(ctx, *inputs))
    gradient_of_logits(row.float(), starts[:1], row.float()[:, 0], 0.1, 1.0, torch.float16)


def parts_of(queries: Tensor, others: Tensor | None) -> Sequence[Tensor]:
    """Returns queries, keys and values, views of their inputs."""
    return queries.chunk(3, 1) if others is None else (queries, *others.chunk(2, 1))


def _launch(name: str, tensors: Sequence[Tensor], out: Tensor, heads: int, blocks: Blocks, is_causal: bool) -> None:
    """Launches a kernel of attention, of which `tensors` are the first arguments; `out` is the result, or its gradient."""
    from dist_transformer.model import triton_kernels

    queries, keys, *_, starts = tensors
    strides, size = (queries.stride(0), keys.stride(0), out.stride(0)), queries.shape[1] // heads
    num_warps = {16: 1, 32: 2}.get(max(blocks), 4)
    kernel = getattr(triton_kernels, name)[len(starts) - 1, heads]
    kernel(*tensors, *strides, size**-0.5, is_causal, *blocks, size, num_warps=num_warps, num_stages=1)


class _AttendRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, others: Tensor | None, q_starts: Tensor, k_starts: Tensor, heads: int, blocks: Blocks,
        is_causal: bool,
    ) -> Tensor:  # fmt: skip
        q, k, v = parts_of(queries, others)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        ctx.save_for_backward(queries, others, q_starts, k_starts)
        ctx.heads, ctx.blocks, ctx.is_causal = heads, blocks, is_causal
        _launch("attend", [q, k, v, out, q_starts, k_starts], out, heads, blocks, is_causal)
        return out

    @staticmethod
    def backward(ctx: Any, of_out: Tensor) -> tuple[Tensor | None, ...]:
        queries, others, *starts = ctx.saved_tensors
        q, k, v = parts_of(queries, others)
        of_queries, of_others = torch.empty_like(queries), None if others is None else torch.empty_like(others)
        of_out = of_out.contiguous()
        tensors = [q, k, v, of_out, *parts_of(of_queries, of_others), *starts]
        _launch("attend_backward", tensors, of_out, ctx.heads, ctx.blocks, ctx.is_causal)
        return of_queries, of_others, *[None] * 5


def can_attend(like: Tensor, longest: int, widths: Sequence[int], num_heads: int) -> bool:
    """True if `attend_rows` computes rows of up to so many tokens with keys and values of these widths, of the type and on the
    device of `like`: on CUDA in 16 bits."""
    if not like.is_cuda or like.itemsize != 2 or not has_kernels():
        return False
    properties, size = _properties_of(like.device), widths[0] // num_heads
    is_roomy = getattr(properties, "shared_memory_per_block_optin", 0) >= LARGEST_PROGRAM_BYTES
    return longest <= (LONGEST if is_roomy else 64) and widths[0] == widths[-1] and size in (16, 32, 64, 128)


def attend_rows(
    queries_1NP: Tensor, others_1MP: Tensor | None, keys: "Joined", queries: "Joined", num_heads: int, is_causal: bool
) -> Tensor:
    """Attention (1, N, P) of each row of queries to the row of keys and values with its number.

    Args:
        queries_1NP: queries; or, if the others are None, queries, keys and values, (1, N, 3 P).
        others_1MP: keys and values, (1, M, 2 P).
        is_causal: no query attends to later keys.
    """
    others = None if others_1MP is None else others_1MP.squeeze(0)
    blocks = (queries.block, keys.block)
    attended: Tensor = _AttendRows.apply(  # type: ignore[no-untyped-call]
        queries_1NP.squeeze(0), others, queries.starts_R, keys.starts_R, num_heads, blocks, is_causal
    )
    return attended.unsqueeze(0)


def can_norm(x: Tensor, y: Tensor, norm: nn.Module, alpha: float) -> bool:
    """True if `add_and_norm` computes norm(alpha x + y): on CUDA, of one 16-bit type, of a size that is worth it."""
    if not x.is_cuda or x.itemsize != 2 or x.numel() < LEAST_ELEMENTS // 4 or not has_kernels():
        return False
    is_plain = isinstance(norm, nn.LayerNorm) and alpha == 1 and not hasattr(norm.weight, "ds_id")  # ZeRO 3's
    return is_plain and x.dtype == y.dtype == norm.weight.dtype and x.is_contiguous() and y.is_contiguous()


def add_and_norm(x: Tensor, y: Tensor, norm: nn.Module) -> Tensor:
    """Returns the layer norm of x + y, computed by one kernel each way."""
    return _AddNorm.apply(x, y, norm.weight, norm.bias, norm.eps)  # type: ignore[no-any-return,no-untyped-call]


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
        from dist_transformer.model import triton_kernels

        size, added, out = x.shape[-1], torch.empty_like(x), torch.empty_like(x)
        means_2N = torch.empty(2, x.numel() // size, dtype=torch.float32, device=x.device)
        tensors, block = (x, y, weight, bias, added, out, *means_2N), 1 << (size - 1).bit_length()
        triton_kernels.add_norm[(means_2N.shape[1],)](*tensors, size, epsilon, block, num_warps=4)
        ctx.save_for_backward(added, weight, means_2N)
        return out

    @staticmethod
    def backward(ctx: Any, of_out: Tensor) -> tuple[Tensor | None, ...]:
        from dist_transformer.model import triton_kernels

        added, weight, means_2N = ctx.saved_tensors
        num_tokens, size, of_added = means_2N.shape[1], added.shape[-1], torch.empty_like(added)
        parts_2PD = means_2N.new_empty(2, min(num_tokens, NORM_PROGRAMS), size)
        tensors = added, of_out.contiguous(), weight, *means_2N, of_added, *parts_2PD
        block, num_warps = 1 << (size - 1).bit_length(), 1 if size <= 1024 else 8
        triton_kernels.add_norm_backward[(parts_2PD.shape[1],)](*tensors, num_tokens, size, block, num_warps=num_warps)
        return of_added, of_added, *parts_2PD.sum(1).to(weight.dtype), None


def gradient_of_logits(
    logits_CV: Tensor, target_C: Tensor, mean_logit_C: Tensor, label_smoothing: float, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes what `gradient_in_place` of loss.py does, in one kernel that leaves the logits, in fp32, as they are."""
    from dist_transformer.model import triton_kernels

    losses_2C, gradient_CV = logits_CV.new_empty(2, len(target_C)), torch.empty_like(logits_CV, dtype=dtype)
    tensors = logits_CV, target_C, mean_logit_C, *losses_2C, gradient_CV
    kernel = triton_kernels.gradient_of_logits[(len(target_C),)]
    kernel(*tensors, logits_CV.shape[1], label_smoothing, scale, BLOCK=4096, num_warps=8)
    loss, nll = losses_2C.sum(1)
    return loss, nll, gradient_CV
