"""Proves from a run's audit.jsonl that every kept row was used exactly once in each pass over its corpus.

An epoch of one corpus, or of several without weights, is one pass over each: its rows must be those of the prepared
corpus, each once. With weights a corpus has a pace of its own; then the passes over it are counted through the whole run.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dist_transformer.data.manifest import Manifest, Split
from dist_transformer.data.plan import CORPUS_SHIFT, batch_digest

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Usage:
    """How often the rows of one corpus were used, in one epoch or, with weights, in the whole run.

    Attributes:
        kept: rows of the corpus; of text that is tokenized on the fly those that its filters drop are among them.
        used: rows used at least once.
        most: uses of the row that was used most.
        unknown: uses of rows that the corpus does not have.
    """

    corpus: str
    epoch: int | None
    is_complete: bool
    kept: int
    used: int
    most: int
    unknown: int

    @property
    def problem(self) -> str | None:
        """What is against the promise, or None."""
        if self.unknown:
            return f"{self.unknown} rows that the corpus does not have"
        if self.epoch is not None and self.most > 1:
            return f"a row was used {self.most} times"
        if self.epoch is not None and self.is_complete and self.used < self.kept:
            return f"{self.kept - self.used} rows were not used"
        return None


class Audit:
    """Takes the records of audit.jsonl one after the other, then says what they show.

    Args:
        folder: the prepared folder.
        has_weights: whether corpora are drawn by weights, so that an epoch is not one pass.
        may_drop: whether rows may be missing for a good reason: dropped on the fly, or in quarantine.
    """

    def __init__(self, folder: Path, manifest: Manifest, has_weights: bool, may_drop: bool) -> None:
        self._names, self._has_weights, self._may_drop = manifest.training, has_weights, may_drop
        self._rows = [_row_numbers(folder, manifest.splits[name]) for name in manifest.training]
        self._uses: dict[int, list[Ints]] = {}
        self.num_batches = 0
        self.wrong_digests: list[int] = []
        """Steps whose digest is not that of their rows."""

    def add(self, record: Mapping[str, Any]) -> None:
        """One batch."""
        lanes = {int(lane): np.asarray(rows, dtype=np.int64) for lane, rows in record["rows"].items()}
        if record["batch_digest"] != batch_digest(lanes):
            self.wrong_digests.append(record["step"])
        epoch = 0 if self._has_weights else record["epoch"]
        self._uses.setdefault(epoch, []).extend(lanes.values())
        self.num_batches += 1

    def usages(self, num_finished: int = 0) -> Iterable[Usage]:
        """By epoch and corpus. All epochs but the last are complete; it is where `num_finished` epochs ended the run."""
        for epoch in sorted(self._uses):
            rows = np.concatenate(self._uses[epoch])
            for corpus, name in enumerate(self._names):
                of_corpus = rows[rows >> CORPUS_SHIFT == corpus] & ((1 << CORPUS_SHIFT) - 1)
                is_complete = epoch < max(num_finished, *self._uses) and not self._may_drop
                shown = None if self._has_weights else epoch
                yield _usage(name, shown, is_complete, self._rows[corpus], of_corpus)


def _usage(corpus: str, epoch: int | None, is_complete: bool, kept: Ints, used: Ints) -> Usage:
    rows, counts = np.unique(used, return_counts=True)
    unknown = int(counts[~np.isin(rows, kept)].sum())
    return Usage(corpus, epoch, is_complete, len(kept), len(rows), int(counts.max(initial=0)), unknown)


def _row_numbers(folder: Path, split: Split) -> Ints:
    """The numbers of the rows of a corpus."""
    if all(shard.is_in_place for shard in split.shards):
        return np.arange(split.rows)
    columns = [pq.read_table(folder / shard.file, columns=["row_id"]).column("row_id") for shard in split.shards]
    return np.concatenate([column.to_numpy() for column in columns])
