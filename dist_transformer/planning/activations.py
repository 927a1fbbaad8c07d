"""Tensors that a forward pass keeps for the backward pass, and the largest possible micro-batch.

Counted from model/: a linear layer keeps its input; attention its queries, keys, values, result and one number per head
and token (with rotary positions the rotated queries and keys too); a norm its input; dropout its mask; ReLU its result;
GELU and SiLU their input too; SwiGLU both its factors and the gate's input; the loss its gradients. On CPUs an RMS norm
also keeps the normalised input in fp32, and attention keeps everything in fp32. Attention weights are never kept: on
CPUs `scaled_dot_product_attention` uses the flash kernel if keys and values have the same size (measured), and on GPUs
the flash and the memory-efficient kernels are assumed. Where bf16 is autocast (`has_bf16_layers`) the residual sums are
fp32, and each linear layer keeps a bf16 copy of its input and of its weight; ZeRO 3's linear layer keeps them uncopied.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dist_transformer.config import model_size
from dist_transformer.config.data_schema import DataConfig
from dist_transformer.config.schema import Config, ModelConfig

CHUNK_TOKENS, CPU_CHUNK_TOKENS = 4096, 256
"""Target tokens whose logits exist at once, on GPUs and on CPUs; the same as in model/loss.py."""
RATIO_FREE_TOKENS = 10
"""Pairs whose longer side is below this always pass the length ratio; the same as in data/filters.py."""
KEPT_INNER = {"relu": 1, "gelu": 2, "silu": 2, "swiglu": 4}
"""Number of tensors of width d_ff that a feed-forward network keeps."""


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
        kept: tensors kept from the forward pass to the backward pass.
        weight_copies: bf16 copies of the weights, kept as long; 0 with activation checkpointing.
        logits: further tensors of the loss, at the end of the forward pass.
        recomputed: tensors and weight copies of one layer in the backward pass, with activation checkpointing.
        first_gradients: gradients that the backward pass begins with.
    """

    kept: int
    weight_copies: int
    logits: int
    recomputed: int
    first_gradients: int


@dataclass(frozen=True)
class _Widths:
    """Bytes per element of results of matrix products, of tensors kept by attention, of normed inputs kept by linear
    layers, of residual sums and of dropout masks (0 without); `norm`: bytes per token that a norm keeps."""

    product: int
    attention: int
    input: int
    residual: int
    norm: int
    mask: int

    @classmethod
    def of(cls, config: Config, on_gpu: bool) -> "_Widths":
        precision = config.training.precision
        product, residual = 4 if precision == "fp32" else 2, model_size.bytes_of_weight(config.training)
        kept = product if _copies_to_bf16(config) else residual
        d_model = config.model.d_model
        rms = d_model * residual + 4 if on_gpu else 4 * (2 * d_model + 1)  # on CPUs a chain of operations in fp32
        norm = {"layer": (d_model + 2) * residual, "rms": rms}[config.model.norm_type]
        attention = product if on_gpu else 4
        return cls(product, attention, kept, residual, norm, mask=1 if config.model.dropout else 0)


def _copies_to_bf16(config: Config) -> bool:
    """True if linear layers keep bf16 copies of their factors."""
    is_autocast = config.training.precision == "bf16" and not model_size.has_bf16_layers(config.training)
    return is_autocast and config.training.zero_stage < 3


def activations(config: Config, vocabulary: int, shape: Shape, on_gpu: bool) -> Activations:
    """Activation memory of a micro-batch of `shape` in the precision of the run."""
    widths, model = _Widths.of(config, on_gpu), config.model
    source, target = shape.rows * shape.source_length, shape.rows * shape.target_length
    by_source, by_target = token_bytes(config, on_gpu)
    has_copies, is_checkpointed = _copies_to_bf16(config), config.training.activation_checkpointing
    attention = 2 * model.d_model * projected_width(model)  # elements of matrices, as below
    feed_forward = model_size.feed_forward_matrices(model) * model.d_model * model.d_ff
    encoder, decoder = attention + feed_forward, 2 * attention + feed_forward
    matrices = 2 * max(encoder, decoder) if has_copies else 0
    decoder_layer = target * _layer_bytes(model, widths, 2) + source * _memory_bytes(model, widths)
    largest = max(source * _layer_bytes(model, widths, 1), decoder_layer)
    all_matrices = model.num_encoder_layers * encoder + model.num_decoder_layers * decoder
    output = vocabulary * (model.d_model + (1 if model.output_bias else 0))
    return Activations(
        kept=source * by_source + target * by_target + 4 * output,
        weight_copies=2 * all_matrices if has_copies and not is_checkpointed else 0,
        logits=_loss_bytes(config, vocabulary, target, on_gpu),
        recomputed=largest + matrices if is_checkpointed else 0,
        first_gradients=4 * output + target * model.d_model * (4 + widths.residual),
    )


def token_bytes(config: Config, on_gpu: bool) -> tuple[int, int]:
    """Bytes kept for a source token and for a target token."""
    model, widths = config.model, _Widths.of(config, on_gpu)
    num_encoder, num_decoder = model.num_encoder_layers, model.num_decoder_layers
    stream = model.d_model * widths.residual
    ends = widths.norm if model_size.has_final_norm(model) else 0  # on each side
    source, target = 8 + model.d_model * widths.mask, 16 + model.d_model * (widths.mask + 4)
    if config.training.activation_checkpointing:  # the input of each layer, and the encoder's output
        return source + (num_encoder + 1) * stream + ends, target + num_decoder * stream + ends
    memory = 0 if _copies_to_bf16(config) else model.d_model * widths.input
    source += num_encoder * _layer_bytes(model, widths, 1) + ends + memory
    source += num_decoder * _memory_bytes(model, widths)
    return source, target + num_decoder * _layer_bytes(model, widths, 2) + ends


def _layer_bytes(model: ModelConfig, widths: _Widths, attentions: int) -> int:
    """Bytes per token of a layer of one (encoder) or two (decoder) attentions and a feed-forward network.

    Each sub-layer has a norm and an input, each attention its result; of queries, keys and values a cross-attention has
    only the queries here.
    """
    num_sublayers = attentions + 1
    inner = KEPT_INNER[model.activation] * model.d_ff
    if model.activation == "swiglu" and widths.input < widths.residual:
        inner += model.d_model  # autocast copies the input for the second matrix
    return (
        num_sublayers * (widths.norm + model.d_model * (widths.mask + widths.input))
        + num_sublayers * projected_width(model) * widths.attention
        + _attended_bytes(model, widths, attentions)
        + inner * widths.product
        + 4 * attentions * model.num_heads
    )


def _attended_bytes(model: ModelConfig, widths: _Widths, attentions: int) -> int:
    """Bytes per token kept twice: attention results if copied to another type, else the rotated queries and keys."""
    key_size, value_size = model_size.head_sizes(model)
    if widths.attention != widths.product:
        return attentions * model.num_heads * value_size * widths.product
    return 2 * model.num_heads * key_size * widths.product if model.positions == "rotary" else 0


def _memory_bytes(model: ModelConfig, widths: _Widths) -> int:
    """Bytes per source token of a decoder layer: keys and values; autocast copies the encoder's output per layer."""
    copy = model.d_model if widths.input < widths.residual else 0
    return projected_width(model) * widths.attention + copy * widths.product


def projected_width(model: ModelConfig) -> int:
    """Width of the keys and values of all heads together: queries are as wide as keys, results as values."""
    return model.num_heads * sum(model_size.head_sizes(model))


def _loss_bytes(config: Config, vocabulary: int, target: int, on_gpu: bool) -> int:
    """Bytes of the loss: the logits of a chunk with factors and products, the gradients of weight and hidden states."""
    d_model, precision = config.model.d_model, config.training.precision
    is_half = precision == "bf16" or (precision == "fp16" and on_gpu)  # CPUs multiply fp16 as fp32
    logits = 4 * min(CHUNK_TOKENS if on_gpu else CPU_CHUNK_TOKENS, target) * vocabulary
    rounded = logits // 2 if is_half else 0
    weight, hidden = vocabulary * d_model, target * d_model
    stand_by = hidden * ((2 if is_half else 4) + model_size.bytes_of_weight(config.training))
    stand_by += 0 if precision == "fp32" or (precision == "fp16" and on_gpu) else weight * (2 if is_half else 4)
    product = 2 * weight if is_half and not on_gpu else 0
    return stand_by + 4 * weight + 4 * hidden + logits + rounded + product


def largest_shape(data: DataConfig, max_tokens: int, source_bytes: int, target_bytes: int) -> Shape:
    """Shape of the micro-batch of at most `max_tokens` that takes most memory, by the bytes per token of each side."""
    shorter, longer = unequal_sides(data)
    source, target = np.concatenate([shorter, longer]), np.concatenate([longer, shorter])
    rows = np.maximum(1, max_tokens // (source + target))
    num_bytes = rows.astype(float) * (source * float(source_bytes) + target * float(target_bytes))
    place = np.lexsort((target, source, -num_bytes))[0]  # the first of equal ones, by source and target
    return Shape(int(rows[place]), int(source[place]), int(target[place]))


def unequal_sides(data: DataConfig) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Shorter and longer side of the most unequal pair that the filters keep, for each number of tokens of both sides.

    A quantity that is linear in each side is largest for one of these, so that not all pairs of lengths are needed.
    """
    longest = data.filters.max_tokens
    shorter = np.arange(2, longest + 1)
    longer = np.maximum(RATIO_FREE_TOKENS - 1, np.floor(data.filters.max_length_ratio * shorter))
    longer = np.minimum(longer, longest).astype(np.int64)
    tokens = np.arange(4, 2 * longest + 1)
    least = shorter[np.searchsorted(shorter + longer, tokens)]
    is_kept = 2 * least <= tokens
    return least[is_kept], (tokens - least)[is_kept]
