"""Conversion of text rows to rows of a chunk: filtered, tokenized (or left as text), and counted."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dist_transformer.config.data_schema import FilterConfig
from dist_transformer.data.filters import filter_lengths, filter_text
from dist_transformer.data.prepare.duplicates import Hashes, pair_hashes
from dist_transformer.data.prepare.shards import text_table, token_table
from dist_transformer.data.prepare.state import Chunk
from dist_transformer.data.sources.corpus import RawBatch
from dist_transformer.data.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class KeptRows:
    """The kept rows of a batch, and the counts of the others.

    Attributes:
        table: see `token_table` and `text_table`.
        dropped: number of rows by rule.
        source_lengths: number of tokens of each kept row; None: not tokenized.
        target_lengths: as `source_lengths`.
    """

    read_rows: int
    table: pa.Table
    dropped: Counter[str]
    hashes: Hashes
    source_lengths: NDArray[np.int64] | None = None
    target_lengths: NDArray[np.int64] | None = None


def tokenized_rows(batch: RawBatch, tokenizer: Tokenizer, filters: FilterConfig, threads: int) -> KeptRows:
    """Returns the kept rows of a batch as token ids."""
    positions, dropped = filter_text(batch, filters)
    source = tokenizer.encode_source(_picked(batch.source, positions), threads)
    target = tokenizer.encode_target(_picked(batch.target, positions), threads)
    lengths = [np.array([len(ids) for ids in side], dtype=np.int64) for side in (source, target)]
    kept, dropped_by_length = filter_lengths(lengths[0], lengths[1], filters)
    source, target = (list(itertools.compress(side, kept)) for side in (source, target))
    positions = list(itertools.compress(positions, kept))
    vocabularies = (tokenizer.source_vocabulary, tokenizer.target_vocabulary)
    return KeptRows(
        read_rows=len(batch.source),
        table=token_table(_row_ids(batch, positions), source, target, vocabularies),
        dropped=dropped + dropped_by_length,
        hashes=_hashes(batch, positions),
        source_lengths=lengths[0][kept],
        target_lengths=lengths[1][kept],
    )


def text_rows(batch: RawBatch, filters: FilterConfig) -> KeptRows:
    """Returns the rows of a batch that are not dropped by their text, as text, normalized and tagged."""
    positions, dropped = filter_text(batch, filters)
    return KeptRows(
        read_rows=len(batch.source),
        table=text_table(
            _row_ids(batch, positions), _picked(batch.source, positions), _picked(batch.target, positions)
        ),
        dropped=dropped,
        hashes=_hashes(batch, positions),
    )


class ChunkRows:
    """The rows of a chunk, collected batch by batch."""

    def __init__(self) -> None:
        self._tables: list[pa.Table] = []
        self._hashes: list[Hashes] = []
        self._chunks: list[Chunk] = []

    def add(self, kept: KeptRows) -> None:
        """Appends the rows of a batch."""
        self._tables.append(kept.table)
        self._hashes.append(kept.hashes)
        self._chunks.append(
            Chunk(
                read_rows=kept.read_rows,
                rows=kept.table.num_rows,
                dropped=dict(kept.dropped),
                source_lengths=_counted(kept.source_lengths),
                target_lengths=_counted(kept.target_lengths),
            )
        )

    def table(self) -> pa.Table:
        """Returns all rows."""
        return pa.concat_tables(self._tables)

    def hashes(self) -> Hashes:
        """Returns the hashes of all rows."""
        return Hashes.together(self._hashes)

    def counts(self) -> Chunk:
        """Returns the counts of all rows."""
        return Chunk.together(self._chunks)


def _picked(texts: Sequence[str | None], positions: Sequence[int]) -> list[str]:
    return [texts[position] or "" for position in positions]


def _row_ids(batch: RawBatch, positions: Sequence[int]) -> NDArray[np.int64]:
    return np.asarray(positions, dtype=np.int64) + batch.first_row


def _hashes(batch: RawBatch, positions: Sequence[int]) -> Hashes:
    """Hashes the pairs without their tags, which differ between corpora."""
    sources = [text.removeprefix(batch.prefix) for text in _picked(batch.source, positions)]
    return pair_hashes(sources, _picked(batch.target, positions))


def _counted(lengths: NDArray[np.int64] | None) -> tuple[int, ...]:
    return () if lengths is None else tuple(np.bincount(lengths).tolist())
