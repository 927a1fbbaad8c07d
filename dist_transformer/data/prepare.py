"""From text to a prepared corpus, once: scan, train the tokenizer, tokenize and filter, shuffle, write shards.

    scan       local text files are read once: unequal sides and bad bytes are found before anything is made of them
    tokenizer  trained on the training corpus, or copied from files
    train      chunk by chunk: tokenized, filtered, written to a spill file sorted by random keys
    shuffle    shard by shard: one range of the keys gathered from all spill files
    validation chunk by chunk, in order

After each piece `prepare_state.json` is replaced, so a killed preparation goes on where it was. `manifest.json` comes
last: a folder that has one is complete. Memory is bounded by one chunk or shard, however large the corpus.
"""

import itertools
import math
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from filelock import FileLock, Timeout

from dist_transformer.config.data_models import CorpusConfig, TokenizerConfig
from dist_transformer.config.models import Config
from dist_transformer.data.corpus_files import corpus_files, corpus_name
from dist_transformer.data.manifest import (
    MANIFEST_NAME,
    SHARD_FOLDER,
    TOKENIZER_FOLDER,
    Manifest,
    Shard,
    TokenizerFiles,
    content_digest,
    file_sha256,
    json_digest,
)
from dist_transformer.data.prepare_state import STATE_NAME, PrepareState, SplitState
from dist_transformer.data.recipe import (
    make_recipe,
    recipe_without_corpora,
    refuse_other_recipe,
    taken_models,
)
from dist_transformer.data.shards import gather_range, write_shard, write_spill
from dist_transformer.data.sources import RawBatch, read_corpus, scan_corpus
from dist_transformer.data.tokenize_rows import tokenized_chunk
from dist_transformer.data.tokenizer import Tokenizer, train_tokenizer
from dist_transformer.errors import DataError
from dist_transformer.run_dir import replacing

ReportProgress = Callable[[str, int, int | None], None]
"""Takes the stage, the rows done and the rows in all (None where nobody knows)."""

BATCH_ROWS = 8192
CHUNK_ROWS = 128 * BATCH_ROWS
"""Rows read between two states; what a killed preparation does again at most."""
SHARD_ROWS = 1 << 20
SHARD_TOKENS = 1 << 26
"""Of both sides: about 120 MB at 1.8 bytes a token."""
FOLDER_DIGITS = 16
LOCK_NAME = ".prepare.lock"
LOCK_ATTEMPT_SECONDS = 1.0


def ignore_progress(stage: str, rows_done: int, rows_total: int | None) -> None:
    """For callers that draw nothing."""


def prepare(config: Config, folder: Path | None = None, progress: ReportProgress = ignore_progress) -> Manifest:
    """The prepared corpus of `config` in `folder` (default: `prepared_folder`), made now unless it is complete.

    Safe to call from several processes at once: one works, the others wait and take what it made. DataError for a
    corpus or tokenizer that cannot be used, and for a folder that was prepared with another recipe.
    """
    folder = folder or prepared_folder(config)
    if manifest := _complete_manifest(config, folder):
        return manifest
    recipe = make_recipe(config)
    folder.mkdir(parents=True, exist_ok=True)
    with _only_process(folder, progress):
        if manifest := _complete_manifest(config, folder):
            return manifest
        state = PrepareState.load(folder) or PrepareState(recipe)
        refuse_other_recipe(folder, state.recipe, recipe)
        return _Preparation(config, folder, state, progress).run()


def prepared_folder(config: Config) -> Path:
    """`data.prepared`, or a folder under `run.root` named by the digest of the recipe; DataError for a missing file."""
    if config.data.prepared is not None:
        return Path(config.data.prepared)
    return Path(config.run.root) / "prepared" / json_digest(make_recipe(config))[:FOLDER_DIGITS]


def load_tokenizer(folder: Path, files: TokenizerFiles) -> Tokenizer:
    """The tokenizer of a prepared folder."""
    return Tokenizer.load(folder / files.source, None if files.target == files.source else folder / files.target)


def _complete_manifest(config: Config, folder: Path) -> Manifest | None:
    if not (folder / MANIFEST_NAME).exists():
        return None
    manifest = Manifest.load(folder)
    corpora = [corpus for corpus in (config.data.train, config.data.validation) if corpus]
    text_at_hand = all(path.is_file() for corpus in corpora for path in corpus_files(corpus, config.data))
    wanted = make_recipe(config) if text_at_hand else recipe_without_corpora(config)
    refuse_other_recipe(folder, manifest.recipe, wanted)
    return manifest


@contextmanager
def _only_process(folder: Path, progress: ReportProgress) -> Iterator[None]:
    lock = FileLock(folder / LOCK_NAME)
    while not lock.is_locked:
        try:
            lock.acquire(timeout=LOCK_ATTEMPT_SECONDS)
        except Timeout:
            progress("waiting for another process", 0, None)
    try:
        yield
    finally:
        lock.release()


@dataclass
class _Preparation:
    """One process at work in a prepared folder, with its lock held."""

    config: Config
    folder: Path
    state: PrepareState
    progress: ReportProgress

    def run(self) -> Manifest:
        corpora = {"train": self.config.data.train, "validation": self.config.data.validation}
        present = {name: corpus for name, corpus in corpora.items() if corpus}
        _remove_torn_files(self.folder)
        self._scan(present)
        files = self._tokenizer_files()
        tokenizer = load_tokenizer(self.folder, files)
        for name, corpus in present.items():
            split = self.state.splits.setdefault(name, SplitState())
            self._tokenize(name, corpus, split, tokenizer)
            self._refuse_empty(corpus, split)
        self._shuffle(self.state.splits["train"])
        shutil.rmtree(self.folder / "spill", ignore_errors=True)
        manifest = self._manifest(files, tokenizer)
        manifest.save(self.folder)
        (self.folder / STATE_NAME).unlink(missing_ok=True)
        return manifest

    def _scan(self, corpora: dict[str, CorpusConfig]) -> None:
        if self.state.scanned:
            return
        for name, corpus in corpora.items():
            self.progress("scan", 0, None)
            self.state.rows_total[name] = scan_corpus(corpus, self.config.data)
        self.state.scanned = True
        self.state.save(self.folder)

    def _tokenizer_files(self) -> TokenizerFiles:
        if self.state.tokenizer is None:
            names = self._make_tokenizer(self.config.tokenizer)
            digests = [file_sha256(self.folder / name) for name in names]
            self.state.tokenizer = TokenizerFiles(*names, *digests)
            self.state.save(self.folder)
        return self.state.tokenizer

    def _make_tokenizer(self, settings: TokenizerConfig) -> tuple[str, str]:
        """Trains or copies the models; returns their paths in the folder."""
        source, target = f"{TOKENIZER_FOLDER}/source.model", f"{TOKENIZER_FOLDER}/target.model"
        if models := taken_models(settings):
            Tokenizer.load(*models)
            for name, model in zip((source, target), models, strict=False):
                _copy(model, self.folder / name)
            return source, source if settings.shared else target
        if settings.shared:
            train_tokenizer(self._sentences(("source", "target")), settings, self.folder / source)
            return source, source
        train_tokenizer(self._sentences(("source",)), settings, self.folder / source)
        train_tokenizer(self._sentences(("target",)), settings, self.folder / target)
        return source, target

    def _sentences(self, sides: tuple[str, ...]) -> Iterator[str]:
        """The sentences of the training corpus that a tokenizer is trained on."""
        total = self.state.rows_total["train"]
        for batch in read_corpus(self.config.data.train, self.config.data, BATCH_ROWS):
            self.progress("tokenizer", batch.first_row, total)
            for side in sides:
                texts: list[str | None] = getattr(batch, side)
                yield from (text for i, text in enumerate(texts) if text and i not in batch.bad_encoding)

    def _tokenize(self, name: str, corpus: CorpusConfig, split: SplitState, tokenizer: Tokenizer) -> None:
        """Chunks of `corpus` that are not done yet: the training corpus to spill files, another straight to shards."""
        if split.all_read:
            return
        batches = read_corpus(corpus, self.config.data, BATCH_ROWS)
        for index, chunk_batches in itertools.groupby(batches, lambda batch: batch.first_row // CHUNK_ROWS):
            if index < len(split.chunks):
                continue
            table, chunk = tokenized_chunk(self._reported(name, chunk_batches), tokenizer, self.config.data.filters)
            if chunk.rows and name == "train":
                write_spill(table, self._spill(index), self.config.run.seed, index)
            elif chunk.rows:
                split.shards.append(self._write_shard(name, len(split.shards), table))
            split.chunks.append(chunk)
            self.state.save(self.folder)
        split.all_read = True
        self.state.save(self.folder)

    def _reported(self, name: str, batches: Iterable[RawBatch]) -> Iterator[RawBatch]:
        for batch in batches:
            self.progress(name, batch.first_row + len(batch.source), self.state.rows_total[name])
            yield batch

    def _refuse_empty(self, corpus: CorpusConfig, split: SplitState) -> None:
        if split.rows == 0:
            counts = ", ".join(f"{rule} {count}" for rule, count in split.dropped.items())
            raise DataError(
                f"{corpus_name(corpus, self.config.data)}: all of its {split.read_rows} pairs were dropped ({counts}). "
                f"Look at the text, the order of its columns and data.filters."
            )

    def _shuffle(self, split: SplitState) -> None:
        """Gathers the spill files into shards, a range of keys each."""
        num_ranges = max(math.ceil(split.rows / SHARD_ROWS), math.ceil(split.tokens / SHARD_TOKENS))
        spills = [self._spill(index) for index, chunk in enumerate(split.chunks) if chunk.rows]
        while split.ranges_done < num_ranges:
            table = gather_range(spills, split.ranges_done, num_ranges)
            if table.num_rows:
                split.shards.append(self._write_shard("train", len(split.shards), table))
            split.ranges_done += 1
            self.state.save(self.folder)
            self.progress("shuffle", split.rows * split.ranges_done // num_ranges, split.rows)

    def _manifest(self, files: TokenizerFiles, tokenizer: Tokenizer) -> Manifest:
        splits = {name: split.finished() for name, split in self.state.splits.items()}
        return Manifest(
            digest=content_digest(self.state.recipe, files, splits),
            recipe=self.state.recipe,
            tokenizer=files,
            source_vocabulary=tokenizer.source_vocabulary,
            target_vocabulary=tokenizer.target_vocabulary,
            pad_id=tokenizer.pad_id,
            bos_id=tokenizer.bos_id,
            eos_id=tokenizer.eos_id,
            source_language=self.config.data.source_language,
            target_language=self.config.data.target_language,
            splits=splits,
        )

    def _spill(self, chunk: int) -> Path:
        return self.folder / "spill" / f"train-{chunk:05d}.parquet"

    def _write_shard(self, split: str, number: int, table: pa.Table) -> Shard:
        file = f"{SHARD_FOLDER}/{split}-{number:05d}.parquet"
        return write_shard(table, self.folder, file, self.config.data.row_group_rows)


def _remove_torn_files(folder: Path) -> None:
    """What a killed process left half-written; the lock says that it is no longer at work."""
    for path in folder.rglob(".*.tmp"):
        path.unlink()


def _copy(source: Path, target: Path) -> None:
    with replacing(target) as temporary:
        temporary.write_bytes(source.read_bytes())
