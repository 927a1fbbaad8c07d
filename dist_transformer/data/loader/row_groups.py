"""Locations of the row groups of a split, and reading of row groups, with retries if the disk or the network fails."""

import logging
from array import array
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dist_transformer.config.paths import is_address
from dist_transformer.data.manifest import Shard, Split
from dist_transformer.data.sources.arrow import column_paths
from dist_transformer.data.sources.remote import open_parquet
from dist_transformer.data.sources.retries import is_outage, read_errors, reason_of, with_retries
from dist_transformer.errors import DataError

OPEN_FILES, MOST_CORPORA = 64, 512  # within the usual limit of 1,024 open files
log = logging.getLogger(__name__)


class UnreadableRowGroup(Exception):
    """A row group cannot be read, or its content is not as expected; the text is the reason. `is_outage`: the disk or the
    network failed, so that it may be readable later; else the file is bad."""

    def __init__(self, reason: str, is_outage: bool = False) -> None:
        super().__init__(reason)
        self.is_outage = is_outage


@dataclass(frozen=True)
class RowGroupPlace:
    """One row group of a split.

    Attributes:
        file: path or address.
        index: its index in the file.
        first_row: index in the split of its first row.
    """

    file: str
    shard: Shard
    index: int
    rows: int
    first_row: int

    def __str__(self) -> str:
        return f"row group {self.index} of {self.file}"


class SplitPlaces:
    """Locations of a split's row groups, by their number in the split."""

    def __init__(self, folder: Path, split: Split) -> None:
        self._folder, self._shards = folder, split.shards
        self._first_groups = [0, *accumulate(len(shard.row_groups) for shard in split.shards)]
        self._first_rows = array("q", accumulate((group.rows for group in split.row_groups), initial=0))

    def __len__(self) -> int:
        return self._first_groups[-1]

    def __getitem__(self, row_group: int) -> RowGroupPlace:
        number = bisect_right(self._first_groups, row_group) - 1
        shard, index = self._shards[number], row_group - self._first_groups[number]
        file = shard.file if shard.is_in_place else str(self._folder / shard.file)
        return RowGroupPlace(file, shard, index, shard.row_groups[index].rows, self._first_rows[row_group])


class RowGroupTables:
    """Reads row groups as tables. Keeps the newest files open, one a corpus or more; a copy elsewhere opens its own."""

    def __init__(self, num_corpora: int) -> None:
        self._num_corpora, self._open = num_corpora, OrderedDict[str, pq.ParquetFile]()

    def __reduce__(self) -> tuple[type["RowGroupTables"], tuple[int]]:
        return type(self), (self._num_corpora,)

    def read(self, place: RowGroupPlace, columns: list[str]) -> pa.Table:
        """Reads columns (dots reach into nested ones) of a row group. UnreadableRowGroup: it is damaged; DataError: replaced."""
        warn = partial(log.warning, "%s: row group %d: %s", place.file, place.index)
        try:
            table = with_retries(lambda: self._read_once(place, columns), warn)
        except read_errors() as error:
            raise UnreadableRowGroup(reason_of(error), is_outage(error)) from error
        if table.num_rows != place.rows:
            raise UnreadableRowGroup(f"it has {table.num_rows} rows, the manifest says {place.rows}")
        return table

    def _read_once(self, place: RowGroupPlace, columns: list[str]) -> pa.Table:
        try:
            file = self._file(place.file, place.shard.bytes)
            if place.index >= file.num_row_groups:
                raise UnreadableRowGroup(f"the file has {file.num_row_groups} row groups")
            there = column_paths(file.schema_arrow)
            if missing := [name for name in columns if name not in there]:
                text = " and no column ".join(map(repr, missing))
                raise UnreadableRowGroup(f"no column {text}, only {file.schema_arrow.names}")
            return file.read_row_group(place.index, columns=columns, use_threads=False)
        except read_errors():
            self._open.pop(place.file, None)  # the next attempt opens the file anew
            raise

    def _file(self, name: str, size: int) -> pq.ParquetFile:
        if (file := self._open.pop(name, None)) is None:
            file = open_parquet(name)
            if not is_address(name) and (now := Path(name).stat().st_size) != size:
                raise DataError(
                    f"{name}: expected the file of {size} bytes that was prepared, got one of {now}: the corpus was replaced; "
                    "put it back (a pipeline keeps it beside the new one, as corpus.1), or give the run another run.name"
                )
        self._open[name] = file
        if len(self._open) > OPEN_FILES + min(self._num_corpora, MOST_CORPORA):
            self._open.popitem(last=False)
        return file
