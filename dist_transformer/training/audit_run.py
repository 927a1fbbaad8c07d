"""`data audit`: checks by the row ids in a run's audit.jsonl that no row was lost or repeated.

The plan gives the number of passes over a corpus begun up to a position, and their rows that are still to come. A row
must have been used once for each pass, less the passes in which it is still to come; in an open window, either.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dist_transformer.config.schema import Config
from dist_transformer.data.loader.partition import Planner
from dist_transformer.data.loader.position import Position, position_from_json
from dist_transformer.data.loader.row_groups import RowGroupTables, SplitPlaces, UnreadableRowGroup
from dist_transformer.data.loader.window_request import CORPUS_SHIFT, RowSlice, batch_digest
from dist_transformer.data.manifest import Manifest, Split
from dist_transformer.data.prepare.preparation import prepared_folder
from dist_transformer.errors import CheckpointError, DataError, UserError
from dist_transformer.run.folder import RunDir
from dist_transformer.run.metrics_log import read_records
from dist_transformer.training.checkpoint import checkpoints
from dist_transformer.training.checkpoint.tensor_files import STATE, read_state
from dist_transformer.training.run_data import RunData

Ints = NDArray[np.int64]
Groups = Collection[tuple[int, int]]  # (corpus, row group)
UNREADABLE = -1
"""In place of the numbers of rows that cannot be read."""


def audit_run(config: Config, run_dir: RunDir) -> None:
    """Checks the batches up to the newest checkpoint, and prints how often rows were used.

    Raises:
        UserError: the run did not record its row ids, or has no checkpoint.
        DataError: a row was lost or repeated, or a digest is not that of its rows.
    """
    if not run_dir.audit.is_file():
        raise UserError(f"{run_dir.audit}: no such file; the row ids are written by a run with data.audit=true")
    if not (saved := checkpoints.saved(run_dir)):
        raise UserError(f"{run_dir.checkpoints}: no checkpoint yet; batches are checked up to the newest one")
    try:
        state = read_state(saved[-1])
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{saved[-1] / STATE}: cannot be read ({error}); remove the checkpoint") from error
    position = position_from_json(state["position"], str(saved[-1] / STATE))
    folder = prepared_folder(config)
    data = RunData(config, folder, Manifest.load(folder))
    audit = _read(config, run_dir, data, state["batches"], position)
    problems = list(audit.problems(data.planner_of(len(position.lanes)), position))
    for line in audit.usages():
        print(line)
    if audit.wrong_digests:
        problems.append(f"the digest of step {audit.wrong_digests[0]} is not that of its rows")
    if audit.num_batches < state["batches"]:
        problems.append(f"it has {audit.num_batches} batches, {saved[-1].name} was made after {state['batches']}")
    if problems:
        raise DataError(f"{run_dir.audit}: " + "; ".join(problems))
    dropped = "; rows dropped by filters or in quarantine are not looked for" if _may_drop(config) else ""
    print(
        f"{audit.num_batches} batches up to {saved[-1].name}: every row as often as was due, none lost, none "
        f"repeated{dropped}"
    )


def _read(config: Config, run_dir: RunDir, data: RunData, num_batches: int, position: Position) -> "Audit":
    mixture = config.data.mixture
    has_weights = mixture is not None and bool(mixture.weights or mixture.schedule or mixture.temperature != 1.0)
    audit = Audit(data.folder, data.manifest, has_weights, _may_drop(config), position.ever_quarantined)
    for number, record in enumerate(islice(read_records(run_dir.audit), num_batches), start=1):
        try:
            audit.add(record)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise DataError(f"{run_dir.audit}: record {number} is not one of a batch ({error!r})") from error
    return audit


def _may_drop(config: Config) -> bool:
    return config.data.on_the_fly or config.data.on_bad_row_group == "quarantine"


class Audit:
    """Takes the records of audit.jsonl one after the other, then reports usage and problems.

    Args:
        folder: the prepared folder.
        has_weights: True if corpora are drawn by weights, so that an epoch is not one pass.
        may_drop: True if rows may be missing because they are dropped on the fly or quarantined.
        quarantined: (corpus, row group) of those that may be unreadable; DataError for any other.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, has_weights: bool, may_drop: bool, quarantined: Groups
    ) -> None:
        self._names, self._has_weights, self._may_drop = manifest.training, has_weights, may_drop
        splits = [manifest.splits[name] for name in manifest.training]
        self._rows = [_row_numbers(folder, split, corpus, quarantined) for corpus, split in enumerate(splits)]
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


def _row_numbers(folder: Path, split: Split, corpus: int, quarantined: Groups) -> Ints:
    """Returns the numbers of the rows of a corpus, in their stored order."""
    if all(shard.is_in_place for shard in split.shards):
        return np.arange(split.rows)
    places, tables, numbers = SplitPlaces(folder, split), RowGroupTables(1), [np.empty(0, np.int64)]
    for group in range(len(places)):
        place = places[group]
        try:
            numbers.append(tables.read(place, ["row_id"]).column("row_id").to_numpy())
        except UnreadableRowGroup as error:
            if (corpus, group) not in quarantined:
                raise DataError(f"{place} cannot be read ({error}); restore the file") from error
            numbers.append(np.full(place.rows, UNREADABLE))
    return np.concatenate(numbers)
