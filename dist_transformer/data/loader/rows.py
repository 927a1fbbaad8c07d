"""Reads the rows of a window: slices of row groups, as token ids; text is tokenized on the way.

A row group that cannot be read is tried again. After that it ends the run, or is left out of the
window and named in what is returned (`data.on_bad_row_group`). It is always the whole row group that is left out, so
that all windows that share it do the same.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from dist_transformer.config.data_schema import DataConfig
from dist_transformer.data.loader.row_groups import BadRowGroup, RowGroupPlace, RowGroupTables, SplitPlaces
from dist_transformer.data.loader.text_rows import Sampler, TextCorpus
from dist_transformer.data.loader.token_rows import Ints, TokenColumn, TokenCorpus, TokenRows
from dist_transformer.data.loader.window_request import CORPUS_SHIFT, RowSlice, WindowRequest, order_probe
from dist_transformer.data.manifest import Manifest, Split
from dist_transformer.errors import DataError, MachineError, UserError

Groups = dict[tuple[int, int], pa.Table]
"""By (corpus, row group)."""
LEFT_OUT_BEFORE = "left out before"
"""The reason of a row group that the request leaves out."""


@dataclass(frozen=True)
class Rows:
    """Sentence pairs as token ids: side i of row r is `ids[offsets[r]:offsets[r + 1]]`."""

    row_ids: Ints
    source_ids: Ints
    source_offsets: Ints
    target_ids: Ints
    target_offsets: Ints


@dataclass(frozen=True)
class LostRowGroup:
    """A row group that was left out of a window because it could not be read; `place` names it for people."""

    corpus: int
    row_group: int
    place: str
    reason: str


@dataclass(frozen=True)
class RowsRead:
    """What became of the rows of a window.

    Attributes:
        rows: those to train on.
        dropped: rows dropped by rule (see filters.RULES); only where text is tokenized on the fly.
        lost: row groups left out, newly or as requested.
    """

    rows: Rows
    dropped: dict[str, int]
    lost: tuple[LostRowGroup, ...]


class RowReader:
    """Reads rows of a prepared corpus; can be sent to another process. Opens files and the tokenizer when needed.

    Args:
        folder: the prepared folder.
        sampling: share of merges left out, or alpha of unigram sampling, where text is tokenized; 0: none.
        seed: of the run.
    """

    def __init__(self, folder: Path, manifest: Manifest, data: DataConfig, sampling: float, seed: int) -> None:
        self._folder = folder
        self._data = data
        self._splits = manifest.splits
        self._tables = RowGroupTables()
        self._sampler = Sampler(folder, manifest.tokenizer, sampling, seed)
        self._corpora = tuple(self._corpus(manifest.splits[name]) for name in manifest.training)

    def probes(self) -> dict[str, str]:
        """By library, a digest of what its version decides of the rows: the same for the same rows and order."""
        texts = any(isinstance(corpus, TextCorpus) for corpus in self._corpora)
        return {"numpy": order_probe(), **({"sentencepiece": self._sampler.probe()} if texts else {})}

    def read(self, request: WindowRequest) -> RowsRead:
        """The rows of a window, slice by slice.

        Raises:
            DataError: a row group cannot be read, and `data.on_bad_row_group` is `raise`.
            MachineError: likewise, since the disk or the network fails.
        """
        groups, lost = self._read_groups(request)
        pieces = [piece for piece in request.slices if (piece.corpus, piece.row_group) in groups]
        parts = self._sampler.run(request.key, lambda: [self._rows(piece, groups) for piece in pieces])
        row_ids = [(piece.corpus << CORPUS_SHIFT) + part.row_numbers for piece, part in zip(pieces, parts, strict=True)]
        dropped = sum((part.dropped for part in parts), Counter[str]())
        return RowsRead(_joined(parts, row_ids), dict(dropped), lost)

    def read_split(self, split: str) -> Iterator[Rows]:
        """All rows of a split of token shards in order, a row group at a time; DataError when one cannot be read."""
        places = SplitPlaces(self._folder, self._splits[split])
        corpus = TokenCorpus(places, self._tables)
        for row_group in range(len(places)):
            try:
                part = corpus.rows(row_group, corpus.read(row_group))
            except BadRowGroup as error:
                raise _error(_cannot_read(places[row_group], error, self._mend(places[row_group])), error) from error
            yield _joined([part], [part.row_numbers])

    def _corpus(self, split: Split) -> TokenCorpus | TextCorpus:
        places = SplitPlaces(self._folder, split)
        if split.text is None:
            return TokenCorpus(places, self._tables)
        return TextCorpus(places, self._tables, split.text, self._data, self._sampler)

    def _rows(self, piece: RowSlice, groups: Groups) -> TokenRows:
        table = groups[piece.corpus, piece.row_group].slice(piece.first, piece.last - piece.first)
        return self._corpora[piece.corpus].rows(piece.row_group, table)

    def _read_groups(self, request: WindowRequest) -> tuple[Groups, tuple[LostRowGroup, ...]]:
        """The row groups that the slices lie in, each read once; and those that are left out."""
        tables: Groups = {}
        lost = []
        for corpus, row_group in dict.fromkeys((piece.corpus, piece.row_group) for piece in request.slices):
            if (corpus, row_group) in request.without:
                place = str(self._corpora[corpus].places[row_group])
                lost.append(LostRowGroup(corpus, row_group, place, LEFT_OUT_BEFORE))
                continue
            try:
                tables[corpus, row_group] = self._corpora[corpus].read(row_group)
            except BadRowGroup as error:
                lost.append(self._lost(corpus, row_group, error))
        return tables, tuple(lost)

    def _lost(self, corpus: int, row_group: int, error: BadRowGroup) -> LostRowGroup:
        """The row group to be left out; DataError when none may be."""
        place = self._corpora[corpus].places[row_group]
        if self._data.on_bad_row_group == "raise":
            mend = f"{self._mend(place)}, or set data.on_bad_row_group: quarantine to go on without its rows"
            raise _error(_cannot_read(place, error, mend), error) from error
        return LostRowGroup(corpus, row_group, str(place), str(error))

    def _mend(self, place: RowGroupPlace) -> str:
        if place.is_in_place:
            return "Mend or restore the file"
        return f"The shard is missing or damaged: delete {self._folder} and run `dist-transformer prepare` again"


def _error(message: str, cause: BadRowGroup) -> UserError:
    """After an outage a new start may help, and a Slurm job is put back into the queue."""
    return MachineError(message) if cause.is_outage else DataError(message)


def _cannot_read(place: RowGroupPlace, error: BadRowGroup, mend: str) -> str:
    return f"{place.file}: row group {place.index} cannot be read ({error}). {mend}."


def _joined(parts: Sequence[TokenRows], row_ids: Sequence[Ints]) -> Rows:
    return Rows(
        np.concatenate([np.empty(0, np.int64), *row_ids]),
        *_joined_column([part.source for part in parts]),
        *_joined_column([part.target for part in parts]),
    )


def _joined_column(columns: Sequence[TokenColumn]) -> tuple[Ints, Ints]:
    """The ids of all rows, and where each row begins."""
    ids = np.concatenate([np.empty(0, np.int64), *(column.ids for column in columns)], dtype=np.int64)
    lengths = np.concatenate([np.zeros(1, np.int64), *(column.lengths for column in columns)])
    return ids, np.cumsum(lengths)
