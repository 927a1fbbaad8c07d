"""Conversion of text rows to rows of a chunk: filtered, tokenized (or left as text), and counted."""

from dataclasses import replace
from itertools import compress

import numpy as np
import pyarrow as pa

from dist_transformer.config.data_schema import FilterConfig
from dist_transformer.data.filters import KeptText, filter_lengths
from dist_transformer.data.prepare.shards import text_table, token_table
from dist_transformer.data.prepare.state import EXAMPLE_CHARACTERS, EXAMPLES, Chunk
from dist_transformer.data.sources.corpus import RawBatch
from dist_transformer.data.tokenizer.tokenizer import Tokenizer

CountedRows = tuple[pa.Table, Chunk]
"""The kept rows of a batch, see `token_table` and `text_table`, and its counts."""


def tokenized_rows(
    batch: RawBatch, text: KeptText, tokenizer: Tokenizer, filters: FilterConfig, threads: int
) -> CountedRows:
    """Returns the rows of a batch that are not dropped by their text, nor by their lengths, as token ids."""
    source, target = tokenizer.encode_source(text.source, threads), tokenizer.encode_target(text.target, threads)
    lengths = [np.array([len(ids) for ids in side], dtype=np.int64) for side in (source, target)]
    text, before = text.without(filter_lengths(lengths[0], lengths[1], filters)), text
    kept = np.isin(before.positions, text.positions)
    source, target = (list(compress(side, kept)) for side in (source, target))
    vocabularies = (tokenizer.source_vocabulary, tokenizer.target_vocabulary)
    table = token_table(text.positions + batch.first_row, source, target, vocabularies)
    of_source, of_target = (tuple(np.bincount(side[kept]).tolist()) for side in lengths)
    unknown = tokenizer.num_unknown(source, target)
    return table, replace(_counts(batch, text), source_lengths=of_source, target_lengths=of_target, unknown=unknown)


def text_rows(batch: RawBatch, text: KeptText) -> CountedRows:
    """Returns the rows of a batch that are not dropped by their text, as text, normalized and tagged."""
    return text_table(text.positions + batch.first_row, text.source, text.target), _counts(batch, text)


def _counts(batch: RawBatch, text: KeptText) -> Chunk:
    """Returns the counts of a batch by its text, with the first dropped pairs of each rule, as they were read."""
    sides = batch.source, batch.target
    examples: dict[str, list[tuple[str, str]]] = {
        rule: [tuple((side[place] or "")[:EXAMPLE_CHARACTERS] for side in sides) for place in places[:EXAMPLES]]  # type: ignore[misc]
        for rule, places in text.dropped.items()
    }
    return Chunk(len(batch.source), len(text.positions), dict(text.counts()), (), (), text.repaired, examples)
