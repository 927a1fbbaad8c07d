"""Reader of Parquet and Arrow files, in Arrow batches; of parquet only the wanted columns and row groups.

choose(existing columns, file) -> (source column, target column)
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import pyarrow as pa

from dist_transformer.config.paths import is_address
from dist_transformer.data.sources import remote
from dist_transformer.data.sources.lines import ChooseColumns
from dist_transformer.data.sources.readers import Pairs, ReaderChain
from dist_transformer.data.sources.text import Texts, decoded, is_text, text_column
from dist_transformer.errors import DataError

READ_ROWS = 1 << 15
ARROW_FILE_MAGIC = b"ARROW1"


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
    """A `Reader` of a table.

    Args:
        name: name of the file or dataset, for messages.
        drop: mark invalid UTF-8 instead of refusing it.
        rows: number of rows of a row group, which is not read if all of them are skipped; None: unknown until it is read.
        first_row: number of its first row in the file.
    """

    def __init__(
        self,
        name: str,
        batches: Iterator[pa.RecordBatch],
        choose: ChooseColumns,
        drop: bool,
        rows: int | None = None,
        first_row: int = 0,
    ) -> None:
        self._name, self._batches, self._choose, self._drop = name, batches, choose, drop
        self._rows_left, self._row = rows, first_row
        self._rest: pa.RecordBatch | None = None
        self._skipped = 0  # rows to leave out of what is read next

    def has_more(self) -> bool:
        return self._rows_left > 0 if self._rows_left is not None else self._find_rows()

    def take(self, rows: int) -> Pairs:
        if (piece := self._piece(rows)) is None:
            return Pairs([], [], set())
        names = self._choose(column_paths(piece.schema), self._name)
        sides = [self._texts(piece, name, may_be_numbers=names[0] == names[1]) for name in names]
        (source, bad_source), (target, bad_target) = sides
        self._row += piece.num_rows
        return Pairs(source, target, {*bad_source, *bad_target})

    def skip(self, rows: int) -> int:
        if self._rows_left is not None:
            count = min(rows, self._rows_left)
            self._skipped, self._rows_left = self._skipped + count, self._rows_left - count
        else:
            piece = self._piece(rows)
            count = 0 if piece is None else piece.num_rows
        self._row += count
        return count

    def _piece(self, rows: int) -> pa.RecordBatch | None:
        """Returns up to this many next rows; None at the end."""
        while self._find_rows():
            assert self._rest is not None
            passed = min(self._skipped, self._rest.num_rows)
            self._skipped -= passed
            piece, self._rest = self._rest.slice(passed, rows), self._rest.slice(passed + rows)
            if piece.num_rows:
                if self._rows_left is not None:
                    self._rows_left -= piece.num_rows
                return piece
        self._rows_left = 0
        return None

    def _find_rows(self) -> bool:
        """Reads on until there are rows. Returns False at the end."""
        with remote.named_errors(self._name):
            while self._rest is None or self._rest.num_rows == 0:
                if (batch := next(self._batches, None)) is None:
                    return False
                self._rest = batch
            return True

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


def parquet_reader(file: str, choose: ChooseColumns, drop: bool) -> ReaderChain:
    """Returns a reader of a parquet file; unwanted row groups are not read."""
    with remote.named_errors(file):
        parquet = remote.retried(file, lambda: remote.open_parquet(file))
    columns = list(dict.fromkeys(choose(column_paths(parquet.schema_arrow), file)))
    rows = [parquet.metadata.row_group(number).num_rows for number in range(parquet.num_row_groups)]

    def group(number: int, first_row: int) -> TableReader:
        batches = parquet.iter_batches(READ_ROWS, row_groups=[number], columns=columns)
        return TableReader(file, batches, choose, drop, rows[number], first_row)

    return ReaderChain(map(group, range(len(rows)), accumulate(rows, initial=0)))


def arrow_reader(file: str, choose: ChooseColumns, drop: bool) -> TableReader:
    """Returns a reader of an Arrow file of either kind: with random access, or a stream (as `datasets` writes)."""
    with remote.named_errors(file):
        return TableReader(file, _arrow_batches(file), choose, drop)


def count_arrow_rows(file: str) -> int:
    """Counts the rows of a local Arrow file, without reading its text."""
    with remote.named_errors(file):
        return sum(batch.num_rows for batch in _arrow_batches(file))


def count_parquet_rows(file: str) -> int:
    """Counts the rows of a parquet file by its footer."""
    with remote.named_errors(file):
        return int(remote.retried(file, lambda: remote.open_parquet(file)).metadata.num_rows)


def read_footer(file: str, choose: ChooseColumns) -> ParquetFile:
    """Reads a parquet footer; DataError if it is missing, a column is missing, or a column is not text."""
    with remote.named_errors(file):
        parquet = remote.retried(file, lambda: remote.open_parquet(file))
        columns = choose(column_paths(parquet.schema_arrow), file)
        empty = parquet.schema_arrow.empty_table()
        for column in columns:
            refuse_other_type(file, column, text_column(empty, column).type)
        found = remote.file_fingerprint(file)
    rows = tuple(parquet.metadata.row_group(number).num_rows for number in range(parquet.num_row_groups))
    return ParquetFile(file, found["bytes"], rows, found["ends_sha256"], *columns)


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
    with remote.open_binary(file) as content:
        is_stream = content.read(len(ARROW_FILE_MAGIC)) != ARROW_FILE_MAGIC
    if is_stream:
        return iter(pa.ipc.open_stream(remote.open_binary(file) if is_address(file) else pa.memory_map(file)))
    whole = pa.ipc.open_file(remote.open_seekable(file) if is_address(file) else pa.memory_map(file))
    return map(whole.get_batch, range(whole.num_record_batches))
