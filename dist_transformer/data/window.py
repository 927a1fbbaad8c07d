"""A window as micro-batches: read its rows, shuffle, bucket by length, pad, and lay all out in one flat array.

A window is a pure function of (manifest, seed, epoch, lane, window): any worker of any rank computes the same one, and
a resume recomputes one window a lane instead of reading the epoch again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dist_transformer.data.batching import cut_by_tokens, snake_order
from dist_transformer.data.manifest import Manifest
from dist_transformer.data.plan import PURPOSE_WINDOW, RowSlice, WindowKey, random_generator
from dist_transformer.errors import DataError

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """Sentence pairs as token ids: side i of row r is `ids[offsets[r]:offsets[r + 1]]`."""

    row_ids: Ints
    source_ids: Ints
    source_offsets: Ints
    target_ids: Ints
    target_offsets: Ints


@dataclass(frozen=True)
class BatchShape:
    """Size of one micro-batch: rows x (source, target) padded lengths, and the tokens that are not padding."""

    rows: int
    source_length: int
    target_length: int
    source_tokens: int
    target_tokens: int

    @property
    def padded_tokens(self) -> int:
        return self.rows * (self.source_length + self.target_length)


@dataclass(frozen=True)
class Window:
    """All micro-batches of a window in two flat arrays: one transfer from the worker, whatever their number.

    `tokens` holds, for each shape in order, the source ids (rows, source_length) and then the target ids
    (rows, target_length), padded at the end; `row_ids` the rows' numbers in the same order.
    """

    key: WindowKey
    shapes: tuple[BatchShape, ...]
    tokens: NDArray[np.int32]
    row_ids: Ints


class WindowReader:
    """Builds windows of one split of a prepared corpus. Holds no open files itself: safe to send to a worker."""

    def __init__(self, folder: Path, manifest: Manifest, split: str) -> None:
        self._folder = folder
        self._pad_id = manifest.pad_id
        shards = manifest.splits[split].shards
        self._groups = [(s.file, index, group.rows) for s in shards for index, group in enumerate(s.row_groups)]

    def build(self, key: WindowKey, slices: Sequence[RowSlice], max_tokens: int, seed: int) -> Window:
        """The window of these rows.

        Raises:
            DataError: a shard is missing or damaged.
        """
        rows = _join([self._read(piece) for piece in slices])
        random = random_generator(seed, PURPOSE_WINDOW, key.epoch, key.lane, key.window)
        members = _bucket(rows, random.permutation(len(rows.row_ids)), max_tokens)
        shuffled = [members[i] for i in random.permutation(len(members))]
        return _lay_out(key, rows, shuffled, self._pad_id)

    def build_in_order(self, max_tokens: int) -> Iterator[Window]:
        """The whole split without randomness, a window for each row group: for validation."""
        for group, (_, _, num_rows) in enumerate(self._groups):
            rows = self._read(RowSlice(group, 0, num_rows))
            members = _bucket(rows, np.arange(num_rows), max_tokens)
            yield _lay_out(WindowKey(0, 0, group), rows, members, self._pad_id)

    def _read(self, piece: RowSlice) -> Rows:
        file, index, _ = self._groups[piece.row_group]
        path = self._folder / file
        try:
            table = _open(path).read_row_group(index, columns=["row_id", "source", "target"])
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                f"{path}: row group {index} cannot be read ({error}). The shard is missing or damaged: "
                "delete the prepared folder and run `dist-transformer prepare` again."
            ) from error
        table = table.slice(piece.first, piece.last - piece.first)
        row_ids = table.column("row_id").to_numpy().astype(np.int64)
        return Rows(row_ids, *_ids(table, "source"), *_ids(table, "target"))


@lru_cache(maxsize=64)
def _open(path: Path) -> pq.ParquetFile:
    return pq.ParquetFile(path)


def _ids(table: pa.Table, column: str) -> tuple[Ints, Ints]:
    lists = pa.concat_arrays(table.column(column).chunks)
    offsets = lists.offsets.to_numpy().astype(np.int64)
    ids = lists.values.to_numpy()[offsets[0] : offsets[-1]].astype(np.int64)
    return ids, offsets - offsets[0]


def _join(parts: Sequence[Rows]) -> Rows:
    def offsets(name: str) -> Ints:
        lengths = np.concatenate([np.diff(getattr(part, name)) for part in parts])
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])

    return Rows(
        np.concatenate([part.row_ids for part in parts]),
        np.concatenate([part.source_ids for part in parts]),
        offsets("source_offsets"),
        np.concatenate([part.target_ids for part in parts]),
        offsets("target_offsets"),
    )


def _bucket(rows: Rows, order: Ints, max_tokens: int) -> list[Ints]:
    """The rows of each micro-batch; ties of equal length stay in the given order."""
    source_lengths, target_lengths = np.diff(rows.source_offsets), np.diff(rows.target_offsets)
    order = order[snake_order(source_lengths[order], target_lengths[order])]
    runs = cut_by_tokens(source_lengths[order], target_lengths[order], max_tokens)
    return [order[first:last] for first, last in runs]


def _lay_out(key: WindowKey, rows: Rows, members: Sequence[Ints], pad_id: int) -> Window:
    shapes, parts = [], []
    for batch in members:
        source, source_tokens = _padded(rows.source_ids, rows.source_offsets, batch, pad_id)
        target, target_tokens = _padded(rows.target_ids, rows.target_offsets, batch, pad_id)
        shapes.append(BatchShape(len(batch), source.shape[1], target.shape[1], source_tokens, target_tokens))
        parts += [source.ravel(), target.ravel()]
    row_ids = np.concatenate([rows.row_ids[batch] for batch in members])
    return Window(key, tuple(shapes), np.concatenate(parts), row_ids)


def _padded(ids: Ints, offsets: Ints, batch: Ints, pad_id: int) -> tuple[NDArray[np.int32], int]:
    """One side of a micro-batch as (rows, longest), padding at the end; and its number of real tokens."""
    starts, lengths = offsets[batch], offsets[batch + 1] - offsets[batch]
    column = np.arange(int(lengths.max()))[None, :]
    real = column < lengths[:, None]
    places = np.where(real, starts[:, None] + column, 0)
    return np.where(real, ids[places], pad_id).astype(np.int32), int(lengths.sum())
