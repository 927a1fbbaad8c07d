"""Reads the rows of a window: slices of row groups, as token ids; text is tokenized.

Reads of a row group are retried. If all fail, the row group ends the run, or is quarantined and named in the result
(`data.on_bad_row_group`). A row group is always quarantined as a whole, so that all windows that share it do the same.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dist_transformer.config.data_schema import DataConfig
from dist_transformer.data.filters import Cleaner
from dist_transformer.data.loader.position import Quarantined
from dist_transformer.data.loader.row_groups import RowGroupPlace, RowGroupTables, SplitPlaces, UnreadableRowGroup
from dist_transformer.data.loader.text_rows import Sampler, TextCorpus
from dist_transformer.data.loader.token_rows import Ints, TokenColumn, TokenCorpus, TokenRows
from dist_transformer.data.loader.window_request import CORPUS_SHIFT, RowSlice, WindowKey, WindowRequest, order_probe
from dist_transformer.data.manifest import Manifest
from dist_transformer.data.modifiers import Modifiers
from dist_transformer.data.recipe import PREPARED_FORMAT
from dist_transformer.data.sources.text import tag_prefix
from dist_transformer.errors import DataError, MachineError, UserError

Groups = dict[tuple[int, int], pa.Table]
"""Tables by (corpus, row group)."""
ROWS_AT_ONCE = 4096
"""Rows of text that are tokenized together where nobody needs whole row groups, which may have a million."""
log = logging.getLogger(__name__)


class RowReader:
    """Reads rows of the prepared corpus in `folder`; can be sent to another process. Opens files and the tokenizer when
    needed. `sampling`: share of merges left out, or alpha of unigram sampling, where text is tokenized; 0: none."""

    def __init__(self, folder: Path, manifest: Manifest, data: DataConfig, sampling: float, seed: int) -> None:
        self._folder, self._data = folder, data
        self._splits, self._recipe = manifest.splits, manifest.recipe
        self._tables = RowGroupTables(len(manifest.training))
        self._sampler = Sampler(folder, manifest.tokenizer, sampling, seed)
        self._corpora = tuple(self._corpus(name) for name in manifest.training)

    def probes(self) -> dict[str, str]:
        """Returns, by library, a digest of its results that affect the rows: equal digests, same rows and order."""
        texts = any(isinstance(corpus, TextCorpus) for corpus in self._corpora)
        return {"numpy": order_probe(), **({"sentencepiece": self._sampler.probe()} if texts else {})}

    def read(self, request: WindowRequest) -> TokenRows:
        """Reads the rows of a window, slice by slice. Raises DataError: a row group cannot be read, and
        `data.on_bad_row_group` is `raise`; MachineError: as DataError, but because the disk or the network fails."""
        groups, quarantined = self._read_groups(request)
        pieces = [piece for piece in request.slices if (piece.corpus, piece.row_group) in groups]
        parts = self._sampler.run(request.key, lambda: [self._rows(piece, groups) for piece in pieces])
        row_ids = [(piece.corpus << CORPUS_SHIFT) + part.row_ids for piece, part in zip(pieces, parts, strict=True)]
        sides = _joined([part.source for part in parts]), _joined([part.target for part in parts])
        dropped = sum((part.dropped for part in parts), Counter[str]())
        return TokenRows(_concatenated(row_ids), *sides, dropped, quarantined)

    def read_split(self, split: str) -> Iterator[TokenRows]:
        """Yields all rows of a split of token shards in order, by row group; DataError if one cannot be read."""
        yield from self._in_order(0, self._corpus(split))

    def read_first_pass(self, corpus: int) -> Iterator[TokenRows]:
        """Yields the rows of a training corpus in order, some thousands at a time; DataError if some cannot be read.

        Under `quarantine` as many as training would are left out. Text is modified as in the first pass; subwords are others.
        """
        most_bad = self._data.max_quarantined_row_groups if self._data.on_bad_row_group == "quarantine" else 0
        yield from self._in_order(corpus, self._corpora[corpus], ROWS_AT_ONCE, most_bad)

    def _in_order(
        self, number: int, corpus: TokenCorpus | TextCorpus, at_once: int | None = None, most_bad: int = 0
    ) -> Iterator[TokenRows]:
        for row_group in range(len(corpus.places)):
            place = corpus.places[row_group]
            step = at_once or max(1, place.rows)
            try:
                table = corpus.read(row_group)
                for first in range(0, place.rows, step):
                    piece = RowSlice(number, row_group, first, min(first + step, place.rows))
                    rows = partial(corpus.rows, piece, table.slice(first, piece.last - first))
                    yield self._sampler.run(WindowKey(0, 0, 0, row_group), rows)
            except UnreadableRowGroup as error:
                if (most_bad := most_bad - 1) < 0:
                    raise self._cannot_read(place, error) from error
                log.warning("data       left out %s (%s)", place, error)

    def _corpus(self, name: str) -> TokenCorpus | TextCorpus:
        split = self._splits[name]
        places = SplitPlaces(self._folder, split)
        if split.text is None:
            return TokenCorpus(places, self._tables)
        corpus = self._data.training_corpora().get(name)
        modifiers = Modifiers(self._data.modifiers, self._sampler.seed, tag_prefix(corpus.tags) if corpus else "")
        holds_out = "held_out" in (given := self._recipe) and bool(given["held_out"] or given["validation"])
        is_in_place = any(shard.is_in_place for shard in split.shards)
        is_former = given.get("format") != PREPARED_FORMAT
        cleaner = Cleaner.of(name, self._data, self._folder, holds_out and is_in_place, is_former)
        return TextCorpus(places, self._tables, split.text, self._data.normalization, cleaner, self._sampler, modifiers)

    def _rows(self, piece: RowSlice, groups: Groups) -> TokenRows:
        table = groups[piece.corpus, piece.row_group].slice(piece.first, piece.last - piece.first)
        return self._corpora[piece.corpus].rows(piece, table)

    def _read_groups(self, request: WindowRequest) -> tuple[Groups, tuple[Quarantined, ...]]:
        """Reads the row groups of the slices, each once; returns them, and the quarantined ones."""
        tables: Groups = {}
        quarantined = []
        for corpus, row_group in dict.fromkeys((piece.corpus, piece.row_group) for piece in request.slices):
            place = self._corpora[corpus].places[row_group]
            if (corpus, row_group) in request.quarantined:
                quarantined.append(Quarantined(request.key, corpus, row_group, str(place), "quarantined before"))
                continue
            try:
                tables[corpus, row_group] = self._corpora[corpus].read(row_group)
            except UnreadableRowGroup as error:
                if self._data.on_bad_row_group == "raise":
                    way_out = ", or set data.on_bad_row_group: quarantine to continue without its rows"
                    raise self._cannot_read(place, error, way_out) from error
                quarantined.append(Quarantined(request.key, corpus, row_group, str(place), str(error)))
        return tables, tuple(quarantined)

    def _cannot_read(self, place: RowGroupPlace, error: UnreadableRowGroup, way_out: str = "") -> UserError:
        """Returns MachineError for an outage, after which a requeue of the Slurm job may help, else DataError."""
        remedy = f"The shard is missing or damaged: delete {self._folder} and run `dist-transformer prepare` again"
        if place.shard.is_in_place:
            remedy = "Repair or restore the file"
            if place.file.startswith("hf://"):
                remedy += ", its server, HF_HUB_OFFLINE or HF_HOME, or train from shards with data.on_the_fly: false"
        if error.is_outage:
            remedy = "Start again when its disk, or its server, answers"
        kind = MachineError if error.is_outage else DataError
        return kind(f"{place.file}: row group {place.index} cannot be read ({error}). {remedy}{way_out}.")


def _joined(columns: Sequence[TokenColumn]) -> TokenColumn:
    return TokenColumn(_concatenated([column.ids for column in columns]), _concatenated([c.lengths for c in columns]))


def _concatenated(parts: Sequence[NDArray[np.integer[Any]]]) -> Ints:
    return np.concatenate([np.empty(0, np.int64), *parts], dtype=np.int64)
