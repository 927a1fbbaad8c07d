"""Reader of Parquet and Arrow files, in Arrow batches; of parquet only the wanted columns and row groups.

choose(existing columns, file) -> (source column, target column)
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from dist_transformer.config.paths import is_address
from dist_transformer.data.sources.readers import Pairs
from dist_transformer.data.sources.remote import (
    file_bytes,
    file_fingerprint,
    named_errors,
    open_binary,
    open_parquet,
    open_seekable,
    retried,
)
from dist_transformer.data.sources.tables import ChooseColumns
from dist_transformer.data.sources.text import Texts, decoded, is_text, text_column
from dist_transformer.errors import DataError

READ_ROWS = 1 << 15
ARROW_FILE_MAGIC = b"ARROW1"


@dataclass(frozen=True)
class TableGroup:
    """Rows that can be skipped together; `rows` is None if their number is unknown before they are read."""

    rows: int | None
    read: Callable[[], Iterable[pa.RecordBatch]]


@dataclass(frozen=True)
class ParquetFile:
    """Content of the footer of a parquet file, and a fingerprint of the file.

    Attributes:
        file: absolute path or address.
        rows: number of rows of each row group.
        source: name of the text column, dots reach into nested ones; `target` likewise.
    """

    file: str
    bytes: int
    rows: tuple[int, ...]
    fingerprint: str
    source: str
    target: str


class TableReader:
    """A `Reader` of tables.

    Args:
        name: name of the file or dataset, for messages.
        drop: mark invalid UTF-8 instead of refusing it.
    """

    def __init__(self, name: str, groups: Iterator[TableGroup], choose: ChooseColumns, drop: bool) -> None:
        self._name, self._groups, self._choose, self._drop = name, groups, choose, drop
        self._group: TableGroup | None = None  # the next group, if it is known to have rows
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._rest: pa.RecordBatch | None = None
        self._row = 0
        self._skipped = 0  # rows at the head of the next group, or of the one just opened

    def has_more(self) -> bool:
        with named_errors(self._name):
            while self._group is None and (self._rest is None or self._rest.num_rows == 0):
                self._rest = next(self._batches, None)
                if self._rest is None and not self._find_group():
                    return False
            return True

    def take(self, rows: int) -> Pairs:
        taken = Pairs([], [], set())
        while (left := rows - len(taken.source)) and (piece := self._piece(left)) is not None:
            before = len(taken.source)
            source, target = self._choose(column_paths(piece.schema), self._name)
            for column, side in ((source, taken.source), (target, taken.target)):
                texts, bad = self._texts(piece, column, may_be_numbers=source == target)
                side += texts
                taken.bad_encoding |= {before + position for position in bad}
            self._row += piece.num_rows
        return taken

    def skip(self, rows: int) -> int:
        """Skips rows. For a group with a known number of rows it only counts: if all are skipped, it is never read."""
        left = rows
        while left and self.has_more():
            if self._group is not None and self._group.rows is not None:
                count = min(left, self._group.rows - self._skipped)
                self._skipped += count
                if self._skipped == self._group.rows:
                    self._group, self._skipped = None, 0
            else:
                piece = self._piece(left)
                assert piece is not None
                count = piece.num_rows
            left -= count
            self._row += count
        return rows - left

    def _piece(self, rows: int) -> pa.RecordBatch | None:
        """Returns up to this many next rows; None at the end."""
        while self.has_more():
            if self._group is not None:
                group, self._group = self._group, None
                self._batches = iter(group.read())
                continue
            assert self._rest is not None
            passed = min(self._skipped, self._rest.num_rows)
            self._skipped -= passed
            piece, self._rest = self._rest.slice(passed, rows), self._rest.slice(passed + rows)
            if piece.num_rows:
                return piece
        return None

    def _find_group(self) -> bool:
        """Moves on to the next group with rows; opens a group with an unknown number. Returns False at the end."""
        group = next((group for group in self._groups if group.rows != 0), None)
        if group is not None and group.rows is None:
            self._batches = iter(group.read())
        else:
            self._group = group
        return group is not None

    def _texts(self, table: pa.RecordBatch, column: str, may_be_numbers: bool) -> tuple[Texts, list[int]]:
        values = text_column(table, column)
        if may_be_numbers and (pa.types.is_floating(values.type) or pa.types.is_integer(values.type)):
            values = values.cast(pa.large_string())
        refuse_other_type(self._name, column, values.type)
        texts, bad = decoded(values.cast(pa.large_binary()).to_pylist())  # table formats do not check that it is UTF-8
        if bad and not self._drop:
            raise DataError(
                f"{self._name}: column {column!r} is not valid UTF-8 in row {self._row + bad[0]} (from 0). Convert it, "
                "or set data.filters.bad_encoding: drop."
            )
        return texts, bad


def parquet_reader(file: str, choose: ChooseColumns, drop: bool) -> TableReader:
    """Returns a reader of a parquet file; unwanted row groups are not read."""
    with named_errors(file):
        parquet = retried(file, lambda: open_parquet(file))
    columns = list(dict.fromkeys(choose(column_paths(parquet.schema_arrow), file)))

    def group(number: int) -> TableGroup:
        rows = parquet.metadata.row_group(number).num_rows
        return TableGroup(rows, lambda: parquet.iter_batches(READ_ROWS, row_groups=[number], columns=columns))

    return TableReader(file, map(group, range(parquet.num_row_groups)), choose, drop)


def arrow_reader(file: str, choose: ChooseColumns, drop: bool) -> TableReader:
    """Returns a reader of an Arrow file of either kind: with random access, or a stream (as `datasets` writes)."""
    with named_errors(file):
        batches = _arrow_batches(file)
    return TableReader(file, iter([TableGroup(None, lambda: batches)]), choose, drop)


def count_arrow_rows(file: str) -> int:
    """Counts the rows of a local Arrow file, without reading its text."""
    with named_errors(file):
        return sum(batch.num_rows for batch in _arrow_batches(file))


def count_parquet_rows(file: str) -> int:
    """Counts the rows of a parquet file by its footer."""
    with named_errors(file):
        return int(retried(file, lambda: open_parquet(file)).metadata.num_rows)


def read_footer(file: str, choose: ChooseColumns) -> ParquetFile:
    """Reads a parquet footer; DataError if it is missing, a column is missing, or a column is not text."""
    with named_errors(file):
        parquet = retried(file, lambda: open_parquet(file))
        columns = choose(column_paths(parquet.schema_arrow), file)
        empty = parquet.schema_arrow.empty_table()
        for column in columns:
            refuse_other_type(file, column, text_column(empty, column).type)
        ends = file_fingerprint(file)
        size = retried(file, lambda: file_bytes(file))
    rows = tuple(parquet.metadata.row_group(number).num_rows for number in range(parquet.num_row_groups))
    return ParquetFile(file, size, rows, ends["ends_sha256"], *columns)


def column_paths(fields: Iterable[pa.Field], prefix: str = "") -> list[str]:
    """Returns the names of all columns with values, nested ones with dots."""
    names: list[str] = []
    for field in fields:
        name = f"{prefix}{field.name}"
        names += column_paths(list(field.type), f"{name}.") if pa.types.is_struct(field.type) else [name]
    return names


def refuse_other_type(file: str, column: str, kind: pa.DataType) -> None:
    """Raises a DataError for a column that is not text."""
    if not is_text(kind):
        raise DataError(f"{file}: column {column!r} holds {kind}, expected text. Name another in `columns`.")


def refuse_other_columns(files: list[ParquetFile]) -> None:
    """Raises a DataError if two files have other columns."""
    first, *others = files
    for other in others:
        if (other.source, other.target) != (first.source, first.target):
            raise DataError(
                f"{other.file}: has the columns {other.source} and {other.target}, but {first.file} has {first.source} "
                f"and {first.target}; the files of one corpus must be alike."
            )


def _arrow_batches(file: str) -> Iterator[pa.RecordBatch]:
    """Returns the batches of a file. A local file is mapped into memory, so that unwanted parts are not read."""
    with open_binary(file) as content:
        is_stream = content.read(len(ARROW_FILE_MAGIC)) != ARROW_FILE_MAGIC
    if is_stream:
        return iter(pa.ipc.open_stream(open_binary(file) if is_address(file) else pa.memory_map(file)))
    whole = pa.ipc.open_file(open_seekable(file) if is_address(file) else pa.memory_map(file))
    return map(whole.get_batch, range(whole.num_record_batches))
