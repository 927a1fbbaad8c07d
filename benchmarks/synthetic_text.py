"""A parquet file of text in an invented language, prepared so that loader processes tokenize it.

Its sentences have lengths like those of synthetic_corpus.py; words are drawn by Zipf's law, the frequent ones short.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from synthetic_corpus import SEED, Corpus, pair_lengths, synthetic_config, zipf_ranks

from dist_transformer.data.prepare.preparation import prepare

WORDS = 60_000
TOKENS_OF_WORD = 1.2
"""Approximate number of tokens per word with a tokenizer trained on the text."""
TRAINING_SENTENCES = 20_000
SYLLABLE_LETTERS = ("bdfghklmnprstvwz", "aeiou", "lmnrst")


def prepare_text(folder: Path, num_pairs: int, vocabulary: int, row_group_rows: int) -> Corpus:
    """Prepares the text of `write_text`, with a BPE model trained on it."""
    write_text(folder, num_pairs, row_group_rows)
    tokenizer = {"vocabulary_size": vocabulary, "training_sentences": TRAINING_SENTENCES}
    config = synthetic_config(folder, {"on_the_fly": True}, tokenizer)
    return Corpus(folder / "prepared", prepare(config, folder / "prepared"))


def write_text(folder: Path, num_pairs: int, row_group_rows: int) -> None:
    """Writes `text.parquet` with the columns `en` and `de` into `folder`; the same arguments give the same file."""
    random = np.random.default_rng(SEED)
    sides = [_sentences(lengths, random) for lengths in pair_lengths(num_pairs, random)]
    pq.write_table(pa.table({"en": sides[0], "de": sides[1]}), folder / "text.parquet", row_group_size=row_group_rows)


def _sentences(lengths: NDArray[np.int64], random: np.random.Generator) -> list[str]:
    ends = np.cumsum(np.maximum(1, np.rint((lengths - 1) / TOKENS_OF_WORD).astype(np.int64)))
    words = np.array([word(rank) for rank in range(WORDS)], dtype=object)[zipf_ranks(WORDS, int(ends[-1]), random)]
    return [" ".join(words[first:last]) for first, last in zip([0, *ends[:-1]], ends, strict=True)]


def word(rank: int) -> str:
    """Returns the word of a rank: of one syllable for the first ranks, of two for the next, ..."""
    letters = []
    while True:
        for choice in SYLLABLE_LETTERS:
            rank, letter = divmod(rank, len(choice))
            letters.append(choice[letter])
        if rank == 0:
            return "".join(letters)
        rank -= 1
