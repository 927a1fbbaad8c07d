"""The model on real tokens only: the rows of a micro-batch end to end, attention within each by cumulative lengths.

A lever of gpu.py, with the same weights and the same loss: not part of the package until a gain is measured on a GPU.

Axes: B batch, S source, T target; N and M real tokens of a side (of queries, of keys), D model, H heads, K size of a
head.
"""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from dist_transformer.model.attention import CrossAttention, SelfAttention
from dist_transformer.model.layers import DecoderLayer, EncoderLayer
from dist_transformer.model.loss import label_smoothed_cross_entropy
from dist_transformer.model.transformer import Transformer

CAUSAL, WHOLE = (-1, 0), (-1, -1)
"""Windows of attention: numbers of positions before and after the query's own; -1: all."""


@dataclass(frozen=True)
class Rows:
    """Places of the real tokens of a side."""

    place_N: Tensor
    """Index of each real token in the flattened (B, length)."""
    row_N: Tensor
    position_N: Tensor
    ends: Tensor
    """Bounds of the rows, (B + 1,) int32: row b is tokens ends[b] to ends[b + 1]."""
    longest: int

    @classmethod
    def of(cls, is_real_BT: Tensor) -> "Rows":
        longest = is_real_BT.shape[1]
        place_N = is_real_BT.flatten().nonzero().squeeze(1)
        ends = F.pad(is_real_BT.sum(1).cumsum(0), (1, 0)).int()
        return cls(place_N, place_N // longest, place_N % longest, ends, longest)


class WithoutPadding(Transformer):
    """A `Transformer` with the paper's options whose loss uses no padding; all else is inherited, with padding."""

    def loss(
        self,
        source_BS: Tensor,
        target_in_BT: Tensor,
        target_out_BT: Tensor,
        label_smoothing: float,
        num_targets: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        source, target = Rows.of(source_BS != self.pad_id), Rows.of(target_out_BT != self.pad_id)
        memory_MD = self._tokens(self.source_embedding, self.source_positions, source_BS, source)
        for layer in self.encoder_layers:
            assert isinstance(layer, EncoderLayer)
            memory_MD = _encoded(layer, memory_MD, source)
        memory_MD = self.encoder_norm(memory_MD)
        hidden_ND = self._tokens(self.target_embedding, self.target_positions, target_in_BT, target)
        for layer in self.decoder_layers:
            assert isinstance(layer, DecoderLayer)
            hidden_ND = _decoded(layer, hidden_ND, target, memory_MD, source)
        target_N = target_out_BT.flatten()[target.place_N]
        hidden_ND = self.decoder_norm(hidden_ND)
        return label_smoothed_cross_entropy(
            hidden_ND, self.output_weight, target_N, label_smoothing, bias_V=self.output_bias
        )

    def _tokens(self, embedding: nn.Module, positions: nn.Module, token_BT: Tensor, rows: Rows) -> Tensor:
        scaled_ND = embedding(token_BT.flatten()[rows.place_N]) * self.embedding_scale
        embedded_ND = scaled_ND + positions(0, rows.longest, scaled_ND)[rows.position_N]
        return self.embedding_dropout(embedded_ND)


def _encoded(layer: EncoderLayer, hidden_ND: Tensor, rows: Rows) -> Tensor:
    hidden_ND = layer.self_attention_residual(hidden_ND, lambda x_ND: _attend_to_self(layer.self_attention, x_ND, rows))
    return layer.feed_forward_residual(hidden_ND, layer.feed_forward)


def _decoded(layer: DecoderLayer, hidden_ND: Tensor, rows: Rows, memory_MD: Tensor, memory_rows: Rows) -> Tensor:
    hidden_ND = layer.self_attention_residual(hidden_ND, lambda x_ND: _attend_to_self(layer.self_attention, x_ND, rows))
    hidden_ND = layer.cross_attention_residual(
        hidden_ND, lambda x_ND: _attend_to_memory(layer.cross_attention, x_ND, rows, memory_MD, memory_rows)
    )
    return layer.feed_forward_residual(hidden_ND, layer.feed_forward)


def _attend_to_self(attention: SelfAttention, input_ND: Tensor, rows: Rows) -> Tensor:
    projected_NP = attention.query_key_value(input_ND)
    query, key, value = (
        part.unflatten(1, (attention.num_heads, -1)) for part in projected_NP.split(attention.widths, 1)
    )
    return attention.output(attend(query, key, value, rows, rows, attention.is_causal).flatten(1))


def _attend_to_memory(
    attention: CrossAttention, input_ND: Tensor, rows: Rows, memory_MD: Tensor, memory_rows: Rows
) -> Tensor:
    query = attention.query(input_ND).unflatten(1, (attention.num_heads, -1))
    projected_MP = attention.key_value(memory_MD)
    key, value = (part.unflatten(1, (attention.num_heads, -1)) for part in projected_MP.split(attention.widths, 1))
    return attention.output(attend(query, key, value, rows, memory_rows, is_causal=False).flatten(1))


def attend(query_NHK: Tensor, key_MHK: Tensor, value_MHK: Tensor, queries: Rows, keys: Rows, is_causal: bool) -> Tensor:
    """Attends from every query to the keys of its row: (N, H, K). CPUs, without a kernel, use a block-diagonal mask."""
    if query_NHK.is_cuda:
        from torch.nn.attention.varlen import varlen_attn  # since torch 2.10

        window, lengths = CAUSAL if is_causal else WHOLE, (queries.longest, keys.longest)
        return varlen_attn(query_NHK, key_MHK, value_MHK, queries.ends, keys.ends, *lengths, window_size=window)
    may_attend_NM = queries.row_N[:, None] == keys.row_N
    if is_causal:
        may_attend_NM &= queries.position_N[:, None] >= keys.position_N
    query, key, value = (x.transpose(0, 1) for x in (query_NHK, key_MHK, value_MHK))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=may_attend_NM).transpose(0, 1)
