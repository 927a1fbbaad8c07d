"""The network (Figure 1): embeddings, encoder, decoder, projection to the vocabulary, loss, step-wise decoding.

Axes: B batch, S source, T target, D model, H heads, V vocabulary. Token ids are int64; padding only at the end.
Batches may be computed without padding, several as one, with the same loss: their real tokens are then end to end, M of
the source and N of the target, as everything but attention takes them.
In decoding the batch rows are the beams of the sentences in turn: rows n * beam to (n + 1) * beam are sentence n's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dist_transformer.config.model_size import has_final_norm, head_sizes
from dist_transformer.config.schema import ModelConfig
from dist_transformer.model import gpu_kernels
from dist_transformer.model.attention import CrossAttention, Joined, Places, SelfAttention, batches_of
from dist_transformer.model.cpu_kernels import Linear
from dist_transformer.model.layers import (
    DecoderLayer,
    DecoderLayerCache,
    DeepNorm,
    Dropout,
    EncoderLayer,
    LearnedPositions,
    NoPositions,
    SinusoidalPositions,
    make_norm,
)
from dist_transformer.model.loss import label_smoothed_cross_entropy


class JoinedShape(NamedTuple):
    """A batch that is computed without padding: its lengths with padding, and its real tokens, at least one in each row."""

    rows: int
    source_length: int
    target_length: int
    source_tokens: int
    target_tokens: int


@dataclass
class AttentionMaps:
    """Attention weights, one tensor a layer; every row sums to 1."""

    encoder: list[Tensor] = field(default_factory=list)  # (B, H, S, S) each
    decoder: list[Tensor] = field(default_factory=list)  # (B, H, T, T) each
    cross: list[Tensor] = field(default_factory=list)  # (B, H, T, S) each


@dataclass
class DecodingCache:
    """State of step-wise decoding of every row."""

    layers: list[DecoderLayerCache]
    mask_B11S: Tensor | None
    """Mask per sentence, not per row; None without padding."""
    output_weight_VD: Tensor | None
    """The matrix of the logits, rounded to the layers' type; None: it has that type."""
    beam_size: int
    num_positions: int = 0
    """Tokens decoded so far; the same for all rows."""
    spare: Places | None = None
    """Room of the size of one layer's past, free to be overwritten."""

    @torch.no_grad()
    def reorder(self, rows: Tensor) -> None:
        """Continues row i from row `rows[i]`, which must be of the same sentence (the choice of a beam's survivors)."""
        for layer in self.layers:
            self.spare = layer.past.select(rows, self.spare)

    def select(self, rows: Tensor) -> None:
        """Keeps the given rows in the given order; rows may repeat. They must be complete sentences: each consecutive
        `beam_size` of them from one sentence."""
        self.reorder(rows)
        sentences = rows[:: self.beam_size] // self.beam_size
        if self.mask_B11S is not None:
            self.mask_B11S = self.mask_B11S.index_select(0, sentences)
        for layer in self.layers:
            layer.memory.select(sentences)


class Transformer(nn.Module):
    """The encoder-decoder of the paper's section 3."""

    def __init__(
        self,
        config: ModelConfig,
        source_vocabulary: int,
        target_vocabulary: int,
        pad_id: int,
        *,
        activation_checkpointing: bool = False,
    ) -> None:
        """`source_vocabulary` and `target_vocabulary` count pieces; equal if `config.shared_embeddings`.

        With `activation_checkpointing` a training step keeps only the input of each layer, and computes the layer again
        in the backward pass, with the same dropout: the same loss and gradients for less memory and more time.
        """
        super().__init__()
        self.activation_checkpointing = activation_checkpointing
        assert source_vocabulary == target_vocabulary or not config.shared_embeddings
        self.pad_id = pad_id
        self.embedding_scale = config.d_model**0.5
        self.source_embedding = nn.Embedding(source_vocabulary, config.d_model)
        self.target_embedding = (
            self.source_embedding if config.shared_embeddings else nn.Embedding(target_vocabulary, config.d_model)
        )
        self.max_positions = config.max_positions
        self.source_positions = _positions(config)
        self.target_positions = _positions(config) if config.positions == "learned" else self.source_positions
        self.embedding_dropout = Dropout(config.dropout)
        self.layer_drop = config.layer_drop
        rotary = SinusoidalPositions(head_sizes(config)[0]) if config.positions == "rotary" else None
        self.encoder_layers = nn.ModuleList(EncoderLayer(config, rotary) for _ in range(config.num_encoder_layers))
        self.decoder_layers = nn.ModuleList(DecoderLayer(config, rotary) for _ in range(config.num_decoder_layers))
        self.encoder_norm = make_norm(config) if has_final_norm(config) else nn.Identity()
        self.decoder_norm = make_norm(config) if has_final_norm(config) else nn.Identity()
        self.output = None if config.tied_output else Linear(config.d_model, target_vocabulary, bias=False)
        self.output_bias = nn.Parameter(torch.zeros(target_vocabulary)) if config.output_bias else None
        self._layers_dtype: torch.dtype | None = None
        self._initialise(config)

    def round_layers(self, dtype: torch.dtype) -> None:
        """Rounds the weights of all layers, which then compute in `dtype`, and keeps embeddings and output: their gradients
        are sums over many tokens."""
        for part in (self.encoder_layers, self.decoder_layers, self.encoder_norm, self.decoder_norm):
            part.to(dtype)
        self._layers_dtype = dtype

    def is_padded(self, shapes: Sequence[JoinedShape], source: Tensor) -> bool:
        """True if a batch is computed with its padding: alone, and on GPUs a small one or one that the kernels of our own do
        not compute. To be asked in the autocast context of the pass."""
        rows, source_length, target_length, *_ = shapes[0]
        elements = rows * (source_length + target_length) * self.source_embedding.embedding_dim
        if len(shapes) > 1 or not source.is_cuda or elements < gpu_kernels.LEAST_ELEMENTS:
            return len(shapes) == 1
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else self._dtype
        like = torch.empty(0, dtype=dtype, device=source.device)
        return not self._decoder_layers()[0].self_attention.has_kernel(like, max(source_length, target_length))

    @property
    def output_weight(self) -> Tensor:
        """The matrix (V, D) that projects hidden states to logits; 3.4: the target embedding."""
        return self.target_embedding.weight if self.output is None else self.output.weight

    def keep_start_at_zero(self, bos_id: int) -> None:
        """Sets the embedding of the start symbol to zero and takes it out of training: Marian's decoder begins with zeros."""
        weight_VD = self.target_embedding.weight
        weight_VD.detach()[bos_id] = 0
        start = dict(dim=0, start=bos_id, end=bos_id + 1)  # no index, whose copy would wait for the GPU
        weight_VD.register_hook(lambda grad_VD: grad_VD.slice_scatter(torch.zeros_like(grad_VD[:1]), **start))  # type: ignore[no-untyped-call]

    def in_order_of_use(self) -> list[nn.Module]:
        """Returns the parts with parameters in the order in which a forward pass first uses them, up to the last layer."""
        encoder = [self.source_embedding, self.source_positions, *self.encoder_layers, self.encoder_norm]
        return [*encoder, self.target_embedding, self.target_positions, *self.decoder_layers]

    def forward(self, source_BS: Tensor, target_BT: Tensor) -> Tensor:
        """Returns logits (B, T, V) of the token after each of `target_BT`, the decoder's input, beginning with bos."""
        return self.logits(self.decode_hidden(source_BS, target_BT))

    def logits(self, hidden: Tensor, weight_VD: Tensor | None = None) -> Tensor:
        """Projects last hidden states (..., D) to the vocabulary: (..., V). `weight_VD`: the output weight in their type."""
        bias = None if self.output_bias is None else self.output_bias.to(hidden.dtype)
        return F.linear(hidden, self.output_weight.to(hidden.dtype) if weight_VD is None else weight_VD, bias)

    def loss(
        self,
        source_BS: Tensor,
        target_in_BT: Tensor,
        target_out_BT: Tensor,
        label_smoothing: float,
        num_targets: int | None = None,
        shapes: Sequence[JoinedShape] | None = None,
        counts_hits: bool = False,
    ) -> tuple[Tensor, ...]:
        """Sums over the real tokens of `target_out_BT` of (label-smoothed loss, negative log-likelihood); fp32.

        `num_targets`: their number, if the host knows it, so that it does not wait for the GPU. `shapes`: those of the
        batches to compute without padding, one after another in each side, (B * S,) or (B * T,). With `counts_hits` also the
        number of them that are the likeliest, all without gradients.
        """
        if shapes is None:
            hidden_ND, target_N = self.decode_hidden(source_BS, target_in_BT).flatten(0, 1), target_out_BT.flatten()
        else:
            hidden_ND, target_N = self._decode_joined(source_BS, target_in_BT, target_out_BT, shapes)
        weight_VD, bias_V = self.output_weight, self.output_bias
        return label_smoothed_cross_entropy(
            hidden_ND, weight_VD, target_N, label_smoothing, self.pad_id, bias_V, num_targets, counts_hits
        )

    def decode_hidden(self, source_BS: Tensor, target_BT: Tensor) -> Tensor:
        """Returns the decoder's last hidden states (B, T, D), before the projection to the vocabulary."""
        mask_B11S = self._mask(source_BS)
        memory_BSD = self._encode(source_BS, mask_B11S)
        hidden_BTD = self._embed(self.target_embedding, self.target_positions, target_BT)
        for layer in self.decoder_layers:
            hidden_BTD = self._layer(layer, hidden_BTD, memory_BSD, mask_B11S)
        return self.decoder_norm(hidden_BTD)  # type: ignore[no-any-return]

    def encode(self, source_BS: Tensor) -> Tensor:
        """Returns the memory (B, S, D). Values at padding have no meaning and are never attended to."""
        return self._encode(source_BS, self._mask(source_BS))

    @torch.no_grad()
    def start_decoding(self, memory_BSD: Tensor, source_BS: Tensor, beam_size: int = 1) -> DecodingCache:
        """Returns a cache for `beam_size` rows per sentence of `source_BS`, whose `encode` is `memory_BSD`."""
        num_rows = len(source_BS) * beam_size
        layers = [layer.start(memory_BSD, num_rows) for layer in self._decoder_layers()]
        mask_B11S = self._mask(source_BS) if (source_BS == self.pad_id).any() else None
        weight_VD, dtype = self.output_weight, self._dtype
        return DecodingCache(layers, mask_B11S, None if weight_VD.dtype == dtype else weight_VD.to(dtype), beam_size)

    @torch.no_grad()
    def decode_step(self, token_B: Tensor, cache: DecodingCache) -> Tensor:
        """Returns logits (B, V) of the token after `token_B`, which follows those in `cache` and is added to it."""
        start = cache.num_positions
        hidden_BD = self._embed(self.target_embedding, self.target_positions, token_B[:, None], start).squeeze(1)
        for layer, layer_cache in zip(self._decoder_layers(), cache.layers, strict=True):
            hidden_BD = layer.step(hidden_BD, layer_cache, cache.mask_B11S)
        cache.num_positions += 1
        hidden_BD = self.decoder_norm(hidden_BD)
        weight_VD = cache.output_weight_VD
        return self.logits(hidden_BD) if weight_VD is None else self.logits(hidden_BD, weight_VD)

    def attention_maps(self, source_BS: Tensor, target_BT: Tensor) -> AttentionMaps:
        """Returns the weights of every attention in `forward(source_BS, target_BT)`, recomputed from its inputs."""
        maps = AttentionMaps()

        def record(module: nn.Module, arguments: tuple[Tensor, ...], _output: Tensor) -> None:
            assert isinstance(module, SelfAttention | CrossAttention)
            is_decoder = isinstance(module, SelfAttention) and module.is_causal
            kind = maps.cross if isinstance(module, CrossAttention) else maps.decoder if is_decoder else maps.encoder
            kind.append(module.weights(*arguments))

        attentions = [module for module in self.modules() if isinstance(module, SelfAttention | CrossAttention)]
        hooks = [attention.register_forward_hook(record) for attention in attentions]
        try:
            self.decode_hidden(source_BS, target_BT)
        finally:
            for hook in hooks:
                hook.remove()
        return maps

    def _encode(self, source_BS: Tensor, mask_B11S: Tensor) -> Tensor:
        hidden_BSD = self._embed(self.source_embedding, self.source_positions, source_BS)
        for layer in self.encoder_layers:
            hidden_BSD = self._layer(layer, hidden_BSD, mask_B11S)
        return self.encoder_norm(hidden_BSD)  # type: ignore[no-any-return]

    def _decode_joined(
        self, source: Tensor, given: Tensor, wanted: Tensor, shapes: Sequence[JoinedShape]
    ) -> tuple[Tensor, Tensor]:
        """Returns the decoder's last hidden states (N, D) and the token after each (N,)."""
        source_shapes = [(shape.rows, shape.source_length) for shape in shapes]
        target_shapes = [(shape.rows, shape.target_length) for shape in shapes]
        of_source = self._joined(source, source_shapes, sum(shape.source_tokens for shape in shapes))
        of_target = self._joined(wanted, target_shapes, sum(shape.target_tokens for shape in shapes))
        source_1M, target_1N = source[of_source.real_N][None], given[of_target.real_N][None]
        memory_1MD = self._embed(self.source_embedding, self.source_positions, source_1M, joined=of_source)
        for layer in self.encoder_layers:
            memory_1MD = self._layer(layer, memory_1MD, None, of_source, joined=of_source)
        memory_1MD = self.encoder_norm(memory_1MD)
        hidden_1ND = self._embed(self.target_embedding, self.target_positions, target_1N, joined=of_target)
        for layer in self.decoder_layers:
            hidden_1ND = self._layer(layer, hidden_1ND, memory_1MD, None, (of_source, of_target), joined=of_target)
        return self.decoder_norm(hidden_1ND).squeeze(0), wanted[of_target.real_N]

    def _joined(self, tokens: Tensor, shapes: Sequence[tuple[int, int]], num_tokens: int) -> Joined:
        """Returns a side of batches of these rows and lengths, `tokens` one after another, `num_tokens` of them real."""
        batches = batches_of(tokens, shapes)
        are_real = [batch != self.pad_id for batch in batches]
        for is_real_BT in are_real:
            is_real_BT[:, 0] = True  # also in a row without tokens
        is_real = torch.cat([each.flatten() for each in are_real])
        real_N = torch.nonzero_static(is_real, size=num_tokens, fill_value=len(tokens)).squeeze(1)
        positions = [torch.arange(batch.shape[1], device=tokens.device).expand_as(batch).flatten() for batch in batches]
        starts_R = F.pad(torch.cat([each.sum(1) for each in are_real]).cumsum(0), (1, 0))
        return Joined(shapes, real_N, torch.cat(positions)[real_N], starts_R, [self._mask(batch) for batch in batches])

    def _layer(self, layer: nn.Module, *inputs: Any, joined: Joined | None = None) -> Tensor:
        """Applies a layer; in training a sentence skips it with probability `layer_drop`. It is computed all the same,
        so that every parameter has a gradient on every rank, as DeepSpeed's collectives need.

        `joined`: the side of joined batches that passes through the layer."""
        if self.activation_checkpointing and self.training and torch.is_grad_enabled():
            output = checkpoint(layer, *inputs, use_reentrant=False)
        else:
            output = layer(*inputs)
        if not (self.layer_drop and self.training):
            return output  # type: ignore[no-any-return]
        if joined is None:
            is_kept_B11 = torch.rand(len(output), 1, 1, device=output.device) >= self.layer_drop
        else:
            rows = [torch.rand(rows, 1, 1, device=output.device).expand(-1, size, 1) for rows, size in joined.shapes]
            is_kept_B11 = joined.join(rows) >= self.layer_drop
        return torch.where(is_kept_B11, output, inputs[0])

    def _embed(
        self, embedding: nn.Module, positions: nn.Module, token_BT: Tensor, start: int = 0, joined: Joined | None = None
    ) -> Tensor:
        """Embeds tokens (3.4 and 3.5): embeddings times sqrt(D), plus positions, then dropout (5.4); `joined`: those of
        batches end to end."""
        scaled_BTD = embedding(token_BT) * self.embedding_scale
        vectors_TD = positions(start, joined.longest if joined else token_BT.shape[1], scaled_BTD)
        if joined is not None and vectors_TD.dim():
            vectors_TD = F.embedding(joined.positions_N, vectors_TD)
        return self.embedding_dropout((scaled_BTD + vectors_TD).to(self._dtype))  # type: ignore[no-any-return]

    @property
    def _dtype(self) -> torch.dtype:
        return self._layers_dtype or self.source_embedding.weight.dtype

    def _mask(self, source_BS: Tensor) -> Tensor:
        """Returns what is added to the scores of attention to the source (B, 1, 1, S): -inf at padding, else 0.

        From a boolean mask the kernels would compute it again in every layer. Rows begin at multiples of 8 elements, else
        CUDA's memory-efficient kernel would copy it in every layer (`pad_bias` of torch's attention.cpp).
        """
        rows, length = source_BS.shape
        padded_B11S = torch.zeros(rows, 1, 1, -(-length // 8) * 8, dtype=self._dtype, device=source_BS.device)
        return padded_B11S[..., :length].masked_fill_((source_BS == self.pad_id)[:, None, None], float("-inf"))

    def _decoder_layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.decoder_layers if isinstance(layer, DecoderLayer)]

    def _initialise(self, config: ModelConfig) -> None:
        """Initialises the weights: Xavier uniform for each projection and feed-forward matrix, with `attention_gain`
        for queries, keys and values; zero biases; embeddings, learned positions and output with standard deviation D **
        -0.5, so that embeddings times sqrt(D) begin with variance 1."""
        gains = dict.fromkeys(self.encoder_layers.modules(), DeepNorm.of_encoder(config).beta)
        gains |= dict.fromkeys(self.decoder_layers.modules(), DeepNorm.of_decoder(config).beta)
        packed: dict[nn.Module, list[tuple[int, float]]] = {}
        for module, beta in gains.items():
            if isinstance(module, SelfAttention | CrossAttention):
                packed |= module.packed_rows(config.attention_gain, beta)
        for name, module in self.named_modules():
            if isinstance(module, nn.Embedding) or name == "output":
                nn.init.normal_(module.weight, std=config.d_model**-0.5)
            elif isinstance(module, nn.Linear):
                blocks = packed.get(module, [(module.out_features, gains.get(module, 1.0))])
                matrices = torch.split(module.weight.detach(), [rows for rows, _ in blocks])
                for matrix, (_, gain) in zip(matrices, blocks, strict=True):
                    nn.init.xavier_uniform_(matrix, gain)
                nn.init.zeros_(module.bias)


def _positions(config: ModelConfig) -> SinusoidalPositions | LearnedPositions | NoPositions:
    if config.positions == "rotary":
        return NoPositions()
    if config.positions == "learned":
        assert config.max_positions is not None
        return LearnedPositions(config.max_positions, config.d_model)
    return SinusoidalPositions(config.d_model, are_marians={"sinusoidal": False, "marian": True}[config.positions])
