"""Rows of text, tokenized in the loader as `prepare` would, optionally modified and with subword sampling."""

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from itertools import chain, compress
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa

from dist_transformer.data.filters import Cleaner, KeptText, filter_lengths
from dist_transformer.data.loader.row_groups import RowGroupTables, SplitPlaces, UnreadableRowGroup
from dist_transformer.data.loader.token_rows import TokenColumn, TokenRows, check_column, row_numbers
from dist_transformer.data.loader.window_request import PURPOSE_SAMPLING, RowSlice, WindowKey, random_generator
from dist_transformer.data.manifest import TextColumns, TokenizerFiles, json_digest
from dist_transformer.data.modifiers import Modifiers
from dist_transformer.data.sources.corpus import RawBatch
from dist_transformer.data.sources.text import Normalization, decoded, is_text, normalized, tagged, text_column
from dist_transformer.data.tokenizer.tokenizer import Tokenizer, with_sampling_seed

SEED_LIMIT = 1 << 31
Result = TypeVar("Result")
_load = lru_cache(maxsize=1)(Tokenizer.load)


@dataclass(frozen=True)
class Sampler:
    """The tokenizer of a run, whose `files` are in the prepared `folder`, with subword sampling. `sampling`: share of merges
    left out, or alpha of unigram sampling; 0: none."""

    folder: Path
    files: TokenizerFiles
    sampling: float
    seed: int

    def run(self, key: WindowKey, tokenize: Callable[[], Result]) -> Result:
        """Returns the result of `tokenize`; random draws in it depend only on this key and the sentences."""
        if not self.sampling:
            return tokenize()
        seed = int(random_generator(self.seed, PURPOSE_SAMPLING, *astuple(key)).integers(SEED_LIMIT))
        return with_sampling_seed(seed, tokenize)

    def encode(self, source: Sequence[str], target: Sequence[str]) -> tuple[list[list[int]], list[list[int]]]:
        """Converts both sides to token ids."""
        tokenizer = _load(self.folder / self.files.source, self.folder / self.files.target)
        return (
            tokenizer.encode_source(source, num_threads=1, sampling=self.sampling),
            tokenizer.encode_target(target, num_threads=1, sampling=self.sampling),
        )

    def probe(self) -> str:
        """Returns a digest of the ids of a text of the tokenizer's own pieces: sentencepiece's versions may differ."""
        tokenizer, some = _load(self.folder / self.files.source, self.folder / self.files.target), range(500)
        source, target = "".join(tokenizer.source_pieces(some)), "".join(tokenizer.target_pieces(some))
        return json_digest(with_sampling_seed(1, lambda: self.encode([source], [target])))[:16]


@dataclass(frozen=True)
class TextCorpus:
    """A split whose shards contain text: written by `prepare`, or the user's own parquet files."""

    places: SplitPlaces
    tables: RowGroupTables
    columns: TextColumns
    normalization: Normalization
    cleaner: Cleaner
    sampler: Sampler
    modifiers: Modifiers

    def read(self, row_group: int) -> pa.Table:
        """Reads a row group with the columns row_id, source and target; UnreadableRowGroup if it cannot be read."""
        place = self.places[row_group]
        stored = [] if place.shard.is_in_place else ["row_id"]
        table = self.tables.read(place, [*stored, self.columns.source, self.columns.target])
        if place.shard.is_in_place:
            ids = pa.array(np.arange(place.first_row, place.first_row + place.rows))
        else:
            check_column(table, "row_id", pa.types.is_integer, "integers")
            ids = table.column("row_id")
        sides = {"source": self._texts(table, self.columns.source), "target": self._texts(table, self.columns.target)}
        return pa.table({"row_id": ids, **sides})

    def rows(self, piece: RowSlice, table: pa.Table) -> TokenRows:
        """Converts a slice, from the table of `read`, to token ids, without the rows that filters drop."""
        text = self._text(table, self.places[piece.row_group].shard.is_in_place)
        self.modifiers.modify(piece, text.positions.tolist(), text.source, text.target)
        source, target = self.sampler.encode(text.source, text.target)
        lengths = [len(ids) for ids in source], [len(ids) for ids in target]
        text, before = text.without(filter_lengths(*lengths, self.cleaner.settings)), text
        kept = np.isin(before.positions, text.positions)
        source, target = (list(compress(side, kept)) for side in (source, target))
        return TokenRows(row_numbers(table)[text.positions], token_column(source), token_column(target), text.counts())

    def _texts(self, table: pa.Table, name: str) -> pa.ChunkedArray:
        """Returns a text column as bytes: table formats do not check that it is UTF-8."""
        column = text_column(table, name)
        if not is_text(column.type):
            raise UnreadableRowGroup(f"column {name!r} holds {column.type}; expected text")
        column = column.cast(pa.large_binary())
        if self.cleaner.settings.bad_encoding == "raise":
            try:
                column.cast(pa.large_string())
            except pa.ArrowInvalid:
                _, bad = decoded(column.to_pylist())
                raise UnreadableRowGroup(
                    f"column {name!r} is not valid UTF-8 in row {bad[0]} of the row group; convert it, or set "
                    "data.filters.bad_encoding: drop"
                ) from None
        return column

    def _text(self, table: pa.Table, is_in_place: bool) -> KeptText:
        """Returns the rows that no rule by text drops; `prepare` has applied those rules to the shards that it wrote."""
        source, bad_source = decoded(table.column("source").to_pylist())
        target, bad_target = decoded(table.column("target").to_pylist())
        if not is_in_place:
            return KeptText.all_of(source, target)
        bad, prefix = frozenset([*bad_source, *bad_target]), self.columns.prefix
        source, target = (normalized(side, self.normalization) for side in (source, target))
        return self.cleaner.clean(RawBatch(0, tagged(source, prefix), target, bad, prefix))


def token_column(rows: Sequence[Sequence[int]]) -> TokenColumn:
    """Joins the ids of some rows."""
    lengths = np.array([len(ids) for ids in rows], dtype=np.int64)
    return TokenColumn(np.fromiter(chain.from_iterable(rows), np.int64, int(lengths.sum())), lengths)
