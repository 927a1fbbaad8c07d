"""First part of a preparation, done by one process for all under a lock: rows, tokenizer, files read in place.

    scan        local text files are read once: unequal sides and bad bytes are found before any unit is built
    held out    keys of the sentences of the validation and test corpora, which no training corpus may have
    tokenizer   trained on all training corpora together, or copied from files
    in place    with data.on_the_fly: the row groups of the user's own parquet files, and the lengths of their first rows

After each of them `work/state.json` is replaced.
"""

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dist_transformer.config.data_schema import CorpusConfig, DataConfig, TokenizerConfig
from dist_transformer.config.schema import Config
from dist_transformer.data.filters import Cleaner, HeldOut, without_markup
from dist_transformer.data.loader.window_request import RowSlice
from dist_transformer.data.manifest import TOKENIZER_FOLDER, RowGroup, Shard, Split, TextColumns, TokenizerFiles
from dist_transformer.data.modifiers import Modifiers, inline_tags
from dist_transformer.data.prepare.shards import tokenized_rows
from dist_transformer.data.prepare.state import Chunk, PrepareState, num_tokens, text_split
from dist_transformer.data.recipe import FORMATS, PREPARED_FORMAT, refuse_other_recipe, taken_models
from dist_transformer.data.sentences import Keys, Sentences, comparable
from dist_transformer.data.sources.arrow import ParquetFile
from dist_transformer.data.sources.corpus import RawBatch, hub_commits, parquet_index, read_corpus, scan_corpus
from dist_transformer.data.sources.files import corpus_name
from dist_transformer.data.sources.text import tag_prefix
from dist_transformer.data.tokenizer.tokenizer import TRAINING_SENTENCES, Tokenizer, train_tokenizer, training_parts
from dist_transformer.errors import DataError
from dist_transformer.files import file_sha256, replacing

log = logging.getLogger(__name__)
ReportProgress = Callable[[str, int, int | None], None]
"""Takes the stage, the rows done and the total of rows (None if unknown)."""

LARGE_DOWNLOAD_BYTES, LARGE_GROUP_WINDOWS = 10**9, 10
"""Text at an address, and row groups in windows, from which on a warning tells what they cost."""
SAMPLE_ROWS = 2000
"""Rows at the head of a corpus from which its tokens are estimated; as many more until one is kept."""
TOKENIZER_CHOICE = 4
"""Sentences passed to the trainer, a multiple of TRAINING_SENTENCES, which it samples; others are skipped."""


@dataclass
class Start:
    """The first process at work in a prepared folder, with its lock held."""

    config: Config
    folder: Path
    work: Path
    progress: ReportProgress
    batch_rows: int
    threads: int

    def run(self, recipe: dict[str, Any]) -> PrepareState:
        """Completes and returns the state, and sets its Hub commits in `config`; DataError if it has another recipe or
        format."""
        state = PrepareState.load(self.work)
        state = state or PrepareState(recipe, commits=hub_commits(all_corpora(self.config).values()))
        if (version := state.recipe.get("format")) in FORMATS[1:]:
            raise DataError(
                f"{self.folder}: was begun by a version of this program that prepares format {version}, this one prepares "
                f"{PREPARED_FORMAT}: remove the folder, and it is prepared anew; or let that version complete it"
            )
        refuse_other_recipe(self.folder, state.recipe, recipe)
        self.config = at_commits(self.config, state.commits)
        if not state.scanned:
            self._scan(state)
        if HeldOut.load(self.folder) is None and (held_out := read_held_out(self.config)) is not None:
            held_out.save(self.folder)
        if state.tokenizer is None:
            names = self._tokenizer_files(self.config.tokenizer, state)
            state.tokenizer = TokenizerFiles(*names, *(file_sha256(self.folder / name) for name in names))
            state.save(self.work)
        if self.config.data.on_the_fly:
            self._look_into_texts(state)
        return state

    def _scan(self, state: PrepareState) -> None:
        for name, corpus in all_corpora(self.config).items():
            self.progress("scan", 0, None)
            state.rows_total[name] = scan_corpus(corpus, self.config.data, lambda n: self.progress("scan", n, None))
            size = sum(file["bytes"] or 0 for file in state.recipe["training"].get(name, {}).get("files", []))
            if state.rows_total[name] is None and size >= LARGE_DOWNLOAD_BYTES:
                given = corpus_name(corpus, self.config.data), size / 1e9
                log.warning("%s: each process downloads these %.3g GB in each pass; copy them to a disk first", *given)
        state.scanned = True
        state.save(self.work)

    def _tokenizer_files(self, settings: TokenizerConfig, state: PrepareState) -> tuple[str, str]:
        """Trains or copies the models; returns their paths in the folder."""
        source, target = f"{TOKENIZER_FOLDER}/source.model", f"{TOKENIZER_FOLDER}/target.model"
        inline = inline_tags(self.config.data)
        tags = [tag for corpus in self.config.data.training_corpora().values() for tag in corpus.tags] + inline
        if models := taken_models(settings):
            _refuse_unfit(models, settings.shared, tags)
            for name, model in zip((source, target), models, strict=False):
                with replacing(self.folder / name) as temporary:
                    temporary.write_bytes(model.read_bytes())
            return source, source if len(models) == 1 else target
        if settings.shared:
            train_tokenizer(self._sentences(("source", "target"), state), settings, self.folder / source, tags)
            return source, source
        train_tokenizer(self._sentences(("source",), state), settings, self.folder / source, tags)
        train_tokenizer(self._sentences(("target",), state), settings, self.folder / target, inline)
        return source, target

    def _sentences(self, sides: tuple[str, ...], state: PrepareState) -> Iterator[str]:
        """Yields sentences of all training corpora for the trainer to sample from; every row has the same chance.

        Rows are modified as in training, so that the pieces of upper-case words are known.
        """
        corpora = (data := self.config.data).training_corpora()
        rows = sum(state.rows_total[name] or 0 for name in corpora)
        every = max(1, rows // (TOKENIZER_CHOICE * TRAINING_SENTENCES))  # of 10^9 rows a few million are enough
        for number, (name, corpus) in enumerate(corpora.items()):
            most = data.filters_of(corpus).max_tokens
            batches = read_corpus(corpus, data, self.batch_rows, lambda row: row // self.batch_rows % every == 0)
            for batch in batches:
                self.progress("tokenizer", batch.first_row, state.rows_total[name])
                if data.modifiers:
                    self._modify(batch, number)
                for side in sides:
                    texts: list[str | None] = getattr(batch, side)
                    kept = (text for i, text in enumerate(texts) if text and i not in batch.bad_encoding)
                    yield from (part for text in kept for part in training_parts(text, most))

    def _modify(self, batch: RawBatch, corpus: int) -> None:
        rows = [i for i, pair in enumerate(zip(batch.source, batch.target, strict=True)) if all(pair)]
        both = [[str(side[i]) for i in rows] for side in (batch.source, batch.target)]
        piece = RowSlice(corpus, 0, batch.first_row, batch.first_row + len(batch.source))
        Modifiers(self.config.data.modifiers, self.config.run.seed, batch.prefix).modify(piece, rows, *both)
        for side, texts in zip((batch.source, batch.target), both, strict=True):
            for i, text in zip(rows, texts, strict=True):
                side[i] = text

    def _look_into_texts(self, state: PrepareState) -> None:
        """Samples the training corpora, and makes the splits of those that can be read in place."""
        assert state.tokenizer is not None
        tokenizer = load_tokenizer(self.folder, state.tokenizer)
        for name, corpus in self.config.data.training_corpora().items():
            if name in state.samples:
                continue
            cleaner = Cleaner.of(name, self.config.data, self.folder)
            files = parquet_index(corpus, self.config.data)
            if files is not None and (refused := [*cleaner.repetition_rules(), *cleaner.settings.scores]):
                raise DataError(
                    f"{corpus_name(corpus, self.config.data)}: is read in place with data.on_the_fly, where data.filters "
                    f"{refused[0]} cannot be applied: set data.on_the_fly: false, turn the rule off for this corpus, or train "
                    "on the text that `dist-transformer data clean` writes"
                )
            sample = self._sample(corpus, tokenizer, cleaner)
            if files is not None:
                state.in_place[name] = self._split_in_place(corpus, files, sample)
            state.samples[name] = sample
            state.save(self.work)

    def _sample(self, corpus: CorpusConfig, tokenizer: Tokenizer, cleaner: Cleaner) -> Chunk:
        data = self.config.data
        sample = Chunk.together([])
        for batch in read_corpus(corpus, data, SAMPLE_ROWS, scores=cleaner.settings.scores):
            self.progress("sample", batch.first_row, None)
            _, counts = tokenized_rows(batch, cleaner.clean(batch), tokenizer, cleaner.settings, self.threads)
            sample = Chunk.together([sample, counts])
            if sample.rows:
                return sample
        raise all_dropped_error(corpus_name(corpus, data), sample)

    def _split_in_place(self, corpus: CorpusConfig, files: list[ParquetFile], sample: Chunk) -> Split:
        data = self.config.data
        shards, total = list[Shard](), sum(rows for file in files for rows in file.rows)
        for file in files:
            groups = (RowGroup(rows, *estimated_tokens(sample, rows, sample.read_rows)) for rows in file.rows)
            shards.append(Shard(file.file, file.bytes, file.fingerprint, tuple(groups)))
        if (most := max(max(file.rows, default=0) for file in files)) > LARGE_GROUP_WINDOWS * data.window_rows:
            given = corpus_name(corpus, data), most, "write row groups of 10,000 rows, or set data.on_the_fly: false"
            log.warning("%s: each window reads a row group, of up to %d rows; %s", *given)
        text = TextColumns(files[0].source, files[0].target, tag_prefix(corpus.tags))
        return text_split(tuple(shards), total, {}, data.filters.max_tokens, text)


def all_corpora(config: Config) -> dict[str, CorpusConfig]:
    """Returns the training corpora and the validation corpus, by the names of their splits."""
    validation = {"validation": config.data.validation} if config.data.validation else {}
    return {**config.data.training_corpora(), **validation}


def at_commits(config: Config, commits: dict[str, str]) -> Config:
    """Returns a configuration whose Hub datasets have the commits of `hub_commits` as revisions."""
    if not commits:
        return config

    def at_commit(each: dict[str, Any]) -> dict[str, Any]:
        commit = commits.get(f"{each.get('hub')}@{each.get('revision')}")
        return {**each, "revision": commit} if commit else each

    data = json.loads(json.dumps(config.data.model_dump(mode="json")), object_hook=at_commit)
    return config.model_copy(update={"data": DataConfig.model_validate(data)})


def read_held_out(config: Config) -> HeldOut | None:
    """Reads the sentences that no training corpus may have, on either side; None if there are none, or the rule is off.
    Raises DataError: one of the corpora cannot be read."""
    data, keys = config.data, list[Keys]()
    filters = [data.filters_of(corpus) for corpus in data.training_corpora().values()]
    forms = (str, without_markup) if any("markup" in each.thresholds() for each in filters) else (str,)
    for name, corpus in (data.held_out_corpora() if data.holds_out() else {}).items():
        try:
            for batch in read_corpus(corpus, data, SAMPLE_ROWS):
                bare = [text and text.removeprefix(batch.prefix) for text in batch.source]
                kept = [text for text in (*bare, *batch.target) if text and text.strip()]
                keys.append(Sentences([comparable(form(text)) for text in kept for form in forms]).keys)
        except DataError as error:
            raise DataError(
                f"data.{name}: its sentences cannot be kept out of the training corpora: {error} Mend it, or set "
                "data.filters.rules.held_out: false."
            ) from error
    of_both = np.unique(np.concatenate(keys)) if keys else None
    return None if of_both is None else HeldOut(source=of_both, target=of_both)


def load_tokenizer(folder: Path, files: TokenizerFiles) -> Tokenizer:
    """Loads the tokenizer of a prepared folder."""
    return Tokenizer.load(folder / files.source, folder / files.target)


def estimated_tokens(sample: Chunk, rows: int, of_rows: int) -> tuple[int, int]:
    """Estimates source and target tokens of `rows` rows, if `of_rows` rows have the tokens of the sample."""
    source, target = (num_tokens(lengths) for lengths in (sample.source_lengths, sample.target_lengths))
    return round(rows * source / of_rows), round(rows * target / of_rows)


def all_dropped_error(name: str, chunk: Chunk) -> DataError:
    """Returns the error for a corpus whose rows are all dropped."""
    counts = ", ".join(f"{rule} {count}" for rule, count in chunk.dropped.items())
    advice = "; is it data.validation or test? Then data.filters.rules.held_out: false"
    same = advice if "held_out" in chunk.dropped else ""
    same += ", and whether another corpus has the same text" if "duplicates" in chunk.dropped else ""
    return DataError(
        f"{name}: all of its {chunk.read_rows} pairs were dropped ({counts}). "
        f"Look at the text, the order of its columns and data.filters{same}."
    )


def _refuse_unfit(models: list[Path], shared: bool, tags: list[str]) -> None:
    """Raises a DataError if the given models do not share one vocabulary, or lack the characters of a tag."""
    tokenizer = Tokenizer.load(*models)
    if shared and (difference := tokenizer.first_difference()) is not None:
        index, ours, theirs = difference
        raise DataError(
            f"tokenizer.shared: {models[0]} and {models[1]} are two vocabularies: piece {index} is {ours!r} in the one, "
            f"{theirs!r} in the other. Set tokenizer.shared=false, or give models with the same pieces by the same ids"
        )
    if unknown := [tag for tag in tags if not tokenizer.can_spell_source(tag)]:
        raise DataError(
            f"{models[0]}: has no pieces for the tags {' '.join(unknown)} of the training corpora: the model could not tell "
            f"them from others. Add them: dist-transformer extend-vocabulary MODEL OUT --pieces '{unknown[0]}'"
        )
