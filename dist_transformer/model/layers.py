"""Layers of the network (3.1, 3.3, 3.5): add & norm, feed-forward, encoder and decoder layers, positions.

Axes: B batch, S source, T target, D model, F feed-forward.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dist_transformer.config.schema import ModelConfig
from dist_transformer.model import cpu_kernels, gpu_kernels
from dist_transformer.model.attention import CrossAttention, Joined, KeyValue, KeyValueCache, SelfAttention, Sides
from dist_transformer.model.cpu_kernels import Linear

RMS_EPSILON = 1e-6
"""Constant added to the mean square, and to Marian's variances; layer norm uses torch's 1e-5."""


class Dropout(nn.Module):
    """Dropout (Srivastava et al., 2014): in training, zeroes with a probability and scales the rest to keep the mean.
    On GPUs it is torch's, on CPUs `cpu_kernels.dropout`."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, input: Tensor) -> Tensor:
        if not (self.training and self.probability):
            return input
        if input.is_cpu:
            return cpu_kernels.dropout(input, self.probability)
        return F.dropout(input, self.probability)


class AddAndNorm(nn.Module):
    """The residual around a sub-layer. Post-norm is the paper's: norm(x + dropout(sublayer(x))), 3.1 and 5.4.

    Pre-norm is x + dropout(sublayer(norm(x))): not the paper's, more stable in deep stacks. DeepNorm is post-norm with
    alpha x in place of x.
    """

    def __init__(self, config: ModelConfig, alpha: float = 1.0) -> None:
        super().__init__()
        self.is_pre_norm = {"post": False, "pre": True, "deepnorm": False}[config.norm]
        self.alpha = alpha
        self.norm = make_norm(config)
        self.dropout = Dropout(config.dropout)

    def forward(self, input_BTD: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        if self.is_pre_norm:
            return torch.add(input_BTD, self.dropout(sublayer(self.norm(input_BTD))))
        added_BTD = self.dropout(sublayer(input_BTD))
        if gpu_kernels.can_norm(input_BTD, added_BTD, self.norm, self.alpha):
            return gpu_kernels.add_and_norm(input_BTD, added_BTD, self.norm)
        return self.norm(torch.add(added_BTD, input_BTD, alpha=self.alpha))  # type: ignore[no-any-return]


def make_norm(config: ModelConfig) -> nn.Module:
    """Returns the norm of `config.norm_type`; RMSNorm (Zhang and Sennrich, 2019) subtracts no mean and has no bias."""
    epsilon = RMS_EPSILON if config.norm_type == "rms" or config.positions == "marian" else 1e-5
    norms: dict[str, Callable[..., nn.Module]] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}
    return norms[config.norm_type](config.d_model, eps=epsilon)


@dataclass(frozen=True)
class DeepNorm:
    """The two factors of Wang et al. (2022), "DeepNet", for an encoder-decoder.

    Attributes:
        alpha: factor of the residual.
        beta: gain of the initial feed-forward, value and output matrices; queries and keys have 1.
    """

    alpha: float
    beta: float

    @classmethod
    def of_encoder(cls, config: ModelConfig) -> "DeepNorm":
        depth = config.num_encoder_layers**4 * config.num_decoder_layers
        return cls(0.81 * depth ** (1 / 16), 0.87 * depth ** (-1 / 16)) if config.norm == "deepnorm" else cls(1.0, 1.0)

    @classmethod
    def of_decoder(cls, config: ModelConfig) -> "DeepNorm":
        depth = config.num_decoder_layers
        return cls((3 * depth) ** 0.25, (12 * depth) ** -0.25) if config.norm == "deepnorm" else cls(1.0, 1.0)


class FeedForward(nn.Module):
    """Feed-forward network max(0, x W1 + b1) W2 + b2, equation 2, or with another activation than max(0, x).

    SwiGLU (Shazeer, 2020) has no activation of x W1 + b1, but multiplies it by silu(x Wg + bg).
    """

    def __init__(self, d_model: int, d_ff: int, activation: str = "relu") -> None:
        """`activation`: relu, gelu (exact, not its tanh form), silu or swiglu."""
        super().__init__()
        functions: dict[str, Callable[[Tensor], Tensor]]
        functions = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu, "swiglu": F.silu}
        self.activation = functions[activation]
        self.inner = Linear(d_model, d_ff)
        self.outer = Linear(d_ff, d_model)
        self.gate = Linear(d_model, d_ff) if activation == "swiglu" else None

    def forward(self, input_BTD: Tensor) -> Tensor:
        inner_BTF = self.inner(input_BTD)
        if self.gate is None:
            return self.outer(self.activation(inner_BTF))  # type: ignore[no-any-return]
        return self.outer(self.activation(self.gate(input_BTD)) * inner_BTF)  # type: ignore[no-any-return]


class EncoderLayer(nn.Module):
    """Self-attention over the source, then feed-forward."""

    def __init__(self, config: ModelConfig, rotary_positions: nn.Module | None) -> None:
        """`rotary_positions`: see `SelfAttention`."""
        super().__init__()
        alpha = DeepNorm.of_encoder(config).alpha
        self.self_attention = SelfAttention(config, is_causal=False, rotary_positions=rotary_positions)
        self.self_attention_residual = AddAndNorm(config, alpha)
        self.feed_forward = FeedForward(config.d_model, config.d_ff, config.activation)
        self.feed_forward_residual = AddAndNorm(config, alpha)

    def forward(self, hidden_BSD: Tensor, mask_B11S: Tensor | None, joined: Joined | None = None) -> Tensor:
        """Applies the layer; `joined`: the source of joined batches, which has their masks."""
        hidden_BSD = self.self_attention_residual(
            hidden_BSD, lambda x_BSD: self.self_attention(x_BSD, mask_B11S, joined=joined)
        )
        return self.feed_forward_residual(hidden_BSD, self.feed_forward)  # type: ignore[no-any-return]


@dataclass
class DecoderLayerCache:
    """Cache of one decoder layer: its own keys and values per row, those of the memory per sentence."""

    past: KeyValueCache
    memory: KeyValue


class DecoderLayer(nn.Module):
    """Causal self-attention over the target, attention over the memory, then feed-forward."""

    def __init__(self, config: ModelConfig, rotary_positions: nn.Module | None) -> None:
        """`rotary_positions`: see `SelfAttention`."""
        super().__init__()
        alpha = DeepNorm.of_decoder(config).alpha
        self.self_attention = SelfAttention(config, is_causal=True, rotary_positions=rotary_positions)
        self.self_attention_residual = AddAndNorm(config, alpha)
        self.cross_attention = CrossAttention(config)
        self.cross_attention_residual = AddAndNorm(config, alpha)
        self.feed_forward = FeedForward(config.d_model, config.d_ff, config.activation)
        self.feed_forward_residual = AddAndNorm(config, alpha)

    def forward(
        self, hidden_BTD: Tensor, memory_BSD: Tensor, mask_B11S: Tensor | None, joined: Sides | None = None
    ) -> Tensor:
        """Applies the layer; joined batches have the masks of their source."""
        target = joined and joined[1]
        hidden_BTD = self.self_attention_residual(hidden_BTD, lambda x_BTD: self.self_attention(x_BTD, joined=target))
        hidden_BTD = self.cross_attention_residual(
            hidden_BTD, lambda x_BTD: self.cross_attention(x_BTD, memory_BSD, mask_B11S, joined=joined)
        )
        return self.feed_forward_residual(hidden_BTD, self.feed_forward)  # type: ignore[no-any-return]

    def start(self, memory_BSD: Tensor, num_rows: int) -> DecoderLayerCache:
        """Returns an empty past for `num_rows` rows, with the memory's keys and values."""
        memory = self.cross_attention.project(memory_BSD)
        return DecoderLayerCache(KeyValueCache(memory, num_rows), memory)

    def step(self, hidden_BD: Tensor, cache: DecoderLayerCache, mask_B11S: Tensor | None) -> Tensor:
        """Computes the newest position only, (B, D)."""
        hidden_BD = self.self_attention_residual(hidden_BD, lambda x_BD: self.self_attention.step(x_BD, cache.past))
        hidden_BD = self.cross_attention_residual(
            hidden_BD, lambda x_BD: self.cross_attention.step(x_BD, cache.memory, mask_B11S)
        )
        return self.feed_forward_residual(hidden_BD, self.feed_forward)  # type: ignore[no-any-return]


class SinusoidalPositions(nn.Module):
    """The positional encoding of 3.5, or Marian's, for any length; no parameters.

    The table is not a buffer: `model.half()` would round it, and it is not part of a checkpoint. It is kept in fp32 on
    the device of the last call, grown by doubling, and rounded to the activations' type when used.
    """

    def __init__(self, d_model: int, are_marians: bool = False) -> None:
        super().__init__()
        self.d_model, self.are_marians = d_model, are_marians
        self.table_TD = torch.empty(0, d_model, device="cpu")

    def forward(self, start: int, length: int, like: Tensor) -> Tensor:
        """Returns encodings of positions `start` to `start + length`: (length, D), with type and device of `like`."""
        end = start + length
        if end > self.table_TD.shape[0] or self.table_TD.device != like.device:
            num_positions = max(256, 1 << (end - 1).bit_length())
            with torch.inference_mode(False):  # a table made in a search stays usable for training
                self.table_TD = sinusoids(num_positions, self.d_model, self.are_marians).to(like.device)
        return self.table_TD[start:end].to(like.dtype)


class NoPositions(nn.Module):
    """Zero in place of position vectors: rotary positions are in the self-attention."""

    def forward(self, start: int, length: int, like: Tensor) -> Tensor:
        """Returns zero, with the type and device of `like`."""
        return like.new_zeros(())


class LearnedPositions(nn.Module):
    """A trained vector for each position: Table 3, row E."""

    def __init__(self, max_positions: int, d_model: int) -> None:
        super().__init__()
        self.table = nn.Embedding(max_positions, d_model)

    def forward(self, start: int, length: int, like: Tensor) -> Tensor:
        """Returns vectors of positions `start` to `start + length`: (length, D), with type and device of `like`."""
        assert start + length <= self.table.num_embeddings, "no sentence this long may come here"
        return self.table(torch.arange(start, start + length, device=like.device)).to(like.dtype)  # type: ignore[no-any-return]


def sinusoids(num_positions: int, d_model: int, are_marians: bool = False) -> Tensor:
    """Computes PE(pos, 2i) = sin(pos / 10000^(2i / d_model)), PE(pos, 2i + 1) = cos(same) as (num_positions, d_model).

    Marian's are all sines, then all cosines, of pos / 10000^(i / (d_model / 2 - 1)). Computed in fp64 and returned as
    fp32: fp32 angles of late positions are off in the third digit.
    """
    dimension_D, half = torch.arange(d_model, dtype=torch.float64, device="cpu"), d_model // 2
    exponent_D, is_sine_D = (dimension_D - dimension_D % 2) / d_model, dimension_D % 2 == 0
    if are_marians:
        exponent_D, is_sine_D = dimension_D % half / max(half - 1, 1), dimension_D < half
    angle_TD = torch.arange(num_positions, dtype=torch.float64, device="cpu")[:, None] * 10000.0**-exponent_D
    return torch.where(is_sine_D, angle_TD.sin(), angle_TD.cos()).float()
