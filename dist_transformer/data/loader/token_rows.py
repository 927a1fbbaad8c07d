"""Rows of token ids from the shards that `prepare` wrote."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dist_transformer.data.loader.position import Quarantined
from dist_transformer.data.loader.row_groups import RowGroupTables, SplitPlaces, UnreadableRowGroup
from dist_transformer.data.loader.window_request import RowSlice

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class TokenColumn:
    """One side of some rows: the concatenated ids of all rows, and the length of each row."""

    ids: NDArray[np.integer[Any]]
    lengths: Ints

    @cached_property
    def starts(self) -> Ints:
        """The place of the first id of each row."""
        return np.cumsum(self.lengths) - self.lengths


@dataclass(frozen=True)
class TokenRows:
    """Some rows, and the number of rows dropped beside them by each rule (only of text tokenized on the fly).

    Attributes:
        row_ids: numbers of the rows in their corpus; of a window those of a batch (see CORPUS_SHIFT).
        quarantined: row groups left out of a window, newly or by its request.
    """

    row_ids: Ints
    source: TokenColumn
    target: TokenColumn
    dropped: Counter[str]
    quarantined: tuple[Quarantined, ...] = ()


@dataclass(frozen=True)
class TokenCorpus:
    """A split whose shards contain token ids."""

    places: SplitPlaces
    tables: RowGroupTables

    def read(self, row_group: int) -> pa.Table:
        """Reads a row group with the columns row_id, source and target; UnreadableRowGroup if it cannot be read."""
        table = self.tables.read(self.places[row_group], ["row_id", "source", "target"])
        check_column(table, "row_id", pa.types.is_integer, "integers")
        for side in ("source", "target"):
            check_column(table, side, _are_lists_of_integers, "lists of token ids")
            if any(chunk.values.null_count for chunk in table.column(side).chunks):
                raise UnreadableRowGroup(f"column {side!r} holds lists with nulls in them; expected token ids")
        return table

    def rows(self, piece: RowSlice, table: pa.Table) -> TokenRows:
        """Returns the token ids of a slice, from the table of `read`."""
        return TokenRows(row_numbers(table), _token_column(table, "source"), _token_column(table, "target"), Counter())


def check_column(table: pa.Table, name: str, is_wanted: Callable[[pa.DataType], bool], wanted: str) -> None:
    """Raises UnreadableRowGroup if a column has another type than expected, or contains nulls."""
    column = table.column(name)
    if not is_wanted(column.type) or column.null_count:
        found = f"{column.type}, {column.null_count} of them null" if column.null_count else column.type
        raise UnreadableRowGroup(f"column {name!r} holds {found}; expected {wanted}")


def _are_lists_of_integers(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) and pa.types.is_integer(kind.value_type))


def row_numbers(table: pa.Table) -> Ints:
    """Returns the numbers of the rows of `table` in their corpus."""
    return _numbers(table.column("row_id").combine_chunks()).astype(np.int64)


def _token_column(table: pa.Table, name: str) -> TokenColumn:
    lists = pa.concat_arrays(table.column(name).chunks)
    offsets = _numbers(lists.offsets)
    return TokenColumn(_numbers(lists.values)[offsets[0] : offsets[-1]], np.diff(offsets).astype(np.int64))


def _numbers(array: pa.Array) -> NDArray[np.integer[Any]]:
    """Converts without a copy, and without `to_numpy`, which imports pandas: 0.3 s and 50 MB in each process."""
    numbers: NDArray[np.integer[Any]] = np.from_dlpack(array)  # type: ignore[assignment]  # of a column of integers
    return numbers
