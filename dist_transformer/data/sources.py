"""Reads any corpus in order, in batches of text: aligned files, tables, Hub datasets, the demonstration corpus.

The only door to Hugging Face `datasets`, which reads tables and Hub datasets as a stream of Arrow batches. Its
`shuffle` is never used: a stopped and resumed shuffled stream loses and repeats rows; `prepare` shuffles.
"""

import glob
import itertools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dist_transformer.config.data_models import CorpusConfig, DataConfig
from dist_transformer.data.corpus_files import corpus_name, existing_corpus_files, table_kind
from dist_transformer.data.demo_corpus import PAIRS_OF_SPLIT, DemoSplit, demo_pairs
from dist_transformer.data.text_files import is_utf8, read_aligned, read_tsv, scan_aligned, scan_file
from dist_transformer.errors import DataError

REPLACEMENT_CHARACTER = "\ufffd"


@dataclass(frozen=True)
class RawBatch:
    """Consecutive pairs of a corpus; a side is None where the table holds none.

    Attributes:
        first_row: row number of the first pair in the corpus, from 0.
        bad_encoding: positions in the batch of pairs that are not valid UTF-8 (only where these are dropped).
    """

    first_row: int
    source: list[str | None]
    target: list[str | None]
    bad_encoding: frozenset[int] = frozenset()


def read_corpus(corpus: CorpusConfig, data: DataConfig, batch_rows: int) -> Iterator[RawBatch]:
    """The pairs of a corpus in order, `batch_rows` at a time (fewer in the last batch).

    DataError for a missing or damaged file, an unknown Hub dataset, a missing column or a corpus without any row.
    """
    first_row = 0
    for source, target, bad_encoding in _batches(corpus, data, batch_rows):
        yield RawBatch(first_row, source, target, bad_encoding)
        first_row += len(source)
    if first_row == 0:
        raise DataError(f"{corpus_name(corpus, data)}: the corpus is empty; expected at least one pair of sentences.")


def scan_corpus(corpus: CorpusConfig, data: DataConfig) -> int | None:
    """Reads local text files once, before anything is made of them; returns the rows, None where they are not known.

    DataError for a missing or damaged file, sides of unequal length, and invalid UTF-8 unless it is to be dropped.
    Rows of a csv are counted by line: too many where quoted fields hold line ends.
    """
    refuse = data.filters.bad_encoding == "raise"
    files = existing_corpus_files(corpus, data)
    if corpus.demo:
        return PAIRS_OF_SPLIT[corpus.demo]
    if corpus.source and corpus.target:
        return scan_aligned(files[0], files[1], refuse)
    if not corpus.path:
        return None
    if table_kind(files[0]) == "parquet":
        with _named_errors(corpus_name(corpus, data)):
            return int(pq.read_metadata(files[0]).num_rows)
    return scan_file(files[0], refuse)


Columns = tuple[list[str | None], list[str | None], frozenset[int]]
"""Source side, target side, positions of badly encoded pairs."""
RawColumns = tuple[Sequence[bytes | None], Sequence[bytes | None]]


def _batches(corpus: CorpusConfig, data: DataConfig, batch_rows: int) -> Iterator[Columns]:
    files = existing_corpus_files(corpus, data)
    if corpus.demo:
        return _demo_batches(corpus.demo, batch_rows)
    if corpus.source and corpus.target:
        return _text_batches(read_aligned(files[0], files[1], batch_rows), files, data)
    if corpus.path and table_kind(files[0]) == "tsv":
        return _text_batches(read_tsv(files[0], corpus.columns or ("0", "1"), batch_rows), files, data)
    return _table_batches(corpus, data, batch_rows)


def _demo_batches(split: DemoSplit, batch_rows: int) -> Iterator[Columns]:
    pairs = demo_pairs(split)
    while batch := list(itertools.islice(pairs, batch_rows)):
        yield [source for source, _ in batch], [target for _, target in batch], frozenset()


def _text_batches(batches: Iterator[RawColumns], files: list[Path], data: DataConfig) -> Iterator[Columns]:
    """Decodes; bad bytes are named by a scan of the files when they are refused."""
    for source, target in batches:
        pairs = enumerate(zip(source, target, strict=True))
        bad = frozenset(i for i, pair in pairs if not all(line is None or is_utf8(line) for line in pair))
        if bad and data.filters.bad_encoding == "raise":
            for path in files:
                scan_file(path, refuse_bad_encoding=True)
        yield _decoded(source), _decoded(target), bad


def _decoded(lines: Sequence[bytes | None]) -> list[str | None]:
    return [line if line is None else line.decode("utf-8", errors="replace") for line in lines]


def _table_batches(corpus: CorpusConfig, data: DataConfig, batch_rows: int) -> Iterator[Columns]:
    drop = data.filters.bad_encoding == "drop"
    name = corpus_name(corpus, data)
    for table in _tables(corpus, data, batch_rows, name):
        source_column, target_column = _column_names(corpus, data, table, name)
        source = _strings(table, source_column, name, drop)
        target = _strings(table, target_column, name, drop)
        bad = frozenset(_positions_of_replaced(source, target)) if drop and corpus.path else frozenset()
        yield source, target, bad


def _tables(corpus: CorpusConfig, data: DataConfig, batch_rows: int, name: str) -> Iterator[pa.Table]:
    """Arrow tables of `batch_rows` rows, through `datasets`."""
    with _named_errors(name):
        dataset = _open_path(corpus, data) if corpus.path else _open_hub(corpus)
        yield from dataset.with_format("arrow").iter(batch_size=batch_rows)


def _open_hub(corpus: CorpusConfig) -> Any:
    datasets = _import_datasets()
    return datasets.load_dataset(
        corpus.hub, corpus.subset, split=corpus.split, revision=corpus.revision, streaming=True
    )


def _open_path(corpus: CorpusConfig, data: DataConfig) -> Any:
    datasets = _import_datasets()
    (path,) = existing_corpus_files(corpus, data)
    kind = table_kind(path)
    builder = "json" if kind == "jsonl" else kind
    options = _reader_options(kind, corpus, data)
    # `datasets` takes file names for patterns, so the magic characters in a real name are escaped.
    return datasets.load_dataset(builder, data_files=glob.escape(str(path)), split="train", streaming=True, **options)


def _reader_options(kind: str, corpus: CorpusConfig, data: DataConfig) -> dict[str, Any]:
    """Options of the csv and json readers of `datasets`."""
    drop = data.filters.bad_encoding == "drop"
    if kind == "jsonl":
        # Another spelling than "utf-8" makes the reader decode with `encoding_errors` at all.
        return {"encoding": "utf_8", "encoding_errors": "replace"} if drop else {}
    if kind == "parquet":
        return {}
    # Converters keep every cell the text it is: "12" no number, "NA" and "null" no missing value.
    return {
        "converters": dict.fromkeys(_wanted_columns(corpus, data), str),
        "keep_default_na": False,
        "skip_blank_lines": False,
        # Of pandas' parsers only the slower one heeds `encoding_errors` where there are converters.
        **({"engine": "python", "encoding_errors": "replace"} if drop else {}),
    }


def _wanted_columns(corpus: CorpusConfig, data: DataConfig) -> tuple[str, str]:
    return corpus.columns or (data.source_language, data.target_language)


def _column_names(corpus: CorpusConfig, data: DataConfig, table: pa.Table, name: str) -> tuple[str, str]:
    """The columns to read; DataError names those that exist when they are not among them."""
    wanted = _wanted_columns(corpus, data)
    nested = (f"translation.{wanted[0]}", f"translation.{wanted[1]}")
    existing = _paths_of_columns(table.schema)
    candidates = [wanted] if corpus.columns else [wanted, nested]
    for pair in candidates:
        if all(column in existing for column in pair):
            return pair
    missing = [column for column in wanted if column not in existing]
    raise DataError(
        f"{name}: no column {' and no column '.join(map(repr, missing))}; there are {', '.join(existing)}. "
        f"Name the source and the target column in `columns`, e.g. columns: [{existing[0]}, {existing[-1]}]."
    )


def _paths_of_columns(fields: Iterable[pa.Field], prefix: str = "") -> list[str]:
    """Names of all columns that hold values, nested ones with dots."""
    names: list[str] = []
    for field in fields:
        name = f"{prefix}{field.name}"
        names += _paths_of_columns(list(field.type), f"{name}.") if pa.types.is_struct(field.type) else [name]
    return names


def _strings(table: pa.Table, column: str, name: str, drop: bool) -> list[str | None]:
    """The texts of a column; bytes that are not UTF-8 (parquet checks none) are replaced if `drop`, else refused."""
    head, *rest = [column] if column in table.column_names else column.split(".")
    values = table.column(head)
    for field in rest:
        values = pc.struct_field(values, field)
    is_text = pa.types.is_string(values.type) or pa.types.is_large_string(values.type) or pa.types.is_null(values.type)
    if not is_text:
        raise DataError(f"{name}: column {column!r} holds {values.type}, expected text. Name another in `columns`.")
    try:
        texts: list[str | None] = values.to_pylist()
    except UnicodeDecodeError as error:
        if not drop:
            raise DataError(
                f"{name}: column {column!r} is not valid UTF-8 ({error.reason}). Convert it, or set "
                "data.filters.bad_encoding: drop."
            ) from None
        texts = _decoded(values.cast(pa.large_binary()).to_pylist())
    return texts


def _positions_of_replaced(source: list[str | None], target: list[str | None]) -> Iterator[int]:
    for position, pair in enumerate(zip(source, target, strict=True)):
        if any(text is not None and REPLACEMENT_CHARACTER in text for text in pair):
            yield position


@contextmanager
def _named_errors(name: str) -> Iterator[None]:
    """Whatever a reader finds wrong with the corpus becomes a DataError that names it."""
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # what its client raises of the network

    try:
        yield
    except (OSError, EOFError, ValueError, zlib.error, DatasetsError, HfHubHTTPError, httpx.HTTPError) as error:
        raise DataError(f"{name}: cannot be read: {type(error).__name__}: {error}") from error


def _import_datasets() -> Any:
    """`datasets`, silenced: its progress bars and log lines repeat what our own messages say."""
    import datasets

    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    return datasets
