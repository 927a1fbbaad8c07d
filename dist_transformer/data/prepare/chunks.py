"""Builds the units of a preparation (see claims.py): chunks of the corpora, then ranges of their shuffle.

Where pairs that repeat others are dropped, the corpora are read twice: chunks of keys come first.
A chunk of a training corpus becomes a spill file, a chunk of the validation corpus a shard; a range becomes a shard.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from dist_transformer.config.schema import Config
from dist_transformer.data.filters import LENGTH_RULES, Cleaner
from dist_transformer.data.manifest import SHARD, SHARD_FOLDER, Shard, TextColumns
from dist_transformer.data.prepare import scan, shards
from dist_transformer.data.prepare.claims import WAITING, ChunkClaims, Work, chunk_unit, end_unit, range_unit
from dist_transformer.data.prepare.duplicates import Comparison, batch_keys, load_repeated, save_keys
from dist_transformer.data.prepare.report import ReportedCorpus, warn_of_changed_text, warn_of_cut_text
from dist_transformer.data.prepare.state import CHUNK, Chunk, PrepareState, num_tokens, text_split, token_split
from dist_transformer.data.sources.corpus import RawBatch, read_corpus
from dist_transformer.data.sources.files import corpus_name

BATCH_ROWS = 2048
CHUNK_ROWS = 512 * BATCH_ROWS
"""Rows of a chunk, which are the most that a killed process leaves to be done again."""
SHARD_ROWS = 1 << 20
SHARD_TOKENS = 1 << 26
"""Tokens of a shard, both sides: about 120 MB at 1.8 bytes a token."""
RANGES_AT_ONCE, FEWEST_RUNS = 4, 256
"""Most shards that are gathered together, with 1.2 GB of memory (text: 2.3 GB); fewer leave this many runs to share."""
KEYS, REPEATED = "+keys", "repeated"
"""Ending of the name of a corpus in units of keys, and the unit in which the results of their comparison are joined."""
WAIT_SECONDS = 0.5
"""Interval between checks of the progress of other processes."""


@dataclass(frozen=True)
class MadeChunks:
    """The chunks of one corpus, and the sum of their counts. `shards`: those of the validation corpus."""

    chunks: tuple[Chunk, ...]
    total: Chunk
    shards: tuple[Shard, ...]


class _NothingFree(Exception):
    """Ends the reading of a corpus of which other processes build all that is left."""


class Units:
    """The work of one of the processes that build the chunks and shards of a prepared folder."""

    def __init__(
        self, config: Config, folder: Path, state: PrepareState, progress: scan.ReportProgress, threads: int
    ) -> None:
        assert state.tokenizer is not None
        self.work = Work(folder)
        self._config, self._folder, self._state = config, folder, state
        self._progress, self._threads = progress, threads
        self._tokenizer = scan.load_tokenizer(folder, state.tokenizer)
        self._corpora = {name: each for name, each in scan.all_corpora(config).items() if name not in state.in_place}
        self._training = tuple(config.data.training_corpora())
        self._cleaners = {name: Cleaner.of(name, config.data, folder) for name in self._corpora}

    def make_chunks(self) -> dict[str, MadeChunks]:
        """Reads the corpora until every chunk is done, here or elsewhere; DataError if all rows of one are dropped."""
        rules = {name: own for name, each in self._cleaners.items() if (own := each.repetition_rules())}
        self._read_all([f"{name}{KEYS}" for name in rules])
        if rules and not self.work.is_done(REPEATED):
            self._mark_repeated(rules)
        self._read_all([*self._corpora])
        return {name: self._made_chunks(name) for name in self._corpora}

    def _mark_repeated(self, rules: dict[str, dict[str, float]]) -> None:
        """Compares the pairs until those that repeat others are marked, here or elsewhere."""
        num_chunks = {name: self.work.result(end_unit(f"{name}{KEYS}")) for name in rules}
        files = [([self._hash_file(name, n) for n in range(num)], rules[name]) for name, num in num_chunks.items()]
        comparison = Comparison(files, lambda: self._progress(REPEATED, 0, None))
        parts = comparison.num_parts
        finds = {range_unit(f"+{REPEATED}-{parts}", n): partial(comparison.find, n) for n in range(parts)}
        while not self.work.is_done(REPEATED):
            left = {unit: find for unit, find in finds.items() if not self.work.is_done(unit)}
            made = [self._make(*each) for each in (left or {REPEATED: partial(comparison.mark)}).items()]
            if not any(made):
                self._wait()

    def _make(self, unit: str, make: Callable[[], Any]) -> bool:
        with self.work.claimed(unit) as is_ours:
            if is_ours:
                self.work.finish(unit, make())
        return is_ours

    def _read_all(self, names: list[str]) -> None:
        """Reads until every chunk of these units is done, here or elsewhere."""
        while unfinished := [name for name in names if not self._has_all_chunks(name)]:
            to_read = [name for name in unfinished if self._has_free_chunk(name)]
            for name in to_read:
                self._read(name)
            if not to_read:
                self._wait()

    def make_ranges(self, made: dict[str, MadeChunks]) -> dict[str, tuple[Shard, ...]]:
        """Gathers the spill files of the training corpora into shards until all are done, here or elsewhere."""
        shuffled = [name for name in made if name in self._training]
        units = {name: self._range_units(name, made[name].total) for name in shuffled}
        runs = [(name, run) for name in shuffled for run in _runs(len(units[name]))]
        while missing := [(name, run) for name, run in runs if not all(self.work.is_done(units[name][n]) for n in run)]:
            results = [self._make_ranges(name, run, units[name], made[name]) for name, run in missing]
            if not any(results):
                self._wait()
        return {name: self._shards(self.work.result(unit) for unit in units[name]) for name in shuffled}

    def corpora(self, made: dict[str, MadeChunks], shuffled: dict[str, tuple[Shard, ...]]) -> dict[str, ReportedCorpus]:
        """Returns the split of each corpus for the manifest, with what is reported of it."""
        corpora = {}
        for name in scan.all_corpora(self._config):
            counts = made[name].total if name in made else self._state.samples[name]
            if name in self._state.in_place:
                split = self._state.in_place[name]
            elif self._is_text(name):
                longest, columns = self._config.data.filters.max_tokens, TextColumns("source", "target", prefix="")
                split = text_split(shuffled[name], counts.read_rows, counts.dropped, longest, columns)
            else:
                split = token_split(counts, shuffled.get(name, made[name].shards))
            lengths = self._state.samples[name] if split.text else counts
            corpora[name] = ReportedCorpus(split, name in self._training, lengths, counts)
        return corpora

    def _has_all_chunks(self, name: str) -> bool:
        return self.work.is_done(end_unit(name)) and all(map(self.work.is_done, self._chunk_units(name)))

    def _has_free_chunk(self, name: str, first: int = 0) -> bool:
        return not self.work.is_done(end_unit(name)) or any(map(self.work.is_free, self._chunk_units(name, first)))

    def _chunk_units(self, name: str, first: int = 0) -> Iterator[str]:
        return (chunk_unit(name, chunk) for chunk in range(first, self.work.result(end_unit(name))))

    def _wait(self) -> None:
        self._progress(WAITING, 0, None)
        time.sleep(WAIT_SECONDS)

    def _read(self, unit: str) -> None:
        """Reads a corpus, up to its last free chunk, and builds the chunks that are free when the reading reaches them."""
        name, is_keys = unit.removesuffix(KEYS), unit.endswith(KEYS)
        total, cleaner = self._state.rows_total[name], self._cleaners[name]
        rows: list[Any] = []  # of the chunk, batch by batch: BatchKeys or CountedRows
        with suppress(_NothingFree), closing(ChunkClaims(self.work, unit, CHUNK_ROWS)) as claims:

            def wanted(first_row: int) -> bool:
                self._progress(unit, first_row, total)
                if first_row % CHUNK_ROWS == 0 and not self._has_free_chunk(unit, first_row // CHUNK_ROWS):
                    raise _NothingFree
                return claims.wants(first_row)

            scores = cleaner.settings.scores
            for batch in read_corpus(self._corpora[name], self._config.data, BATCH_ROWS, wanted, scores):
                chunk, end = batch.first_row // CHUNK_ROWS, batch.first_row + len(batch.source)
                if is_keys:
                    rows.append(batch_keys(cleaner.clean(batch), batch.first_row))
                else:
                    rows.append(self._kept(name, batch, chunk))
                self._progress(unit, end, total)
                if end % CHUNK_ROWS == 0:
                    claims.finish(chunk, self._write_chunk(name, chunk, rows, is_keys))
                    rows.clear()
            for last in claims.unfinished:  # the last chunk ends with the corpus
                claims.finish(last, self._write_chunk(name, last, rows, is_keys))
            self._make(end_unit(unit), lambda: claims.num_chunks)

    def _kept(self, name: str, batch: RawBatch, chunk: int) -> shards.CountedRows:
        cleaner = self._cleaners[name]
        rules = [*cleaner.repetition_rules()]
        if batch.first_row == 0:
            warn_of_cut_text(name, [*batch.source, *batch.target])
            is_ours = not {"models_sha256", "normalization"} & self._state.recipe["tokenizer"].keys()
            if is_ours and name in self._training:  # a tokenizer is trained here, with the default normalization
                warn_of_changed_text(name, batch.target)
        text = cleaner.clean(batch, load_repeated(self._hash_file(name, chunk), rules) if rules else None)
        if self._is_text(name):
            return shards.text_rows(batch, text)
        return shards.tokenized_rows(batch, text, self._tokenizer, cleaner.settings, self._threads)

    def _is_text(self, name: str) -> bool:
        """True if the shards built from a corpus contain text."""
        return self._config.data.on_the_fly and name in self._training

    def _write_chunk(self, name: str, chunk: int, rows: list[Any], is_keys: bool) -> dict[str, Any] | None:
        if is_keys:
            save_keys(self._hash_file(name, chunk), rows)
            return None
        tables = [table for table, _ in rows]
        counts, shard = Chunk.together([counts for _, counts in rows]), None
        rows.clear()  # the tables are replaced while a spill file is written
        if counts.rows and name in self._training:
            corpus = self._training.index(name)
            shards.write_spill(tables, self._spill(name, chunk), self._config.run.seed, corpus, chunk)
        elif counts.rows:
            shard = asdict(self._write_shard(name, chunk, pa.concat_tables(tables)))
        return {"counts": asdict(counts), "shard": shard}

    def _made_chunks(self, name: str) -> MadeChunks:
        results = [self.work.result(unit) for unit in self._chunk_units(name)]
        chunks = tuple(CHUNK.validate_python(result["counts"]) for result in results)
        total = Chunk.together(chunks)
        if total.rows == 0:
            raise scan.all_dropped_error(f"{name}: {corpus_name(self._corpora[name], self._config.data)}", total)
        return MadeChunks(chunks, total, self._shards(result["shard"] for result in results))

    def _range_units(self, name: str, total: Chunk) -> list[str]:
        if self._is_text(name):
            tokens = sum(self._estimated(name, total.rows))
        else:
            tokens = num_tokens(total.source_lengths) + num_tokens(total.target_lengths)
        num_ranges = max(math.ceil(total.rows / SHARD_ROWS), math.ceil(tokens / SHARD_TOKENS))
        return [range_unit(name, index) for index in range(num_ranges)]

    def _make_ranges(self, name: str, run: range, units: list[str], made: MadeChunks) -> bool:
        """Builds the shards of those ranges of a run that are free."""
        spills = [self._spill(name, chunk) for chunk, counts in enumerate(made.chunks) if counts.rows]
        with ExitStack() as claims:
            ours = [index for index in run if claims.enter_context(self.work.claimed(units[index]))]
            for index, table in zip(ours, shards.gather_ranges(spills, ours, len(units)) if ours else (), strict=True):
                shard = asdict(self._write_shard(name, index, table)) if table.num_rows else None
                self.work.finish(units[index], shard)
                self._progress(f"shuffle {name}", made.total.rows * (index + 1) // len(units), made.total.rows)
        return bool(ours)

    def _write_shard(self, name: str, number: int, table: pa.Table) -> Shard:
        file = f"{SHARD_FOLDER}/{name}-{number:05d}.parquet"
        count = (lambda rows: self._estimated(name, rows.num_rows)) if self._is_text(name) else shards.count_tokens
        return shards.write_shard(table, self._folder, file, self._config.data.row_group_rows, count)

    def _estimated(self, name: str, rows: int) -> tuple[int, int]:
        sample = self._state.samples[name]
        kept_by_text = sample.rows + sum(sample.dropped.get(rule, 0) for rule in LENGTH_RULES)
        return scan.estimated_tokens(sample, rows, kept_by_text)

    def _shards(self, results: Iterator[Any]) -> tuple[Shard, ...]:
        return tuple(SHARD.validate_python(result) for result in results if result is not None)

    def _spill(self, name: str, chunk: int) -> Path:
        return self.work.folder / "spill" / f"{name}-{chunk:05d}.parquet"

    def _hash_file(self, name: str, chunk: int) -> Path:
        return self.work.folder / "hashes" / f"{name}-{chunk:05d}.npy"


def _runs(num_ranges: int) -> list[range]:
    """Divides the ranges of a corpus into runs that are gathered together."""
    size = min(RANGES_AT_ONCE, max(1, num_ranges // FEWEST_RUNS))
    return [range(first, min(first + size, num_ranges)) for first in range(0, num_ranges, size)]
