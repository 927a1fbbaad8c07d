"""Multi-head attention (3.2) over the whole sequence, and one token at a time on cached keys and values.

Axes: B batch, S source (or keys), T target (or queries), D model, H heads, K key size, V value size, P concatenated
projections, L places for positions; R pairs of a rotation, half of K.
A mask is added to the scores: -inf where a query may not attend, else 0. The projections of one input are one matrix
product: the rows of `query_key_value.weight` are the query's, the key's and the value's matrices, in this order, as in
`torch.nn.MultiheadAttention.in_proj_weight`; within each, head h owns rows h * K to (h + 1) * K (of values: V).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dist_transformer.config.model_size import head_sizes
from dist_transformer.config.schema import ModelConfig
from dist_transformer.model import gpu_kernels
from dist_transformer.model.cpu_kernels import Linear, attend_in_fp32

torch.backends.cuda.enable_cudnn_sdp(False)
"""Attention of cuDNN, which torch prefers on H100s and later, would plan each new shape for about a second, and every
micro-batch has a new one (https://github.com/pytorch/pytorch/issues/166201)."""
EFFICIENT_UP_TO = 128
"""Longest queries for which CUDA's memory-efficient kernel is taken also where the flash kernel could be, which works on
blocks of 128: half the time for 28 tokens on an H200, 0.87 of it for 128, and 1.2 times as long for 256."""


@dataclass(frozen=True)
class Joined:
    """One side of several batches that are computed as one, (1, N, D): the real tokens of all rows, end to end.

    Only attention looks at the rows one by one; everything else works on each position alone.

    Attributes:
        shapes: (rows, length) of each batch, with padding.
        real_N: places of the tokens among those of all batches with padding.
        positions_N: position of each token in its row.
        starts_R: the first token of each row, then N.
        masks: what is added to the scores of attention to each batch with padding.
    """

    shapes: Sequence[tuple[int, int]]
    real_N: Tensor
    positions_N: Tensor
    starts_R: Tensor
    masks: Sequence[Tensor]

    @property
    def longest(self) -> int:
        """The greatest length."""
        return max(length for _, length in self.shapes)

    @property
    def block(self) -> int:
        """The smallest power of 2, from 16 on, that is not less than any length."""
        return max(16, 1 << (self.longest - 1).bit_length())

    def split(self, joined_1NP: Tensor) -> list[Tensor]:
        """Returns (rows, length, P) of each batch, with zeros at padding."""
        num_places = sum(rows * length for rows, length in self.shapes)
        padded = joined_1NP.new_zeros(num_places, joined_1NP.shape[2]).index_copy(0, self.real_N, joined_1NP.squeeze(0))
        return batches_of(padded, self.shapes)

    def join(self, parts_BTP: Sequence[Tensor]) -> Tensor:
        """Inverse of `split`: (1, N, P)."""
        return torch.cat([part_BTP.flatten(0, 1) for part_BTP in parts_BTP]).index_select(0, self.real_N).unsqueeze(0)


Sides = tuple[Joined, Joined]
"""Source and target of joined batches."""


def batches_of(padded: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Returns (rows, length, ...) of each batch, views of what all have with padding one after another, (places, ...)."""
    parts = torch.split(padded, [rows * length for rows, length in shapes])
    return [part.view(*shape, *part.shape[1:]) for part, shape in zip(parts, shapes, strict=True)]


@dataclass
class KeyValue:
    """Projected keys and values of one attention layer."""

    key_BHSK: Tensor
    value_BHSV: Tensor

    def select(self, rows: Tensor) -> None:
        """Keeps the given batch rows, in the given order; rows may repeat."""
        self.key_BHSK = self.key_BHSK.index_select(0, rows)
        self.value_BHSV = self.value_BHSV.index_select(0, rows)


class Places:
    """Room for the keys and values of the positions of one layer."""

    def __init__(self, places_BLP: Tensor, widths: list[int], num_heads: int) -> None:
        """`widths` are those of the keys and of the values of all heads, which follow one another in `places_BLP`."""
        self.places_BLP = places_BLP
        self.keys_values = KeyValue(*split_heads(places_BLP, widths, num_heads))


class KeyValueCache:
    """Keys and values of the positions that one layer has decoded, with places for more: a position is added without
    copying those before it. Not for training: its tensors have no gradients."""

    FIRST_PLACES = 32

    def __init__(self, like: KeyValue, num_rows: int) -> None:
        """Allocates `num_rows` batch rows without positions, with the other sizes, type and device of `like`."""
        _, self.num_heads, _, key_size = like.key_BHSK.shape
        self.widths = [self.num_heads * key_size, self.num_heads * like.value_BHSV.shape[3]]
        self.num_positions = 0
        places_BLP = like.key_BHSK.new_empty(num_rows, self.FIRST_PLACES, sum(self.widths))
        self._places = Places(places_BLP, self.widths, self.num_heads)

    @property
    def keys_values(self) -> KeyValue:
        """Views of the filled places."""
        room, filled = self._places.keys_values, self.num_positions
        return KeyValue(room.key_BHSK.narrow(2, 0, filled), room.value_BHSV.narrow(2, 0, filled))

    def append(self, newer_BP: Tensor) -> None:
        """Appends a position: the keys of all heads, then the values."""
        places_BLP = self._places.places_BLP
        if self.num_positions == places_BLP.shape[1]:
            places_BLP = torch.cat([places_BLP, torch.empty_like(places_BLP)], 1)
            self._places = Places(places_BLP, self.widths, self.num_heads)
        places_BLP.select(1, self.num_positions).copy_(newer_BP)
        self.num_positions += 1

    def select(self, rows: Tensor, spare: Places | None) -> Places:
        """Keeps the given batch rows, in the given order; rows may repeat. Writes them to `spare`, if it has the same
        size, and returns the previous places, which are the next layer's `spare`: this avoids allocations."""
        left, left_BLP = self._places, self._places.places_BLP
        if spare is None or spare.places_BLP.shape != left_BLP.shape or len(rows) != len(left_BLP):
            spare = Places(left_BLP.new_empty(len(rows), *left_BLP.shape[1:]), self.widths, self.num_heads)
        filled = self.num_positions
        torch.index_select(left_BLP.narrow(1, 0, filled), 0, rows, out=spare.places_BLP.narrow(1, 0, filled))
        self._places = spare
        return left


class SelfAttention(nn.Module):
    """Queries, keys and values from one sequence; causal in the decoder (3.2.3)."""

    def __init__(self, config: ModelConfig, is_causal: bool, rotary_positions: nn.Module | None) -> None:
        """`rotary_positions` returns the sinusoids (T, K) for a start and a length, by which queries and keys are rotated;
        None: the input contains its positions."""
        super().__init__()
        keys, values = (config.num_heads * size for size in head_sizes(config))
        self.num_heads = config.num_heads
        self.is_causal = is_causal
        self.rotary_positions = rotary_positions
        self.widths = [keys, keys, values]
        self.query_key_value = Linear(config.d_model, sum(self.widths))
        self.output = Linear(values, config.d_model)

    def forward(self, input_BTD: Tensor, mask_B11T: Tensor | None = None, joined: Joined | None = None) -> Tensor:
        """Applies self-attention. Causal layers take no mask: padding is at the end, so no real position sees it, and
        CUDA's flash kernel, which refuses masks, stays usable. Masks of `joined` batches are in `joined`."""
        projected_BTP = self.query_key_value(input_BTD)
        if joined is None:
            return self.output(self._attend(projected_BTP, mask_B11T))  # type: ignore[no-any-return]
        if self.has_kernel(projected_BTP, joined.block):
            attended = gpu_kernels.attend_rows(projected_BTP, None, joined, joined, self.num_heads, self.is_causal)
        else:
            masks = [None] * len(joined.masks) if self.is_causal else joined.masks
            parts = zip(joined.split(projected_BTP), masks, strict=True)
            attended = joined.join([self._attend(part_BTP, mask) for part_BTP, mask in parts])
        return self.output(attended)  # type: ignore[no-any-return]

    def has_kernel(self, like: Tensor, longest: int) -> bool:
        """True if a kernel of our own computes rows of up to so many tokens, of the type and on the device of `like`."""
        return self.rotary_positions is None and gpu_kernels.can_attend(like, longest, self.widths, self.num_heads)

    def packed_rows(self, gain: float, beta: float) -> dict[nn.Module, list[tuple[int, float]]]:
        """Returns (rows, initial gain) of each matrix in a layer's weight: DeepNorm's `beta` is for values only."""
        keys, _, values = self.widths
        return {self.query_key_value: [(keys, gain), (keys, gain), (values, gain * beta)]}

    def step(self, input_BD: Tensor, past: KeyValueCache) -> Tensor:
        """Applies attention of the newest position over itself and `past`, to which it is appended: (B, D)."""
        projected_BP = self.query_key_value(input_BD)
        if self.rotary_positions is None:
            query_BP, newer_BP = projected_BP.tensor_split(self.widths[:1], 1)
        else:
            query, *newer = self._heads(projected_BP[:, None], start=past.num_positions)
            query_BP, newer_BP = query.flatten(1), torch.cat([each.flatten(1) for each in newer], 1)
        past.append(newer_BP)
        query_BH1K = query_BP.view(len(query_BP), self.num_heads, 1, -1)
        return self.output(attend(query_BH1K, past.keys_values).reshape(len(query_BP), -1))  # type: ignore[no-any-return]

    def weights(self, input_BTD: Tensor, mask_B11T: Tensor | None = None) -> Tensor:
        """Returns the attention weights of `forward` for the same arguments: (B, H, T, T), fp32, rows sum to 1."""
        query_BHTK, key_BHTK, _ = self._heads(self.query_key_value(input_BTD))
        if self.is_causal:
            length = input_BTD.shape[1]
            mask_B11T = torch.full((length, length), float("-inf"), device=input_BTD.device).triu(1)
        return attention_weights(query_BHTK, key_BHTK, mask_B11T)

    def _attend(self, projected_BTP: Tensor, mask_B11T: Tensor | None) -> Tensor:
        query_BHTK, key_BHTK, value_BHTV = self._heads(projected_BTP)
        return merge_heads(attend(query_BHTK, KeyValue(key_BHTK, value_BHTV), mask_B11T, self.is_causal))

    def _heads(self, projected_BTP: Tensor, start: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys and values of each head; the first position is number `start`."""
        if self.rotary_positions is None:
            query, key, value = split_heads(projected_BTP, self.widths, self.num_heads)
            return query, key, value
        of_both, of_value = 2 * self.widths[0], self.widths[2]
        both_BTP, value_BTP = projected_BTP.split_with_sizes([of_both, of_value], 2)
        (both_BHTK,) = split_heads(both_BTP, [of_both], 2 * self.num_heads)
        (value_BHTV,) = split_heads(value_BTP, [of_value], self.num_heads)
        sinusoid_TK = self.rotary_positions(start, projected_BTP.shape[1], torch.empty(0, device=both_BTP.device))
        query_BHTK, key_BHTK = apply_rotary(both_BHTK, sinusoid_TK).chunk(2, 1)
        return query_BHTK, key_BHTK, value_BHTV


class CrossAttention(nn.Module):
    """Queries from the decoder, keys and values from the encoder's output, the memory (3.2.3)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        keys, values = (config.num_heads * size for size in head_sizes(config))
        self.num_heads = config.num_heads
        self.widths = [keys, values]
        self.query = Linear(config.d_model, keys)
        self.key_value = Linear(config.d_model, sum(self.widths))
        self.output = Linear(values, config.d_model)

    def forward(
        self, input_BTD: Tensor, memory_BSD: Tensor, mask_B11S: Tensor | None, joined: Sides | None = None
    ) -> Tensor:
        """Attends to the memory; joined batches have the masks of their source."""
        if joined is None:
            return self.output(self._attend(self.query(input_BTD), self.project(memory_BSD), mask_B11S))  # type: ignore[no-any-return]
        source, target = joined
        queries, memories = self.query(input_BTD), self.key_value(memory_BSD)
        if gpu_kernels.can_attend(queries, max(source.block, target.block), self.widths, self.num_heads):
            attended = gpu_kernels.attend_rows(queries, memories, source, target, self.num_heads, False)
        else:
            parts = zip(target.split(queries), source.split(memories), source.masks, strict=True)
            attended = target.join([self._attend(query, self._keys_values(kv), mask) for query, kv, mask in parts])
        return self.output(attended)  # type: ignore[no-any-return]

    def packed_rows(self, gain: float, beta: float) -> dict[nn.Module, list[tuple[int, float]]]:
        """Returns (rows, initial gain) of each matrix, as in `SelfAttention`."""
        keys, values = self.widths
        return {self.query: [(keys, gain)], self.key_value: [(keys, gain), (values, gain * beta)]}

    def project(self, memory_BSD: Tensor) -> KeyValue:
        """Returns keys and values of the memory: computed once per sentence, for any number of decoded tokens."""
        return self._keys_values(self.key_value(memory_BSD))

    def step(self, input_BD: Tensor, memory: KeyValue, mask_B11S: Tensor | None) -> Tensor:
        """Applies attention of the newest position to projected memory: (B, D). The rows of one sentence (its beam) are
        adjacent and share one memory: they attend to it as if they were positions of one sequence, so the memory is
        never copied per beam. None: no mask."""
        query_BTP = self.query(input_BD).view(len(memory.key_BHSK), -1, self.widths[0])
        return self.output(self._attend(query_BTP, memory, mask_B11S).view(len(input_BD), -1))  # type: ignore[no-any-return]

    def _keys_values(self, projected_BSP: Tensor) -> KeyValue:
        return KeyValue(*split_heads(projected_BSP, self.widths, self.num_heads))

    def _attend(self, query_BTP: Tensor, memory: KeyValue, mask_B11S: Tensor | None) -> Tensor:
        (query_BHTK,) = split_heads(query_BTP, self.widths[:1], self.num_heads)
        return merge_heads(attend(query_BHTK, memory, mask_B11S))

    def weights(self, input_BTD: Tensor, memory_BSD: Tensor, mask_B11S: Tensor | None) -> Tensor:
        """Returns the attention weights of `forward` for the same arguments: (B, H, T, S), fp32, rows sum to 1."""
        (query_BHTK,) = split_heads(self.query(input_BTD), self.widths[:1], self.num_heads)
        return attention_weights(query_BHTK, self.project(memory_BSD).key_BHSK, mask_B11S)


def attend(query_BHTK: Tensor, past: KeyValue, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """Computes equation 1: (B, H, T, V). None: no mask."""
    if query_BHTK.is_cpu and query_BHTK.requires_grad and query_BHTK.itemsize == 2:
        return attend_in_fp32(query_BHTK, past.key_BHSK, past.value_BHSV, mask, is_causal)
    if query_BHTK.is_cuda:
        torch.backends.cuda.enable_flash_sdp(query_BHTK.shape[2] > EFFICIENT_UP_TO)
    return F.scaled_dot_product_attention(query_BHTK, past.key_BHSK, past.value_BHSV, mask, is_causal=is_causal)


def split_heads(projected_BTP: Tensor, widths: list[int], num_heads: int) -> list[Tensor]:
    """Splits (B, T, sum of `widths`) into one tensor (B, H, T, width / H) for each width, a view of the input."""
    batch, length, _ = projected_BTP.shape
    parts = projected_BTP.split_with_sizes(widths, 2) if len(widths) > 1 else [projected_BTP]
    sized = zip(parts, widths, strict=True)
    return [part_BTP.view(batch, length, num_heads, width // num_heads).transpose(1, 2) for part_BTP, width in sized]


def apply_rotary(vector_BHTK: Tensor, sinusoid_TK: Tensor) -> Tensor:
    """Applies rotary positions (Su et al., 2021, equation 34): rotates the pair (2i, 2i + 1) of a query or key at
    position t by the angle t / 10000^(2i / K), whose sine and cosine are a pair of `sinusoid_TK`, in fp32. The product
    of a query and a key then depends on their distance. The result has the type and memory layout of `vector_BHTK`."""
    vector_BTHK, sinusoid_T1K = vector_BHTK.transpose(1, 2), sinusoid_TK[:, None]
    sine_T1R, cosine_T1R = sinusoid_T1K[..., 0::2], sinusoid_T1K[..., 1::2]
    wide = torch.promote_types(vector_BHTK.dtype, sine_T1R.dtype)
    # A copy in any case: complex numbers begin at even places only.
    copied_BTHK = vector_BTHK.to(wide, copy=True, memory_format=torch.contiguous_format)
    pairs_BTHR2 = torch.unflatten(copied_BTHK, -1, (-1, 2))
    rotation_T1R = torch.complex(cosine_T1R, sine_T1R)
    turned_BTHR2 = torch.view_as_real(torch.view_as_complex(pairs_BTHR2) * rotation_T1R)
    return turned_BTHR2.flatten(-2).to(vector_BHTK.dtype).transpose(1, 2)


def merge_heads(attended_BHTV: Tensor) -> Tensor:
    """Reshapes (B, H, T, V) to (B, T, H * V)."""
    return attended_BHTV.transpose(1, 2).flatten(2)


def attention_weights(query_BHTK: Tensor, key_BHSK: Tensor, mask: Tensor | None) -> Tensor:
    """Computes softmax(Q K^T / sqrt(K)) of equation 1, for display. At least fp32; masked weights are 0."""
    query_BHTK, key_BHSK = (x if x.dtype == torch.float64 else x.float() for x in (query_BHTK, key_BHSK))
    scores_BHTS = query_BHTK @ key_BHSK.transpose(-2, -1) * query_BHTK.shape[-1] ** -0.5
    return torch.softmax(scores_BHTS if mask is None else scores_BHTS + mask, -1)
