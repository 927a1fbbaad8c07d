"""Sentences end to end, without padding, with attention for short rows and layers as CUDA graphs: levers of gpu.py.

The program does not have them: it will if they earn their place on a GPU (results/2026-11-26-gpu.md: 6.4 ms less of a step
of 45 on the device, nothing in all, because the host takes longer to start the kernels; graphs are the way out of that).

    python benchmarks/rows_end_to_end.py    # the kernel against torch's attention, on a GPU or by Triton's interpreter

A micro-batch of sentences end to end has about the same number of tokens each time. Filled up to the largest of them, all
have one shape, so that each layer can be recorded once as a CUDA graph for its forward and one for its backward pass
(`torch.cuda.make_graphed_callables`) and started by one call. Gradients come by the parameters' hooks as they do without.

Axes: N tokens, D model, H heads, K head size, P projections of all heads, R rows (sentences).
"""

import importlib.util
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from synthetic_corpus import PAD_ID, SEED, write_tokens
from torch import Tensor, nn
from torch.nn import functional as F

from dist_transformer.config.schema import ModelConfig
from dist_transformer.data.loader.loader import MicroBatch
from dist_transformer.model.attention import CrossAttention, SelfAttention
from dist_transformer.model.loss import gradient_of_logits
from dist_transformer.model.transformer import Transformer

BLOCK = 32
"""Queries and keys that the kernel computes at once: most sentences are one block."""
LAUNCH = {"num_warps": 4, "num_stages": 1}
"""Warps of a program, and copies of what a loop loads ahead: most loops have one turn."""
ROUNDING = 256
"""Tokens of a side are filled up to a multiple of this."""


class Side(NamedTuple):
    """One side of a micro-batch: its sentences end to end, then padding, in rows of up to BLOCK tokens."""

    starts_R: Tensor
    """First token of each row, then the end of the last one, repeated up to a fixed length."""
    tiles_2T: Tensor
    """Row of each tile, up to BLOCK tokens of a row, and its number there; then those of an empty row, up to a fixed length."""


if importlib.util.find_spec("triton"):
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
    def _forward(  # type: ignore[no-untyped-def]
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
    def _backward(  # type: ignore[no-untyped-def]
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
                        o,
                        do,
                        logs,
                        query,
                        key,
                        value,
                        i,
                        j,
                        d,
                        q_start,
                        num_q,
                        num_k,
                        o_stride,
                        head,
                        scale,
                        CAUSAL,
                        SIZE,
                    )
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
                        o,
                        do,
                        logs,
                        query,
                        key,
                        value,
                        i,
                        j,
                        d,
                        q_start,
                        num_q,
                        num_k,
                        o_stride,
                        head,
                        scale,
                        CAUSAL,
                        SIZE,
                    )
                    of_query += tl.dot(of_scores.to(key.dtype), key)
                _store(dq, of_query, q_start, num_q, q_stride, head, i, d, SIZE)


def _launch(kernel: Any, num_tiles: int, tensors: Sequence[Tensor], num_heads: int, is_causal: bool) -> None:
    """Starts a kernel for each tile and head. `tensors`: q, k, v, o, others, the starts and last the tiles of both sides."""
    q, k, v, o, q_tiles, k_tiles = *tensors[:4], *tensors[-2:]
    size = o.shape[1] // num_heads
    sizes = [each.stride(0) for each in (q, k, v, o)] + [len(q), q_tiles.shape[1], k_tiles.shape[1]]
    settings = {"CAUSAL": is_causal, "BLOCK": BLOCK, "SIZE": size, **LAUNCH}
    kernel[num_tiles, num_heads](*tensors, *sizes, size**-0.5, **settings)


def _parts(queries: Tensor, others: Tensor | None) -> Sequence[Tensor]:
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
    q, k, v = _parts(queries, others)
    o, logs = q.new_empty(q.shape), q.new_empty((num_heads, len(q)), dtype=torch.float32)
    _launch(_forward, q_tiles.shape[1], [q, k, v, o, logs, q_starts, k_starts, q_tiles, k_tiles], num_heads, causal)
    return o, logs


@torch.library.custom_op("dist_transformer::attend_rows_backward", mutates_args=())
def _attend_rows_backward(
    of_o: Tensor, queries: Tensor, others: Tensor | None, o: Tensor, logs: Tensor, q_starts: Tensor, k_starts: Tensor,
    q_tiles: Tensor, k_tiles: Tensor, num_heads: int, causal: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    of_queries, of_others = (
        torch.empty_like(queries),
        queries.new_empty(0) if others is None else torch.empty_like(others),
    )
    grads = _parts(of_queries, None if others is None else of_others)
    tensors = [*_parts(queries, others), o, of_o.contiguous(), logs, *grads, q_starts, k_starts, q_tiles, k_tiles]
    _launch(_backward, q_tiles.shape[1] + k_tiles.shape[1], tensors, num_heads, causal)
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
    q, k, v = _parts(queries, others)
    out = torch.zeros_like(q)
    for a, b, c, d in zip(queries_R[:-1], queries_R[1:], keys_R[:-1], keys_R[1:], strict=True):
        if b > a and d > c:
            heads = [x.unflatten(-1, (num_heads, -1)).transpose(0, 1) for x in (q[a:b], k[c:d], v[c:d])]
            out[a:b] = F.scaled_dot_product_attention(*heads, is_causal=is_causal).transpose(0, 1).flatten(1)
    return out


def _attend(
    queries: Tensor, others: Tensor | None, keys_of: Side, queries_of: Side, num_heads: int, is_causal: bool
) -> Tensor:
    if queries.is_cpu:
        return attend_one_by_one(queries, others, keys_of.starts_R, queries_of.starts_R, num_heads, is_causal)
    sides = queries_of.starts_R, keys_of.starts_R, queries_of.tiles_2T, keys_of.tiles_2T
    out, _ = attend_rows(queries, others, *sides, num_heads, is_causal)
    return out


def _self_attention(module: SelfAttention, input_1ND: Tensor, _mask: None = None, joined: Any = None) -> Tensor:
    projected_NP = module.query_key_value(input_1ND)[0]
    return module.output(_attend(projected_NP, None, joined, joined, module.num_heads, module.is_causal)[None])  # type: ignore[no-any-return]


def _cross_attention(
    module: CrossAttention, input_1ND: Tensor, memory_1MD: Tensor, _mask: None, joined: Any = None
) -> Tensor:
    query_NP, key_value_MP = module.query(input_1ND)[0], module.key_value(memory_1MD)[0]
    return module.output(_attend(query_NP, key_value_MP, *joined, module.num_heads, False)[None])  # type: ignore[no-any-return]


class _EncoderLayer(nn.Module):
    """A layer whose arguments are tensors, as CUDA graphs need it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_1MD: Tensor, starts_R: Tensor, tiles_2T: Tensor) -> Tensor:
        return self.layer(hidden_1MD, None, Side(starts_R, tiles_2T))  # type: ignore[no-any-return]


class _DecoderLayer(nn.Module):
    """The same of the decoder: hidden states, memory, then starts and tiles of the source and of the target."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_1ND: Tensor, memory_1MD: Tensor, *sides: Tensor) -> Tensor:
        return self.layer(hidden_1ND, memory_1MD, None, (Side(*sides[:2]), Side(*sides[2:])))  # type: ignore[no-any-return]


class RowsEndToEnd:
    """Forward passes of an engine over micro-batches whose sentences lie end to end.

    Attributes:
        filling: the share of real tokens in what is computed.
    """

    def __init__(
        self, wait_for_weights: Callable[[], None], model: Transformer, batches: Sequence[MicroBatch], device: torch.device,
        is_compiled: bool = False, is_graphed: bool = False,
    ) -> None:  # fmt: skip
        """`batches`: all that there will be. The model computes only such passes from here on, and no other model can."""
        self._wait_for_weights, self._model, self.device = wait_for_weights, model, device
        lengths = [_lengths(batch, model.pad_id) for batch in batches]
        totals = torch.tensor([[int(side.sum()) for side in sides] for sides in lengths])
        self._longest = max(int(side.max()) for sides in lengths for side in sides)
        self._sizes = [-(-int(most) // ROUNDING) * ROUNDING for most in totals.max(0).values]
        self.filling = float(totals.sum()) / (sum(self._sizes) * len(batches))
        rows = [[_rows(side, size) for side, size in zip(sides, self._sizes, strict=True)] for sides in lengths]
        self._num_rows = 1 + max(len(side) for sides in rows for side in sides)
        self._num_tiles = [max(len(_tiles(sides[n])[0]) for sides in rows) for n in (0, 1)]
        self._ready = {id(batch): self._end_to_end(batch, sides) for batch, sides in zip(batches, rows, strict=True)}
        SelfAttention.forward, CrossAttention.forward = _self_attention, _cross_attention  # type: ignore[method-assign]
        model.decode_hidden = self._decode_hidden  # type: ignore[assignment, method-assign]
        self._encoder = [_EncoderLayer(layer) for layer in model.encoder_layers]
        self._decoder = [_DecoderLayer(layer) for layer in model.decoder_layers]
        if is_compiled:
            for layer in (*model.encoder_layers, *model.decoder_layers):
                layer.forward = torch.compile(layer.forward, dynamic=False)
            model._gradient_of = torch.compile(gradient_of_logits, dynamic=True)
        if is_graphed:
            self._record(batches[0])

    def __call__(
        self, engine: Callable[..., Any], batches: Sequence[MicroBatch], device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Returns what `token_metrics.forward` does, of one micro-batch."""
        self._wait_for_weights()  # a graph runs no hook of a layer
        (batch,) = batches
        tokens, about = self._on_device(batch)
        loss, nll = engine(*tokens, batch.shape.target_tokens, about)
        return loss, nll

    def _on_device(self, batch: MicroBatch) -> tuple[list[Tensor], list[Tensor]]:
        """Returns source, the decoder's input and output, (1, N) each; places within rows, starts and tiles of both sides."""
        source, target = self._sizes
        starts, tiles = [self._num_rows + 1] * 2, [2 * number for number in self._num_tiles]
        sizes = [source, target, target, source, target, *starts, *tiles]
        parts = torch.split(self._ready[id(batch)].to(self.device, non_blocking=True), sizes)
        tokens, places, starts_R, tiles_T = parts[:3], parts[3:5], parts[5:7], parts[7:]
        return [part[None] for part in tokens], [*places, *starts_R, *(part.view(2, -1) for part in tiles_T)]

    def _end_to_end(self, batch: MicroBatch, rows: Sequence[Tensor]) -> Tensor:
        """Returns in one tensor what `_on_device` takes apart."""
        pad_id = self._model.pad_id
        kept = [batch.source_BS != pad_id, batch.target_out_BT != pad_id]
        sides = [batch.source_BS[kept[0]], batch.target_in_BT[kept[1]], batch.target_out_BT[kept[1]]]
        sizes = [self._sizes[0], self._sizes[1], self._sizes[1]]
        tokens = [F.pad(side, (0, size - len(side)), value=pad_id) for side, size in zip(sides, sizes, strict=True)]
        places = [torch.cat([torch.arange(int(length)) for length in side]) for side in rows]
        starts = [
            _filled(F.pad(side.cumsum(0), (1, 0)), self._num_rows + 1, size)
            for side, size in zip(rows, self._sizes, strict=True)
        ]
        empty = self._num_rows - 1
        tiles = [
            _filled(part, number, value)
            for side, number in zip(rows, self._num_tiles, strict=True)
            for part, value in zip(_tiles(side), (empty, 0), strict=True)
        ]
        flat = torch.cat([*tokens, *places, *starts, *tiles])
        return flat.pin_memory() if self.device.type == "cuda" else flat

    def _decode_hidden(self, source_1M: Tensor, target_1N: Tensor, about: Sequence[Tensor]) -> Tensor:
        source_places, target_places, source_R, target_R, source_T, target_T = about
        model = self._model
        memory_1MD = self._embed(model.source_embedding, source_1M, source_places)
        for layer in self._encoder:
            memory_1MD = layer(memory_1MD, source_R, source_T)
        memory_1MD = model.encoder_norm(memory_1MD)
        hidden_1ND = self._embed(model.target_embedding, target_1N, target_places)
        for decoder_layer in self._decoder:
            hidden_1ND = decoder_layer(hidden_1ND, memory_1MD, source_R, source_T, target_R, target_T)
        return model.decoder_norm(hidden_1ND)  # type: ignore[no-any-return]

    def _embed(self, embedding: nn.Module, tokens_1N: Tensor, places_N: Tensor) -> Tensor:
        scaled_1ND = embedding(tokens_1N) * self._model.embedding_scale
        embedded_1ND = scaled_1ND + self._model.source_positions(0, self._longest, scaled_1ND)[places_N]
        return self._model.embedding_dropout(embedded_1ND.to(self._model._dtype))  # type: ignore[no-any-return]

    def _record(self, batch: MicroBatch) -> None:
        """Records the layers as graphs, in the order of their use."""
        _, (_, _, source_R, target_R, source_T, target_T) = self._on_device(batch)
        width, dtype = self._model.source_embedding.embedding_dim, self._model._dtype

        def hidden(size: int) -> Tensor:
            return torch.randn(1, size, width, dtype=dtype, device=self.device, requires_grad=True)

        def copies(*tensors: Tensor) -> tuple[Tensor, ...]:
            return tuple(tensor.clone() for tensor in tensors)

        source, target = self._sizes
        encoder = [(hidden(source), *copies(source_R, source_T)) for _ in self._encoder]
        decoder = [
            (hidden(target), hidden(source), *copies(source_R, source_T, target_R, target_T)) for _ in self._decoder
        ]
        torch.cuda.make_graphed_callables((*self._encoder, *self._decoder), (*encoder, *decoder))


def _lengths(batch: MicroBatch, pad_id: int) -> tuple[Tensor, Tensor]:
    source_B, target_B = ((side != pad_id).sum(1) for side in (batch.source_BS, batch.target_out_BT))
    return source_B, target_B


def _rows(lengths: Tensor, size: int) -> Tensor:
    """Returns the lengths of the sentences and of the rows of padding after them."""
    padding = size - int(lengths.sum())
    return torch.cat(
        [lengths, torch.tensor([BLOCK] * (padding // BLOCK) + [padding % BLOCK] * (padding % BLOCK > 0)).long()]
    )


def _tiles(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the row of each tile and its number there."""
    numbers = (lengths + BLOCK - 1) // BLOCK
    row_T = torch.repeat_interleave(torch.arange(len(lengths)), numbers)
    return row_T, torch.arange(len(row_T)) - (numbers.cumsum(0) - numbers)[row_T]


def _filled(tensor: Tensor, size: int, value: int) -> Tensor:
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
        starts = [_filled(F.pad(n.cumsum(0), (1, 0)), rows + 3, int(n.sum())) for n in (of_q, of_k)]
        tiles = [torch.stack([_filled(part, len(part) + 2, fill) for part, fill in zip(_tiles(n), (rows, 0), strict=True)])
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


def model_errors(folder: Path) -> tuple[float, float]:
    """Returns the largest relative distances of losses and of gradients from those of the model with padding, in fp64."""
    corpus = write_tokens(folder, 400, 100, 128)
    loader = (data := corpus.run_data(1, 1024, 200)).loader(data.start(), 0, 0, 1, 0)
    batches = [batch for batch in (loader.next_step().batches[0] for _ in range(3)) if batch is not None]
    torch.manual_seed(SEED)
    model = Transformer(ModelConfig(preset="tiny", dropout=0.0), 100, 100, PAD_ID).double()

    def gradients(forward: Callable[[MicroBatch], Tensor]) -> list[Tensor]:
        found = []
        for batch in batches:
            loss = forward(batch)
            model.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            found += [loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])]
        return found

    padded = gradients(lambda batch: model.loss(batch.source_BS, batch.target_in_BT, batch.target_out_BT, 0.1)[0])
    rows = RowsEndToEnd(lambda: None, model, batches, torch.device("cpu"))
    ours = gradients(
        lambda batch: rows(lambda *sides: model.loss(*sides[:3], 0.1, *sides[3:]), [batch], rows.device)[0]
    )
    distances = [float((one - other).norm() / other.norm()) for one, other in zip(ours, padded, strict=True)]
    return max(distances[::2]), max(distances[1::2])


def milliseconds(block: int, num_warps: int, mean: int, num_heads: int) -> float:
    """Returns what forward and backward of self-attention take for 28,000 tokens in rows of about `mean`, in bf16, on a GPU."""
    global BLOCK
    BLOCK, LAUNCH["num_warps"] = block, num_warps
    torch.manual_seed(0)
    lengths = torch.randint(mean * 3 // 4, mean * 5 // 4 + 1, (28_000 // mean,))
    starts, tiles = F.pad(lengths.cumsum(0), (1, 0)).cuda(), torch.stack(_tiles(lengths)).cuda()
    packed = torch.randn(
        int(lengths.sum()), 3 * 64 * num_heads, dtype=torch.bfloat16, device="cuda", requires_grad=True
    )

    def both_passes() -> None:
        out, _ = attend_rows(packed, None, starts, starts, tiles, tiles, num_heads, True)
        torch.autograd.grad(out, packed, out)

    return float(triton.testing.do_bench(both_passes, return_mode="median"))


def main() -> None:
    """Prints the errors of the kernel and of the model, and the kernel's times on a GPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if "tl" not in globals() or (device == "cpu" and not os.environ.get("TRITON_INTERPRET")):
        print("the kernel: not checked, which needs a GPU with Triton, or TRITON_INTERPRET=1")
    else:
        for dtype in (torch.float32, torch.bfloat16 if device == "cuda" else torch.float16):
            for longest in (20, 100, 300):
                print(f"the kernel, {dtype}, up to {longest} tokens: {worst_error(device, dtype, longest):.1e}")
    for mean in (14, 28, 60, 120) if device == "cuda" else ():
        for block, warps in ((16, 1), (16, 2), (32, 2), (32, 4), (64, 4), (64, 8)):
            found = [f"{heads} heads {milliseconds(block, warps, mean, heads):.3f} ms" for heads in (8, 16)]
            print(f"rows of about {mean}, block {block}, {warps} warps: {', '.join(found)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        of_losses, of_gradients = model_errors(Path(folder))
    print(f"the model without padding, fp64: losses {of_losses:.1e}, gradients {of_gradients:.1e}")


if __name__ == "__main__":
    main()
