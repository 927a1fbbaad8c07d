"""Sentences end to end, without padding (attention: row_attention.py), and layers as CUDA graphs: levers of gpu.py.

The program does not have them: it will if they earn their place on a GPU (results/2026-11-26-gpu.md: 6.4 ms less of a step
of 45 on the device, nothing in all, because the host takes longer to start the kernels; graphs are the way out of that).

    python benchmarks/rows_end_to_end.py    # losses and gradients against those of the model with padding

A micro-batch of sentences end to end has about the same number of tokens each time. Filled up to the largest of them, all
have one shape, so that each layer can be recorded once as a CUDA graph for its forward and one for its backward pass
(`torch.cuda.make_graphed_callables`) and started by one call. Gradients come by the parameters' hooks as they do without.

Axes: N tokens, D model, H heads, K head size, P projections of all heads, R rows (sentences).
"""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from row_attention import BLOCK, attend_one_by_one, attend_rows, filled, tiles_of
from synthetic_corpus import PAD_ID, SEED, write_tokens
from torch import Tensor, nn
from torch.nn import functional as F

from dist_transformer.config.schema import ModelConfig
from dist_transformer.data.loader.loader import MicroBatch
from dist_transformer.model.attention import CrossAttention, SelfAttention
from dist_transformer.model.loss import gradient_of_logits
from dist_transformer.model.transformer import Transformer

ROUNDING = 256
"""Tokens of a side are filled up to a multiple of this."""


class Side(NamedTuple):
    """One side of a micro-batch: its sentences end to end, then padding, in rows of up to BLOCK tokens."""

    starts_R: Tensor
    """First token of each row, then the end of the last one, repeated up to a fixed length."""
    tiles_2T: Tensor
    """Row of each tile, up to BLOCK tokens of a row, and its number there; then those of an empty row, up to a fixed length."""


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
        self._longest = max(BLOCK, *(int(side.max()) for sides in lengths for side in sides))
        self._sizes = [-(-int(most) // ROUNDING) * ROUNDING for most in totals.max(0).values]
        self.filling = float(totals.sum()) / (sum(self._sizes) * len(batches))
        rows = [[_rows(side, size) for side, size in zip(sides, self._sizes, strict=True)] for sides in lengths]
        self._num_rows = 1 + max(len(side) for sides in rows for side in sides)
        self._num_tiles = [max(len(tiles_of(sides[n])[0]) for sides in rows) for n in (0, 1)]
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
        """Returns what `objective.forward` does, of one micro-batch."""
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
            filled(F.pad(side.cumsum(0), (1, 0)), self._num_rows + 1, size)
            for side, size in zip(rows, self._sizes, strict=True)
        ]
        empty = self._num_rows - 1
        tiles = [
            filled(part, number, value)
            for side, number in zip(rows, self._num_tiles, strict=True)
            for part, value in zip(tiles_of(side), (empty, 0), strict=True)
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


def main() -> None:
    """Prints the distances from the model with padding."""
    with tempfile.TemporaryDirectory() as folder:
        of_losses, of_gradients = model_errors(Path(folder))
    print(f"without padding, fp64: losses {of_losses:.1e}, gradients {of_gradients:.1e}")


if __name__ == "__main__":
    main()
