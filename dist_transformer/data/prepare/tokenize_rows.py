"""Conversion of text rows to rows of a chunk: filtered, tokenized (or left as text), and counted."""

from dataclasses import dataclass
from itertools import compress

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dist_transformer.config.data_schema import FilterConfig
from dist_transformer.data.filters import KeptText, filter_lengths
from dist_transformer.data.prepare.shards import text_table, token_table
from dist_transformer.data.prepare.state import EXAMPLE_CHARACTERS, EXAMPLES, Chunk
from dist_transformer.data.sources.corpus import RawBatch
from dist_transformer.data.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class KeptRows:
    """The kept rows of a batch, and the counts of the others.

    Attributes:
        text: the kept rows as text, and the dropped ones.
        table: see `token_table` and `text_table`.
        source_lengths: number of tokens of each kept row; None: not tokenized.
        target_lengths: as `source_lengths`.
        unknown: number of source and target tokens that no piece of the vocabulary stands for.
    """

    batch: RawBatch
    text: KeptText
    table: pa.Table
    source_lengths: NDArray[np.int64] | None = None
    target_lengths: NDArray[np.int64] | None = None
    unknown: tuple[int, int] = (0, 0)


def tokenized_rows(
    batch: RawBatch, text: KeptText, tokenizer: Tokenizer, filters: FilterConfig, threads: int
) -> KeptRows:
    """Returns the rows of a batch that are not dropped by their text, nor by their lengths, as token ids."""
    source, target = tokenizer.encode_source(text.source, threads), tokenizer.encode_target(text.target, threads)
    lengths = [np.array([len(ids) for ids in side], dtype=np.int64) for side in (source, target)]
    text, before = text.without(filter_lengths(lengths[0], lengths[1], filters)), text
    kept = np.isin(before.positions, text.positions)
    source, target = (list(compress(side, kept)) for side in (source, target))
    vocabularies = (tokenizer.source_vocabulary, tokenizer.target_vocabulary)
    table = token_table(text.positions + batch.first_row, source, target, vocabularies)
    return KeptRows(batch, text, table, lengths[0][kept], lengths[1][kept], tokenizer.num_unknown(source, target))


def text_rows(batch: RawBatch, text: KeptText) -> KeptRows:
    """Returns the rows of a batch that are not dropped by their text, as text, normalized and tagged."""
    return KeptRows(batch, text, text_table(text.positions + batch.first_row, text.source, text.target))


class ChunkRows:
    """The rows of a chunk, collected batch by batch."""

    def __init__(self) -> None:
        self._tables: list[pa.Table] = []
        self._chunks: list[Chunk] = []

    def add(self, kept: KeptRows) -> None:
        """Appends the rows of a batch."""
        self._tables.append(kept.table)
        self._chunks.append(
            Chunk(
                read_rows=len(kept.batch.source),
                rows=kept.table.num_rows,
                dropped=dict(kept.text.counts()),
                source_lengths=_counted(kept.source_lengths),
                target_lengths=_counted(kept.target_lengths),
                repaired=kept.text.repaired,
                examples=_examples(kept),
                unknown=kept.unknown,
            )
        )

    def table(self) -> pa.Table:
        """Returns all rows."""
        return pa.concat_tables(self._tables)

    def counts(self) -> Chunk:
        """Returns the counts of all rows."""
        return Chunk.together(self._chunks)


def _examples(kept: KeptRows) -> dict[str, list[tuple[str, str]]]:
    """Returns the first dropped pairs of each rule, as they were read."""
    sides = kept.batch.source, kept.batch.target
    return {
        rule: [tuple((side[place] or "")[:EXAMPLE_CHARACTERS] for side in sides) for place in places[:EXAMPLES]]  # type: ignore[misc]
        for rule, places in kept.text.dropped.items()
    }


def _counted(lengths: NDArray[np.int64] | None) -> tuple[int, ...]:
    return () if lengths is None else tuple(np.bincount(lengths).tolist())
