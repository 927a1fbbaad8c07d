"""Windows as micro-batches: reads the rows, shuffles, buckets by length, pads, and lays all out in one flat array.

A window is a pure function of its request and the seed: any loader process of any rank computes the same one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dist_transformer.data.loader.batching import Bucket, Ints, buckets_of
from dist_transformer.data.loader.position import Quarantined
from dist_transformer.data.loader.rows import RowReader
from dist_transformer.data.loader.token_rows import TokenColumn, TokenRows
from dist_transformer.data.loader.window_request import PURPOSE_WINDOW, WindowKey, WindowRequest, random_generator
from dist_transformer.data.special_tokens import SpecialTokens

Tokens = NDArray[np.int32]


@dataclass(frozen=True)
class BatchShape:
    """Size of one micro-batch: rows x (source, target) padded lengths, and the tokens that are not padding.

    Attributes:
        pairs: the rows; 0 in the micro-batch of a lane that has none.
        source_tokens: without padding, as target_tokens.
    """

    rows: int
    source_length: int
    target_length: int
    pairs: int
    source_tokens: int
    target_tokens: int

    @property
    def padded_tokens(self) -> int:
        return self.rows * (self.source_length + self.target_length)


@dataclass(frozen=True)
class Window:
    """All micro-batches of a window in two flat arrays: one transfer between processes for any number of them.

    Attributes:
        tokens: for each shape in order, the source ids (rows, source_length) and then the target ids
            (rows, target_length), padded at the end.
        row_ids: ids of the real rows, in the same order.
        dropped: number of rows dropped by rule, as in TokenRows.
    """

    request: WindowRequest
    shapes: tuple[BatchShape, ...]
    tokens: Tokens
    row_ids: Ints
    dropped: dict[str, int]
    quarantined: tuple[Quarantined, ...]


class WindowBuilder:
    """Builds windows, of micro-batches of at most `max_tokens`, padding included; `special.pad` fills their rows. Has no
    open files itself: safe to send to another process."""

    def __init__(self, reader: RowReader, max_tokens: int, special: SpecialTokens, seed: int) -> None:
        self._reader, self._max_tokens, self._special, self._seed = reader, max_tokens, special, seed

    def build(self, request: WindowRequest) -> Window:
        """Builds the window of a request, without micro-batches if all its rows are dropped or quarantined. Raises
        DataError: a row group cannot be read."""
        key = request.key
        rows = self._reader.read(request)
        random = random_generator(self._seed, PURPOSE_WINDOW, key.epoch, key.segment, key.lane, key.window)
        buckets = self._buckets(rows, random.permutation(len(rows.row_ids)))
        shuffled = [buckets[i] for i in random.permutation(len(buckets))]
        return self._window(request, rows, shuffled)

    def build_rows(self, rows: TokenRows) -> Window:
        """Builds a window of these rows without randomness."""
        buckets = self._buckets(rows, np.arange(len(rows.row_ids)))
        return self._window(WindowRequest(WindowKey(0, 0, 0, 0), ()), rows, buckets)

    def _buckets(self, rows: TokenRows, order: Ints) -> list[Bucket]:
        return buckets_of(rows.source.lengths, rows.target.lengths, order, self._max_tokens)

    def _window(self, request: WindowRequest, rows: TokenRows, buckets: Sequence[Bucket]) -> Window:
        """Lays out all buckets in one flat array."""
        size = sum(bucket.rows * (bucket.source_length + bucket.target_length) for bucket in buckets)
        tokens = np.full(size, self._special.pad, np.int32)
        shapes, place = [], 0
        for bucket in buckets:
            middle = place + bucket.rows * bucket.source_length
            end = middle + bucket.rows * bucket.target_length
            source, target = tokens[place:middle].reshape(bucket.rows, -1), tokens[middle:end].reshape(bucket.rows, -1)
            source_tokens = _fill(source, rows.source, bucket.members)
            target_tokens = _fill(target, rows.target, bucket.members)
            lengths = bucket.source_length, bucket.target_length
            shapes.append(BatchShape(bucket.rows, *lengths, bucket.rows, source_tokens, target_tokens))
            place = end
        members = np.concatenate([np.zeros(0, np.int64), *(bucket.members for bucket in buckets)])
        return Window(request, tuple(shapes), tokens, rows.row_ids[members], dict(rows.dropped), rows.quarantined)


def _fill(side: Tokens, rows: TokenColumn, members: Ints) -> int:
    """Writes the ids of the members into a side of a micro-batch; returns the number of tokens."""
    starts, lengths = rows.starts[members], rows.lengths[members]
    column = np.arange(side.shape[1])
    is_real = column < lengths[:, None]
    side[is_real] = rows.ids[(starts[:, None] + column)[is_real]]
    return int(lengths.sum())
