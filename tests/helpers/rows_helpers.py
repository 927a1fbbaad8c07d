"""Prepared folders made by hand for the tests of reading rows: real parquet files of token ids or of text."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dist_transformer.config.data_schema import DataConfig, TokenizerConfig
from dist_transformer.data.loader.rows import RowReader
from dist_transformer.data.loader.token_rows import TokenRows
from dist_transformer.data.loader.window_request import RowSlice, WindowKey, WindowRequest
from dist_transformer.data.manifest import Manifest, RowGroup, Shard, Split, TextColumns, TokenizerFiles
from dist_transformer.data.sources.demo_corpus import demo_pairs
from dist_transformer.data.tokenizer.tokenizer import train_tokenizer

FAULTY_FOLDER = Path(__file__).parents[1] / "faulty_filesystem"
PAIRS = [pair for _, pair in zip(range(120), demo_pairs("train"), strict=False)]
TOKENIZER = "tokenizer/source.model"
KEY = WindowKey(epoch=0, segment=0, lane=0, window=0)


def write_tokenizer(folder: Path) -> None:
    """A model of 200 pieces, trained on `PAIRS`."""
    sentences = (sentence for pair in PAIRS for sentence in pair)
    (folder / TOKENIZER).parent.mkdir(parents=True)
    train_tokenizer(sentences, TokenizerConfig(vocabulary_size=200), folder / TOKENIZER)


def write_table(table: pa.Table, path: Path, group_rows: Sequence[int], **options: Any) -> tuple[RowGroup, ...]:
    """Writes row groups of these sizes; `options` are those of the parquet writer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    first = 0
    with pq.ParquetWriter(path, table.schema, write_page_checksum=True, **options) as writer:
        for rows in group_rows:
            writer.write_table(table.slice(first, rows), row_group_size=max(1, rows))
            first += rows
    return tuple(RowGroup(rows, 0, 0) for rows in group_rows)


def token_table(num_rows: int, first_row: int) -> pa.Table:
    """Random ids; row numbers count down, so that no place can be taken for one."""
    random = np.random.default_rng(first_row)
    sides = [[random.integers(3, 60_000, size=length) for length in random.integers(1, 9, num_rows)] for _ in "ab"]
    return pa.table(
        {
            "row_id": pa.array(range(first_row + num_rows, first_row, -1), pa.int64()),
            "source": pa.array(sides[0], pa.list_(pa.uint16())),
            "target": pa.array(sides[1], pa.list_(pa.uint16())),
        }
    )


def write_token_split(folder: Path, name: str, files: Sequence[Sequence[int]]) -> Split:
    """A split of token shards: a file for each list of rows by row group."""
    shards, first_row = [], 0
    for number, group_rows in enumerate(files):
        file = f"shards/{name}-{number:05d}.parquet"
        groups = write_table(token_table(sum(group_rows), first_row), folder / file, group_rows)
        shards.append(Shard(file, (folder / file).stat().st_size, "", groups))
        first_row += sum(group_rows)
    return split_of(shards)


def split_of(shards: Sequence[Shard], text: TextColumns | None = None) -> Split:
    rows = sum(group.rows for shard in shards for group in shard.row_groups)
    return Split(tuple(shards), rows, 0, 0, 0, 0, rows, {}, text)


def write_text_split(file: Path, group_rows: Sequence[int], prefix: str = "", address: str = "") -> Split:
    """A split of one parquet file of `PAIRS` that is read in place."""
    pairs = PAIRS[: sum(group_rows)]
    table = pa.table({"en": [source for source, _ in pairs], "de": [target for _, target in pairs]})
    groups = write_table(table, file, group_rows)
    shard = Shard(f"{address}{file}", file.stat().st_size, "", groups)
    return split_of([shard], TextColumns("en", "de", prefix))


def reader_of(folder: Path, splits: dict[str, Split], sampling: float = 0.0, **settings: Any) -> RowReader:
    """A reader of these splits; `settings` are those of `data`."""
    return RowReader(folder, manifest_of(splits), DataConfig(**settings), sampling, seed=5)


def manifest_of(splits: dict[str, Split]) -> Manifest:
    """A manifest of these splits, all but `validation` for training."""
    return Manifest(
        digest="",
        recipe={},
        tokenizer=TokenizerFiles(TOKENIZER, TOKENIZER, "", ""),
        source_vocabulary=200,
        target_vocabulary=200,
        pad_id=0,
        bos_id=1,
        eos_id=2,
        source_language="en",
        target_language="de",
        splits=splits,
        training=tuple(name for name in splits if name != "validation"),
    )


def request(*slices: tuple[int, ...], key: WindowKey = KEY, **options: Any) -> WindowRequest:
    """A window of slices (corpus, row group, first, last) or with the number of the pass as well."""
    return WindowRequest(key, tuple(RowSlice(*piece) for piece in slices), **options)


def as_lists(rows: TokenRows) -> list[tuple[int, list[int], list[int]]]:
    """(row id, source ids, target ids) of each row."""
    sides = (np.split(side.ids, side.starts[1:]) if len(side.lengths) else [] for side in (rows.source, rows.target))
    return [(int(r), s.tolist(), t.tolist()) for r, s, t in zip(rows.row_ids, *sides, strict=True)]


@contextmanager
def changed_bytes(path: Path, first: int, last: int) -> Iterator[None]:
    """Every byte from `first` to `last` of a file is another one; as it was when the context ends."""
    content = path.read_bytes()
    path.write_bytes(content[:first] + bytes(byte ^ 0xFF for byte in content[first:last]) + content[last:])
    yield
    path.write_bytes(content)
