"""Content of the report of a prepared corpus: rows, tokens, lengths, dropped pairs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dist_transformer.config.schema import Config
from dist_transformer.data.filters import RULES
from dist_transformer.data.manifest import Split
from dist_transformer.data.prepare.state import Chunk, num_tokens

ALWAYS = ("bad_encoding", "empty", "identical", "plugin", "too_long", "length_ratio")
"""Rules that the report names even if they drop nothing."""
PERCENTILES = (50, 90, 95, 99, 100)


@dataclass(frozen=True)
class ReportedCorpus:
    """Input of the report about a corpus.

    Attributes:
        lengths: counts of the rows whose lengths are shown: all, or a sample if they are not tokenized yet.
        counts: counts of all rows; of a sample if they are read in place.
    """

    split: Split
    is_training: bool
    lengths: Chunk
    counts: Chunk


@dataclass(frozen=True)
class Report:
    """The content of report.json, and the numbers of training pairs with 0, 1, 2 ... tokens on each side."""

    value: dict[str, Any]
    source_lengths: tuple[int, ...]
    target_lengths: tuple[int, ...]


def corpus_report(config: Config, corpora: dict[str, ReportedCorpus]) -> Report:
    """Computes the report."""
    counts = {name: _counts(corpus) for name, corpus in corpora.items()}
    together = Chunk.together([corpus.lengths for corpus in corpora.values() if corpus.is_training])
    value = {"corpora": counts, "plugin": config.data.filters.plugin}
    return Report(value, together.source_lengths, together.target_lengths)


def _counts(corpus: ReportedCorpus) -> dict[str, Any]:
    split = corpus.split
    return {
        "training": corpus.is_training,
        "read_rows": split.read_rows,
        "rows": split.rows,
        "dropped": {rule: split.dropped.get(rule, 0) for rule in RULES if rule in ALWAYS or rule in split.dropped},
        "repaired": corpus.counts.repaired,
        "examples": corpus.counts.examples,
        "source_tokens": split.source_tokens,
        "target_tokens": split.target_tokens,
        "estimated_from_rows": corpus.lengths.read_rows if split.text else None,
        "source_lengths": _lengths(corpus.lengths.source_lengths, corpus.lengths.unknown[0]),
        "target_lengths": _lengths(corpus.lengths.target_lengths, corpus.lengths.unknown[1]),
    }


def _lengths(counts: Sequence[int], unknown: int) -> dict[str, float]:
    """Returns the mean and the percentiles of the lengths, and the percentage of tokens that are unknown."""
    rows_up_to, rows, tokens = np.cumsum(counts), sum(counts), num_tokens(counts)
    percentiles = {str(percent): int(np.searchsorted(rows_up_to, rows * percent / 100)) for percent in PERCENTILES}
    return {"mean": round(tokens / rows, 1), **percentiles, "unknown_percent": round(100 * unknown / tokens, 2)}
