"""Content of the report of a prepared corpus: rows, tokens, lengths, repeated pairs, overlap with the held-out sets.

Pairs that occur more than once, and those of the validation and test sets that occur in training, are found by hashes
of the kept pairs without tags (duplicates.py). Corpora that are read in place are not searched for them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dist_transformer.config.data_schema import CorpusConfig
from dist_transformer.config.schema import Config
from dist_transformer.data.filters import RULES
from dist_transformer.data.manifest import Split
from dist_transformer.data.prepare.duplicates import Hashes, count_contained, count_repeated, load_hashes, pair_hashes
from dist_transformer.data.prepare.state import Chunk, num_tokens
from dist_transformer.data.sources.corpus import read_corpus
from dist_transformer.errors import DataError, MachineError

PERCENTILES = (50, 90, 95, 99, 100)
BATCH_ROWS = 8192


@dataclass(frozen=True)
class ReportedCorpus:
    """Input of the report about a corpus.

    Attributes:
        lengths: counts of the rows whose lengths are shown: all, or a sample if they are not tokenized yet.
        pair_files: hashes of the kept pairs; None: read in place.
        source_files: hashes of their sources alone.
    """

    split: Split
    is_training: bool
    lengths: Chunk
    pair_files: list[Path] | None
    source_files: list[Path]


@dataclass(frozen=True)
class Report:
    """The content of report.json, and the numbers of training pairs with 0, 1, 2 ... tokens on each side."""

    value: dict[str, Any]
    source_lengths: tuple[int, ...]
    target_lengths: tuple[int, ...]


def corpus_report(config: Config, corpora: dict[str, ReportedCorpus]) -> Report:
    """Computes the report. A test set that cannot be read is reported as such, since it is not prepared."""
    training = {name: corpus for name, corpus in corpora.items() if corpus.is_training}
    compared = [corpus for corpus in training.values() if corpus.pair_files is not None]
    pair_files = [path for corpus in compared for path in corpus.pair_files or ()]
    source_files = [path for corpus in compared for path in corpus.source_files]
    value = {
        "corpora": {name: _counts(corpus) for name, corpus in corpora.items()},
        "repeated_pairs": count_repeated(pair_files),
        "compared_pairs": sum(corpus.split.rows for corpus in compared),
        "plugin": config.data.filters.plugin,
        "not_compared": [name for name, corpus in training.items() if corpus.pair_files is None],
        "overlap": _overlaps(config, corpora, pair_files, source_files) if compared else {},
    }
    together = Chunk.together([corpus.lengths for corpus in training.values()])
    return Report(value, together.source_lengths, together.target_lengths)


def _counts(corpus: ReportedCorpus) -> dict[str, Any]:
    split = corpus.split
    return {
        "training": corpus.is_training,
        "read_rows": split.read_rows,
        "rows": split.rows,
        "dropped": {rule: split.dropped.get(rule, 0) for rule in RULES},
        "source_tokens": split.source_tokens,
        "target_tokens": split.target_tokens,
        "estimated_from_rows": corpus.lengths.read_rows if split.text else None,
        "source_lengths": _lengths(corpus.lengths.source_lengths),
        "target_lengths": _lengths(corpus.lengths.target_lengths),
    }


def _lengths(counts: Sequence[int]) -> dict[str, float]:
    """Returns the mean and the percentiles of the lengths."""
    rows_up_to = np.cumsum(counts)
    rows = int(rows_up_to[-1])
    percentiles = {str(percent): int(np.searchsorted(rows_up_to, rows * percent / 100)) for percent in PERCENTILES}
    return {"mean": round(num_tokens(counts) / rows, 1), **percentiles}


def _overlaps(
    config: Config, corpora: dict[str, ReportedCorpus], pair_files: list[Path], source_files: list[Path]
) -> dict[str, Any]:
    """Returns the overlap of the validation and the test set, as far as given, with the training corpora."""
    overlaps: dict[str, Any] = {}
    if "validation" in corpora:
        overlaps["validation"] = _overlap(_stored_hashes(corpora["validation"]), pair_files, source_files)
    if config.data.test is not None:
        try:
            overlaps["test"] = _overlap(_read_hashes(config.data.test, config), pair_files, source_files)
        except (DataError, MachineError) as error:
            overlaps["test"] = {"problem": str(error)}
    return overlaps


def _overlap(hashes: Hashes, pair_files: list[Path], source_files: list[Path]) -> dict[str, int]:
    return {
        "of_pairs": len(hashes.pairs),
        "pairs": count_contained(hashes.pairs, pair_files),
        "sources": count_contained(hashes.sources, source_files),
    }


def _stored_hashes(corpus: ReportedCorpus) -> Hashes:
    pairs, sources = (
        np.concatenate([load_hashes(path) for path in files])
        for files in (corpus.pair_files or [], corpus.source_files)
    )
    return Hashes(pairs, sources)


def _read_hashes(corpus: CorpusConfig, config: Config) -> Hashes:
    """Hashes all pairs of a held-out set."""
    batches = [
        pair_hashes([(text or "").removeprefix(batch.prefix) for text in batch.source], [t or "" for t in batch.target])
        for batch in read_corpus(corpus, config.data, BATCH_ROWS)
    ]
    return Hashes.together(batches)
