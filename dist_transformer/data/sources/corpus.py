"""Reads any corpus in order, in batches of text: aligned files, tables, Hub datasets, the demonstration corpus.

The only adapter of Hugging Face `datasets`, which reads Hub datasets as a stream of Arrow batches; docs/architecture.md says
why it shuffles nothing, and why files of all formats are read here.
"""

import json
import os
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dist_transformer.config.data_schema import CorpusConfig, DataConfig
from dist_transformer.config.paths import is_address
from dist_transformer.data.sources import arrow, lines
from dist_transformer.data.sources.demo_corpus import PAIRS_OF_SPLIT, demo_pairs
from dist_transformer.data.sources.files import corpus_name, find_corpus_files, for_each_file, table_kind
from dist_transformer.data.sources.readers import PairReader, Reader, ReaderChain
from dist_transformer.data.sources.remote import named_errors, retried_remote
from dist_transformer.data.sources.text import Texts, normalized, tag_prefix, tagged
from dist_transformer.errors import DataError
from dist_transformer.plugins import ReadPairs, call, find

TABLE_BATCH_ROWS, HUB_COMMIT_DIGITS = 4096, 40
ONE_SCORE = "expected a number a line, one for each pair, in the same order"


@dataclass(frozen=True)
class RawBatch:
    """Consecutive pairs of a corpus, normalized and tagged; a side is None where the table has none.

    Attributes:
        first_row: row number of the first pair in the corpus, from 0.
        bad_encoding: positions in the batch of pairs that are not valid UTF-8 (only where these are dropped).
        prefix: the tags that source sentences begin with.
        scores: quality scores of the pairs by column or file, as far as asked for.
    """

    first_row: int
    source: Texts
    target: Texts
    bad_encoding: frozenset[int] = frozenset()
    prefix: str = ""
    scores: dict[str, NDArray[np.float64]] = field(default_factory=dict)


def read_corpus(
    corpus: CorpusConfig,
    data: DataConfig,
    batch_rows: int,
    wanted: Callable[[int], bool] = lambda first_row: True,
    scores: Iterable[str] = (),
) -> Iterator[RawBatch]:
    """Yields the pairs of a corpus in order, `batch_rows` at a time (fewer in the last batch). Raises DataError: a
    missing or damaged file, an unknown Hub dataset, a missing column, a corpus without any row, a score that is no
    number, more or fewer scores than pairs.

    Args:
        wanted: called once for each batch, with the number of its first row, before it is decoded; if it returns False
            the batch is skipped as cheaply as the source allows.
        scores: columns of quality scores in a table, or files of them beside text files.
    """
    readers = ReaderChain(_readers(corpus, data))
    columns = {name: ReaderChain(_score_readers(corpus, data, name)) for name in scores}
    table = "" if corpus.source else f"{corpus_name(corpus, data)}: column "
    first_row, prefix = 0, tag_prefix(corpus.tags)
    while readers.has_more():
        if wanted(first_row):
            pairs = readers.take(batch_rows)
            count = len(pairs.source)
            values = {name: _taken_scores(table, name, chain, first_row, count) for name, chain in columns.items()}
            source = tagged(normalized(pairs.source, data.normalization), prefix)
            target = normalized(pairs.target, data.normalization)
            yield RawBatch(first_row, source, target, frozenset(pairs.bad_encoding), prefix, values)
        else:
            count = readers.skip(batch_rows)
            for chain in columns.values():
                chain.skip(count)
        first_row += count
    for name, chain in columns.items():
        if chain.has_more():
            raise DataError(f"{name}: more lines than {corpus_name(corpus, data)} has pairs, {first_row}; {ONE_SCORE}")
    if first_row == 0:
        raise DataError(f"{corpus_name(corpus, data)}: the corpus is empty; expected at least one pair of sentences.")


def read_pairs(corpus: CorpusConfig, data: DataConfig, most: int | None = None) -> tuple[list[str], list[str]]:
    """Reads both sides of a corpus, or of its first `most` pairs; drops no pair, and returns "" for a missing side.

    Raises the errors of `read_corpus`.
    """
    batches = read_corpus(corpus, data, TABLE_BATCH_ROWS)
    pairs = (pair for batch in batches for pair in zip(batch.source, batch.target, strict=True))
    kept = list(islice(pairs, most))
    return [source or "" for source, _ in kept], [target or "" for _, target in kept]


def scan_corpus(
    corpus: CorpusConfig, data: DataConfig, progress: Callable[[int], None] = lambda number: None
) -> int | None:
    """Reads local text files once, before the preparation; returns the number of rows, None if it is unknown.

    DataError for a missing or damaged file, sides of unequal length, and invalid UTF-8 unless it is to be dropped.
    Rows of a csv are counted by line: too many if quoted fields contain line ends. Remote text is not scanned.
    """
    refuse = data.filters_of(corpus).bad_encoding == "raise"
    files = find_corpus_files(corpus, data)
    if corpus.demo:
        return PAIRS_OF_SPLIT[corpus.demo]
    if files.source:
        if any(map(is_address, files.every())):
            return None
        return sum(lines.scan_aligned(*pair, refuse, progress) for pair in zip(files.source, files.target, strict=True))
    counts: list[int | None] = [*for_each_file(arrow.count_parquet_rows, _hub_files(corpus) if corpus.hub else ())]
    counts += [_scan_table(file, corpus, data, progress) for file in files.path]
    return sum(count or 0 for count in counts) if counts and None not in counts else None


def parquet_index(corpus: CorpusConfig, data: DataConfig) -> list[arrow.ParquetFile] | None:
    """Returns the parquet files of a corpus, by their footers; None for other formats, which have no row groups.

    DataError for a missing or damaged file and for a missing column.
    """
    files = _hub_files(corpus) if corpus.hub else find_corpus_files(corpus, data).path
    if not files or any(table_kind(file) != "parquet" for file in files):
        return None
    choose = _column_chooser(corpus, data)
    absolute = [file if is_address(file) else os.path.abspath(file) for file in files]
    index = for_each_file(lambda file: arrow.read_footer(file, choose), absolute)
    arrow.refuse_other_columns(index)
    return index


def hub_commits(corpora: Iterable[CorpusConfig]) -> dict[str, str]:
    """Returns the commits that datasets have on the Hub now, offline those of their copies, by id@revision.

    Raises the errors of `read_corpus`. A folder has none.
    """
    found = {f"{each.hub}@{each.revision}": str(_hub_builder(each).hash) for each in corpora if each.hub}
    return {key: commit for key, commit in found.items() if len(commit) == HUB_COMMIT_DIGITS}


def _scan_table(file: str, corpus: CorpusConfig, data: DataConfig, progress: Callable[[int], None]) -> int | None:
    kind = table_kind(file)
    if kind == "parquet":
        return arrow.count_parquet_rows(file)
    if is_address(file):
        return None
    if kind == "arrow":
        return arrow.count_arrow_rows(file)
    count = lines.scan_file(file, data.filters_of(corpus).bad_encoding == "raise", progress)
    by_name = corpus.columns and not all(column.isdecimal() for column in corpus.columns)
    has_header = kind == "csv" or (kind == "tsv" and by_name)
    return max(0, count - 1) if has_header else count


def _readers(corpus: CorpusConfig, data: DataConfig) -> Iterator[Reader]:
    files = find_corpus_files(corpus, data)
    drop = data.filters_of(corpus).bad_encoding == "drop"
    of_hub = _hub_files(corpus) if corpus.hub else ()
    if corpus.demo:
        yield _reader_of(demo_pairs(corpus.demo))
    elif corpus.plugin:
        yield _plugin_reader(corpus.plugin, drop)
    elif corpus.hub and not of_hub:
        name, choose = corpus_name(corpus, data), _column_chooser(corpus, data)
        yield arrow.TableReader(name, _hub_tables(corpus, name, choose), choose, drop)
    for source, target in zip(files.source, files.target, strict=True):
        yield lines.aligned_reader(source, target, drop)
    for file in (*files.path, *of_hub):  # parquet of the Hub too: its row groups are skipped unread
        yield _table_reader(file, corpus, data)


def _score_readers(corpus: CorpusConfig, data: DataConfig, name: str) -> Iterator[Reader]:
    """Yields readers of quality scores, on both sides of their pairs."""
    table = corpus.model_copy(update={"columns": (name, name)})  # where both are one, it may hold numbers
    yield from _readers(CorpusConfig(source=name, target=name) if corpus.source else table, data)


def _taken_scores(table: str, name: str, chain: ReaderChain, first_row: int, count: int) -> NDArray[np.float64]:
    values: list[float] = []
    texts, empty = chain.take(count).source, "nan" if table else ""  # an empty line of a file is an error
    try:
        values += (float(text or empty) for text in texts)
    except ValueError:
        at, text = first_row + len(values) + 1, texts[len(values)]
        raise DataError(f"{table}{name}: score {at} is {text!r}; {ONE_SCORE}") from None
    if len(values) < count:
        raise DataError(f"{name}: ends after {first_row + len(values)} scores, but there are more pairs; {ONE_SCORE}")
    return np.array(values)


def _plugin_reader(given: str, drop: bool) -> PairReader[tuple[str, str]]:
    plugin = find("data", given)
    read: ReadPairs = plugin.load()
    pairs, ended = call(plugin, lambda: iter(read())), ("", "")

    def checked() -> Iterator[tuple[str, str]]:
        number = 0
        while (pair := call(plugin, lambda: next(pairs, ended))) is not ended:
            number += 1
            if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(side, str) for side in pair)):
                raise DataError(f"{given}: pair {number} is {pair!r}, expected a tuple of two strings; mend it")
            yield pair

    return _reader_of(checked(), None if drop else f"{given}: pair ")


def _reader_of(items: Iterator[tuple[str, str]], refused_at: str | None = None) -> PairReader[tuple[str, str]]:
    return PairReader(items, lambda first, pairs: lines.valid_pairs(pairs, refused_at, first))


def _table_reader(file: str, corpus: CorpusConfig, data: DataConfig) -> Reader:
    drop = data.filters_of(corpus).bad_encoding == "drop"
    kind = table_kind(file)
    if kind == "tsv":
        return lines.tsv_reader(file, corpus.columns or ("0", "1"), drop)
    readers: dict[str, Callable[..., Reader]] = {
        "csv": lines.csv_reader,
        "jsonl": lines.jsonl_reader,
        "parquet": arrow.parquet_reader,
        "arrow": arrow.arrow_reader,
    }
    return readers[kind](file, _column_chooser(corpus, data), drop)


def _column_chooser(corpus: CorpusConfig, data: DataConfig) -> lines.ChooseColumns:
    wanted = corpus.columns or data.languages_of(corpus)
    nested = (f"translation.{wanted[0]}", f"translation.{wanted[1]}")
    candidates = [wanted] if corpus.columns else [wanted, nested]

    def choose(existing: list[str], name: str) -> lines.ColumnNames:
        for pair in candidates:
            if all(column in existing for column in pair):
                if twice := [column for column in pair if existing.count(column) > 1]:
                    raise DataError(f"{name}: {existing.count(twice[0])} columns are named {twice[0]!r}; rename them.")
                return pair
        missing = [column for column in wanted if column not in existing]
        example = existing[:1] + existing[-1:] or ["source", "target"]
        raise DataError(
            f"{name}: no column {' and no column '.join(map(repr, missing))}; there are {', '.join(existing) or 'none'}. "
            f"Name source and target, e.g. columns: {json.dumps(example, ensure_ascii=False)}, for `init` --columns "
            f"{shlex.join(example)}."
        )

    return choose


def _hub_tables(corpus: CorpusConfig, name: str, choose: lines.ChooseColumns) -> Iterator[Any]:
    builder = _hub_builder(corpus)
    dataset = retried_remote(name, lambda: builder.as_streaming_dataset(corpus.split)).with_format("arrow")
    first = next(iter(dataset), None) if builder.name == "csv" else None  # pandas takes NA for no text, 0123 for 123
    if first and len({*choose(first.column_names, name)}) > 1:  # but scores may be NA
        keys = [*first.column_names, *(int(key) for key in first.column_names if key.isdecimal())]  # of header: null
        builder.config.converters = dict.fromkeys(keys, str)
        builder.config.na_filter, builder.info.features = False, None
        dataset = retried_remote(name, lambda: builder.as_streaming_dataset(corpus.split)).with_format("arrow")
    yield from dataset.iter(batch_size=TABLE_BATCH_ROWS)


def _hub_files(corpus: CorpusConfig) -> tuple[str, ...]:
    """Returns the files of a split if a Hub dataset consists of parquet files; else none."""
    files = (builder := _hub_builder(corpus)).config.data_files or {}
    return tuple(files.get(corpus.split, ())) if builder.name == "parquet" else ()


def _hub_builder(corpus: CorpusConfig) -> Any:
    """Asks the Hub for a dataset, with retries unless it says that there is none."""
    import datasets

    datasets.disable_progress_bars()  # they and the log lines repeat our own messages
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    name = f"{corpus.hub} ({corpus.split})"

    def ask() -> Any:
        try:
            return datasets.load_dataset_builder(str(corpus.hub), corpus.subset, revision=corpus.revision)
        except FileNotFoundError as error:
            raise DataError(f"{name}: cannot be read: {type(error).__name__}: {error}") from error

    with named_errors(name):
        return retried_remote(name, ask)
