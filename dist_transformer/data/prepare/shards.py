"""Rows of a prepared corpus: made of text, shuffled in bounded memory by spill files, and written as shards (Parquet).

A row has token ids, or text that is tokenized in training.

Global shuffle: every row gets a random key. A spill file has one chunk of the corpus sorted by key, so that the rows
of a range of keys are adjacent in each of them. A shard is one range, gathered from all spill files and sorted.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import compress, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dist_transformer.config.data_schema import FilterConfig
from dist_transformer.data.filters import KeptText, filter_lengths
from dist_transformer.data.loader.window_request import random_generator
from dist_transformer.data.manifest import RowGroup, Shard
from dist_transformer.data.prepare.state import EXAMPLE_CHARACTERS, EXAMPLES, Chunk
from dist_transformer.data.sources.corpus import RawBatch
from dist_transformer.data.tokenizer.tokenizer import Tokenizer
from dist_transformer.files import file_sha256, replacing

PURPOSE_SHUFFLE = 100
KEY_LIMIT = 1 << 62
"""Upper limit of the uniform keys; among 10^9 rows two share one with a chance of 10%; row numbers order those."""
SPILL_ROW_GROUP_ROWS = 4096
LARGEST_UINT16_VOCABULARY = 65_535
CountedRows = tuple[pa.Table, Chunk]
"""The kept rows of a batch, see `tokenized_rows` and `text_rows`, and its counts."""


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
    # Large: a column of all rows of a chunk may be longer than the 2 GiB of the plain type.
    texts = {"source": pa.array(text.source, pa.large_string()), "target": pa.array(text.target, pa.large_string())}
    row_ids = pa.array(text.positions + batch.first_row, pa.int64())
    return pa.table({"row_id": row_ids, **texts}), _counts(batch, text)


def _counts(batch: RawBatch, text: KeptText) -> Chunk:
    """Returns the counts of a batch by its text, with the first dropped pairs of each rule, as they were read."""
    sides = batch.source, batch.target
    examples: dict[str, list[tuple[str, str]]] = {
        rule: [tuple((side[place] or "")[:EXAMPLE_CHARACTERS] for side in sides) for place in places[:EXAMPLES]]  # type: ignore[misc]
        for rule, places in text.dropped.items()
    }
    return Chunk(len(batch.source), len(text.positions), dict(text.counts()), (), (), text.repaired, examples)


def token_table(
    row_ids: NDArray[np.int64], source: list[list[int]], target: list[list[int]], vocabularies: tuple[int, int]
) -> pa.Table:
    """Returns the columns of a shard; ids take two bytes where the vocabulary allows it."""
    types = [pa.list_(pa.uint16() if size <= LARGEST_UINT16_VOCABULARY else pa.uint32()) for size in vocabularies]
    ids = {"source": pa.array(source, types[0]), "target": pa.array(target, types[1])}
    return pa.table({"row_id": pa.array(row_ids, pa.int64()), **ids})


def count_tokens(rows: pa.Table) -> tuple[int, int]:
    """Counts source and target tokens of rows of token ids."""
    sides = (pc.list_value_length(rows.column(side)) for side in ("source", "target"))
    source, target = (int(pc.sum(lengths, min_count=0).as_py()) for lengths in sides)
    return source, target


def write_shard(
    table: pa.Table, folder: Path, file: str, row_group_rows: int, num_tokens: Callable[[pa.Table], tuple[int, int]]
) -> Shard:
    """Writes `<folder>/<file>` completely or not at all; the same table gives the same bytes.

    `num_tokens` counts (for text: estimates) the source and target tokens of a row group.
    """
    groups = []
    with replacing(folder / file) as temporary:
        with pq.ParquetWriter(temporary, table.schema, compression="zstd", write_page_checksum=True) as writer:
            for first in range(0, table.num_rows, row_group_rows):
                rows = table.slice(first, row_group_rows)
                writer.write_table(rows, row_group_size=row_group_rows)
                groups.append(RowGroup(rows.num_rows, *num_tokens(rows)))
        return Shard(file, temporary.stat().st_size, file_sha256(temporary), tuple(groups))


def write_spill(tables: list[pa.Table], path: Path, seed: int, corpus: int, chunk: int) -> None:
    """Draws the keys of a chunk's rows from (seed, number of the corpus, chunk), and writes the rows sorted by key. Sorts
    each table of the list in its place: memory is that of the rows once."""
    ends = np.cumsum([table.num_rows for table in tables])
    keys = random_generator(seed, PURPOSE_SHUFFLE, corpus, chunk).integers(KEY_LIMIT, size=ends[-1])
    firsts, cuts = np.sort(keys)[::SPILL_ROW_GROUP_ROWS], []
    for number, own in enumerate(np.split(keys, ends[:-1])):
        tables[number] = tables[number].append_column("key", pa.array(own)).sort_by("key")
        cuts.append([*np.searchsorted(tables[number].column("key").to_numpy(), firsts), len(own)])
    with (
        replacing(path) as temporary,
        pq.ParquetWriter(temporary, tables[0].schema, compression="zstd", write_page_checksum=True) as writer,
    ):
        for bounds in zip(*map(pairwise, cuts), strict=True):
            parts = [table.slice(low, high - low) for table, (low, high) in zip(tables, bounds, strict=True)]
            writer.write_table(pa.concat_tables(parts).combine_chunks().sort_by("key"))


def gather_ranges(spills: Sequence[Path], indices: Sequence[int], num_ranges: int) -> Iterator[pa.Table]:
    """Yields the rows of each of some neighbouring ranges of keys, in their order. Memory: the rows of all these ranges."""
    bounds = [(KEY_LIMIT * index // num_ranges, KEY_LIMIT * (index + 1) // num_ranges) for index in indices]
    rows = pa.concat_tables([_read_range(path, bounds[0][0], bounds[-1][1]) for path in spills])
    for low, high in bounds:
        own = _in_range(rows, low, high)
        order = pc.sort_indices(own, sort_keys=[("key", "ascending"), ("row_id", "ascending")])
        yield own.take(order).drop_columns(["key"]).combine_chunks()


def _read_range(path: Path, low: int, high: int) -> pa.Table:
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        key_column = file.metadata.num_columns - 1  # the last leaf column; its statistics bound the group
        keys = (file.metadata.row_group(group).column(key_column).statistics for group in range(file.num_row_groups))
        groups = [group for group, bounds in enumerate(keys) if bounds.min < high and bounds.max >= low]
        return _in_range(file.read_row_groups(groups), low, high)


def _in_range(rows: pa.Table, low: int, high: int) -> pa.Table:
    keys = rows.column("key")
    return rows.filter(pc.and_(pc.greater_equal(keys, low), pc.less(keys, high)))
