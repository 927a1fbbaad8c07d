"""What a forward pass keeps for the backward pass, tensor by tensor, and the largest micro-batch there can be.

Counted from model/: a linear layer keeps its input, attention its queries, keys, values, result and one number a head
and token (those that rotary positions turned, beside those they were), a norm its input, dropout its mask, ReLU its result,
GELU and SiLU their input too, SwiGLU both its factors and the gate's input; the loss its gradients. On CPUs an RMS norm keeps
what it normalised besides, in fp32, and attention keeps everything in fp32. Attention weights are never kept: on CPUs
`scaled_dot_product_attention` takes the flash kernel where keys and values are of one size (measured), and on GPUs the
flash and the memory-efficient ones are assumed. bf16 is autocast: the residual sums are fp32, and each linear layer keeps
a bf16 copy of its input and of its weight; but in ZeRO 3 DeepSpeed's own, which keeps them as they are.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dist_transformer.config.data_schema import DataConfig
from dist_transformer.config.model_size import feed_forward_matrices, has_final_norm, head_sizes
from dist_transformer.config.schema import Config, ModelConfig

CHUNK_TOKENS, CPU_CHUNK_TOKENS = 1024, 256
"""Target tokens whose logits exist at once, on GPUs and CPUs: those of model/loss.py."""
RATIO_FREE_TOKENS = 10
"""Pairs whose longer side is under this pass the length ratio: that of data/filters.py."""
KEPT_INNER = {"relu": 1, "gelu": 2, "silu": 2, "swiglu": 4}
"""Tensors as wide as d_ff that a feed-forward network keeps."""
BOUNDED_RATIO = 2.0
"""The sides of a shape of `data.batch_shapes: bounded` are at most one place of a table apart: 8 and 16 at the most."""


class Shape(NamedTuple):
    """Size of a micro-batch, padding counted."""

    rows: int
    source_length: int
    target_length: int

    def __str__(self) -> str:
        return f"{self.rows} x ({self.source_length} + {self.target_length}) tokens"


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch.

    Attributes:
        kept: from the forward pass to the backward pass.
        weight_copies: bf16 copies of the weights, kept as long; with activation checkpointing of one layer at a time.
        logits: what the loss takes beside, at the end of the forward pass.
        recomputed: of one layer, with activation checkpointing, in the backward pass.
        first_gradients: those that the backward pass begins with.
    """

    kept: int
    weight_copies: int
    logits: int
    recomputed: int
    first_gradients: int


@dataclass(frozen=True)
class _Widths:
    """Bytes of an element: of what matrix products give, of what attention keeps, of the normed inputs that linear layers
    keep, of the residual sums, of dropout masks; and bytes of a token that a norm keeps."""

    product: int
    attention: int
    input: int
    residual: int
    norm: int
    mask: int

    @classmethod
    def of(cls, config: Config, on_gpu: bool) -> "_Widths":
        precision = config.training.precision
        product, residual = 4 if precision == "fp32" else 2, 2 if precision == "fp16" else 4
        kept = product if _copies_to_bf16(config) else residual
        norm = _norm_bytes(config.model, residual, on_gpu)
        attention = product if on_gpu else 4
        return cls(product, attention, kept, residual, norm, mask=1 if config.model.dropout else 0)


def _norm_bytes(model: ModelConfig, residual: int, on_gpu: bool) -> int:
    """Its input and its statistics; on CPUs torch's RMS norm is a chain of operations in fp32."""
    if model.norm_type == "layer":
        return (model.d_model + 2) * residual
    return model.d_model * residual + 4 if on_gpu else 4 * (2 * model.d_model + 1)


def _copies_to_bf16(config: Config) -> bool:
    """Whether linear layers keep copies of what they multiply."""
    return config.training.precision == "bf16" and config.training.zero_stage < 3


def activations(config: Config, vocabulary: int, shape: Shape, on_gpu: bool) -> Activations:
    """What `shape` takes in the precision of the run."""
    widths, model = _Widths.of(config, on_gpu), config.model
    source, target = shape.rows * shape.source_length, shape.rows * shape.target_length
    by_source, by_target = token_bytes(config, on_gpu)
    has_copies, is_checkpointed = _copies_to_bf16(config), config.training.activation_checkpointing
    matrices = 2 * max(_layer_matrices(model)) if has_copies else 0
    largest = max(source * _encoder_bytes(model, widths), _decoder_layer_bytes(model, widths, source, target))
    output = vocabulary * (model.d_model + (1 if model.output_bias else 0))
    return Activations(
        kept=source * by_source + target * by_target + 4 * output,
        weight_copies=2 * sum_of_matrices(model) if has_copies and not is_checkpointed else 0,
        logits=_loss_bytes(config, vocabulary, target, on_gpu),
        recomputed=largest + matrices if is_checkpointed else 0,
        first_gradients=4 * output + target * model.d_model * (4 + widths.residual),
    )


def token_bytes(config: Config, on_gpu: bool) -> tuple[int, int]:
    """Bytes kept for a source token and for a target token."""
    model, widths = config.model, _Widths.of(config, on_gpu)
    num_encoder, num_decoder = model.num_encoder_layers, model.num_decoder_layers
    stream = model.d_model * widths.residual
    ends = widths.norm if has_final_norm(model) else 0  # of each side
    source, target = 8 + model.d_model * widths.mask, 16 + model.d_model * (widths.mask + 4)
    if config.training.activation_checkpointing:  # the input of each layer, and the memory
        return source + (num_encoder + 1) * stream + ends, target + num_decoder * stream + ends
    memory = 0 if _copies_to_bf16(config) else model.d_model * widths.input
    source += num_encoder * _encoder_bytes(model, widths) + ends + memory
    source += num_decoder * _memory_bytes(model, widths)
    return source, target + num_decoder * _decoder_bytes(model, widths) + ends


def _encoder_bytes(model: ModelConfig, widths: _Widths) -> int:
    """Of a layer, for a token: 2 norms; inputs of 2 sub-layers, 3 projections, what was attended, inner activations."""
    return (
        2 * (widths.norm + model.d_model * (widths.mask + widths.input))
        + 2 * projected_width(model) * widths.attention
        + _attended_bytes(model, widths)
        + _inner_width(model, widths) * widths.product
        + 4 * model.num_heads
    )


def _decoder_bytes(model: ModelConfig, widths: _Widths) -> int:
    """Of a layer, for a target token: a third sub-layer, whose queries only are the decoder's."""
    return (
        3 * (widths.norm + model.d_model * (widths.mask + widths.input))
        + 3 * projected_width(model) * widths.attention
        + _attended_bytes(model, widths, attentions=2)
        + _inner_width(model, widths) * widths.product
        + 8 * model.num_heads
    )


def _attended_bytes(model: ModelConfig, widths: _Widths, attentions: int = 1) -> int:
    """Of what is kept twice: with copies of another type the results of all attentions, else what positions turned."""
    key_size, value_size = head_sizes(model)
    if widths.attention != widths.product:
        return attentions * model.num_heads * value_size * widths.product
    return 2 * model.num_heads * key_size * widths.product if model.positions == "rotary" else 0


def _inner_width(model: ModelConfig, widths: _Widths) -> int:
    """Of what feed-forward networks keep between their matrices; autocast copies the input for SwiGLU's second one."""
    copy = model.d_model if model.activation == "swiglu" and widths.input < widths.residual else 0
    return KEPT_INNER[model.activation] * model.d_ff + copy


def _memory_bytes(model: ModelConfig, widths: _Widths) -> int:
    """Of a decoder layer, for a source token: keys and values; autocast copies the memory for each layer."""
    copy = model.d_model if widths.input < widths.residual else 0
    return projected_width(model) * widths.attention + copy * widths.product


def _decoder_layer_bytes(model: ModelConfig, widths: _Widths, source: int, target: int) -> int:
    return target * _decoder_bytes(model, widths) + source * _memory_bytes(model, widths)


def sum_of_matrices(model: ModelConfig) -> int:
    """Elements of all matrices of all layers: what a token is multiplied with, but for the output projection."""
    encoder, decoder = _layer_matrices(model)
    return model.num_encoder_layers * encoder + model.num_decoder_layers * decoder


def _layer_matrices(model: ModelConfig) -> tuple[int, int]:
    attention = 2 * model.d_model * projected_width(model)
    feed_forward = feed_forward_matrices(model) * model.d_model * model.d_ff
    return attention + feed_forward, 2 * attention + feed_forward


def projected_width(model: ModelConfig) -> int:
    """Of keys and values of all heads together: queries are as wide as keys, what was attended as values."""
    return model.num_heads * sum(head_sizes(model))


def _loss_bytes(config: Config, vocabulary: int, target: int, on_gpu: bool) -> int:
    """The largest of: logits of a chunk beside what is multiplied or added, gradient of the weight, of the hidden states."""
    d_model, precision = config.model.d_model, config.training.precision
    is_half = precision == "bf16" or (precision == "fp16" and on_gpu)  # CPUs multiply fp16 as fp32
    logits = 4 * min(CHUNK_TOKENS if on_gpu else CPU_CHUNK_TOKENS, target) * vocabulary
    rounded = logits // 2 if is_half else 0
    weight, hidden = vocabulary * d_model, target * d_model
    stand_by = hidden * ((2 if is_half else 4) + (2 if precision == "fp16" else 4))
    stand_by += 0 if precision == "fp32" or (precision == "fp16" and on_gpu) else weight * (2 if is_half else 4)
    product = weight * ((0 if precision == "fp32" else 4) if on_gpu else (2 if is_half else 0))
    return stand_by + 4 * weight + 4 * hidden + logits + rounded + product


def largest_shape(data: DataConfig, max_tokens: int, source_bytes: int, target_bytes: int) -> Shape:
    """The shape of a micro-batch of at most `max_tokens` that takes most, by the bytes of a token of each side."""
    shorter, longer = unequal_sides(data)
    source, target = np.concatenate([shorter, longer]), np.concatenate([longer, shorter])
    rows = np.maximum(1, max_tokens // (source + target))
    num_bytes = rows.astype(float) * (source * float(source_bytes) + target * float(target_bytes))
    place = np.lexsort((target, source, -num_bytes))[0]  # of equal ones the first, by source and target
    return Shape(int(rows[place]), int(source[place]), int(target[place]))


def unequal_sides(data: DataConfig) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Shorter and longer side of the most unequal pair that the filters keep, for each number of tokens of both together.

    What grows evenly with each side is largest for one of these, so that not all pairs, the square, need be looked at.
    """
    longest, is_bounded = data.filters.max_tokens, data.batch_shapes == "bounded"
    ratio = min(data.filters.max_length_ratio, BOUNDED_RATIO) if is_bounded else data.filters.max_length_ratio
    shorter = np.arange(2, longest + 1)
    longer = np.maximum(0 if is_bounded else RATIO_FREE_TOKENS - 1, np.floor(ratio * shorter))
    longer = np.minimum(longer, longest).astype(np.int64)
    tokens = np.arange(4, 2 * longest + 1)
    least = shorter[np.searchsorted(shorter + longer, tokens)]
    is_kept = 2 * least <= tokens
    return least[is_kept], (tokens - least)[is_kept]
