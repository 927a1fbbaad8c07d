"""Text rows to token rows: filtered, tokenized, and counted."""

import itertools
import os
from collections import Counter
from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from dist_transformer.config.data_models import FilterConfig
from dist_transformer.data.filters import filter_lengths, filter_text
from dist_transformer.data.prepare_state import Chunk
from dist_transformer.data.shards import token_lengths, token_table
from dist_transformer.data.sources import RawBatch
from dist_transformer.data.tokenizer import Tokenizer


def tokenized_chunk(batches: Iterable[RawBatch], tokenizer: Tokenizer, filters: FilterConfig) -> tuple[pa.Table, Chunk]:
    """The kept rows of at least one batch as one table (see `token_table`), and their counts."""
    tables, dropped, read_rows = [], Counter[str](), 0
    for batch in batches:
        table, batch_dropped = tokenized_batch(batch, tokenizer, filters)
        tables.append(table)
        dropped.update(batch_dropped)
        read_rows += len(batch.source)
    whole = pa.concat_tables(tables)
    source, target = token_lengths(whole, "source"), token_lengths(whole, "target")
    return whole, Chunk(
        read_rows=read_rows,
        rows=whole.num_rows,
        source_tokens=int(source.sum()),
        target_tokens=int(target.sum()),
        max_source_tokens=int(source.max(initial=0)),
        max_target_tokens=int(target.max(initial=0)),
        dropped=dict(dropped),
    )


def tokenized_batch(batch: RawBatch, tokenizer: Tokenizer, filters: FilterConfig) -> tuple[pa.Table, Counter[str]]:
    """The kept rows of a batch, and the dropped ones by rule. Tokenizes on all cores."""
    positions, dropped = filter_text(batch, filters)
    threads = len(os.sched_getaffinity(0))
    source = tokenizer.encode_source([batch.source[i] or "" for i in positions], threads)
    target = tokenizer.encode_target([batch.target[i] or "" for i in positions], threads)
    kept, dropped_by_length = filter_lengths([len(ids) for ids in source], [len(ids) for ids in target], filters)
    row_ids = (np.asarray(positions, dtype=np.int64) + batch.first_row)[kept]
    source, target = (list(itertools.compress(ids, kept)) for ids in (source, target))
    vocabularies = (tokenizer.source_vocabulary, tokenizer.target_vocabulary)
    return token_table(row_ids, source, target, vocabularies), dropped + dropped_by_length
