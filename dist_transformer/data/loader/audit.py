"""Checks by a run's audit.jsonl that no row was lost or repeated: every row was used as often as planned.

The plan gives the number of passes over a corpus begun up to a position, and their rows that are still to come. A row
must have been used once for each pass, less the passes in which it is still to come; in an open window, either.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dist_transformer.data.loader.partition import Planner
from dist_transformer.data.loader.position import Position
from dist_transformer.data.loader.row_groups import RowGroupTables, SplitPlaces, UnreadableRowGroup
from dist_transformer.data.loader.window_request import CORPUS_SHIFT, RowSlice, batch_digest
from dist_transformer.data.manifest import Manifest, Split
from dist_transformer.errors import DataError

Ints = NDArray[np.int64]
Groups = Collection[tuple[int, int]]  # (corpus, row group)
UNREADABLE = -1
"""In place of the numbers of rows that cannot be read."""


class Audit:
    """Takes the records of audit.jsonl one after the other, then reports usage and problems.

    Args:
        folder: the prepared folder.
        has_weights: True if corpora are drawn by weights, so that an epoch is not one pass.
        may_drop: True if rows may be missing because they are dropped on the fly or quarantined.
        without: (corpus, row group) of those that may be unreadable; DataError for any other.
    """

    def __init__(self, folder: Path, manifest: Manifest, has_weights: bool, may_drop: bool, without: Groups) -> None:
        self._names, self._has_weights, self._may_drop = manifest.training, has_weights, may_drop
        splits = [manifest.splits[name] for name in manifest.training]
        self._rows = [_row_numbers(folder, split, corpus, without) for corpus, split in enumerate(splits)]
        self._uses: dict[int, list[Ints]] = {}
        self.num_batches = 0
        self.wrong_digests: list[int] = []
        """Steps whose recorded digest differs from the digest of their rows."""

    def add(self, record: Mapping[str, Any]) -> None:
        """Adds the record of one batch."""
        lanes = {int(lane): np.asarray(rows, dtype=np.int64) for lane, rows in record["rows"].items()}
        if record["batch_digest"] != batch_digest(lanes):
            self.wrong_digests.append(record["step"])
        self._uses.setdefault(0 if self._has_weights else record["epoch"], []).extend(lanes.values())
        self.num_batches += 1

    def usages(self) -> Iterator[str]:
        """Yields a line on the rows of each corpus that were used in each epoch; with weights, in the whole run."""
        for epoch in sorted(self._uses):
            used = _rows_by_corpus(self._uses[epoch], len(self._names))
            when = "whole run" if self._has_weights else f"epoch {epoch}"
            for corpus, name in enumerate(self._names):
                rows, counts = np.unique(used[corpus], return_counts=True)
                most = int(counts.max(initial=0))
                times = "each once" if most == 1 else f"at most {most} times each"
                yield f"{when}, {name}: {len(rows):,} of {len(self._rows[corpus]):,} rows, {times}"

    def problems(self, planner: Planner, position: Position) -> Iterator[str]:
        """Yields the differences from the plan at `position`, which the batches added so far must have led to."""
        cut = planner.repartition(position.partition, position.lanes, 0, len(position.lanes))
        rows = _rows_by_corpus([lane for lanes in self._uses.values() for lane in lanes], len(self._names))
        for corpus, name in enumerate(self._names):
            used, kept = rows[corpus], self._rows[corpus]
            known = np.isin(used, kept)
            if not known.all() and UNREADABLE not in kept:
                yield f"{name}: {np.count_nonzero(~known)} rows that the corpus does not have"
            counts = np.bincount(_places(kept, used[known]), minlength=len(kept))
            stream, starts = cut.streams[corpus], np.cumsum([0, *planner.group_rows[corpus]])
            to_come = planner.slices(corpus, iter(stream.pending))
            opened = (s for ws in cut.open_windows for w in ws for s in w.request.slices if s.corpus == corpus)
            most = stream.next_pass - _counted(to_come, starts)
            least = most - _counted(opened, starts)
            if repeated := np.count_nonzero(counts > most):
                yield f"{name}: {repeated} rows were used more often than was due"
            if not self._may_drop and (lost := np.count_nonzero(counts < least)):
                yield f"{name}: {lost} rows were used less often than was due"


def _rows_by_corpus(batches: Iterable[Ints], num_corpora: int) -> list[Ints]:
    """Returns the numbers of the rows of each corpus, ascending."""
    rows = np.sort(np.concatenate([np.empty(0, np.int64), *batches]))
    parts = np.split(rows, np.searchsorted(rows, np.arange(num_corpora + 1) << CORPUS_SHIFT))[1:-1]
    return [part & ((1 << CORPUS_SHIFT) - 1) for part in parts]


def _places(kept: Ints, used: Ints) -> Ints:
    """Returns the places of the rows of these numbers in the stored order of the corpus."""
    order: Ints = np.argsort(kept)
    return order[np.searchsorted(kept, used, sorter=order)]


def _counted(slices: Iterable[RowSlice], starts: Ints) -> Ints:
    """Counts the occurrences of each row of a corpus in these slices."""
    counts = np.zeros(int(starts[-1]), dtype=np.int64)
    for piece in slices:
        start = int(starts[piece.row_group])
        counts[start + piece.first : start + piece.last] += 1
    return counts


def _row_numbers(folder: Path, split: Split, corpus: int, without: Groups) -> Ints:
    """Returns the numbers of the rows of a corpus, in their stored order."""
    if all(shard.is_in_place for shard in split.shards):
        return np.arange(split.rows)
    places, tables, numbers = SplitPlaces(folder, split), RowGroupTables(1), [np.empty(0, np.int64)]
    for group in range(len(places)):
        place = places[group]
        try:
            numbers.append(tables.read(place, ["row_id"]).column("row_id").to_numpy())
        except UnreadableRowGroup as error:
            if (corpus, group) not in without:
                raise DataError(f"{place} cannot be read ({error}); restore the file") from error
            numbers.append(np.full(place.rows, UNREADABLE))
    return np.concatenate(numbers)
