"""A parquet file of text in an invented language, prepared so that loader processes tokenize it.

Its sentences have lengths like those of synthetic_corpus.py; words are drawn by Zipf's law, the frequent ones short.
"""

from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from synthetic_corpus import SEED, Corpus, pair_lengths, synthetic_config, zipf_ranks

from dist_transformer.config.data_schema import TokenizerConfig
from dist_transformer.data.prepare.preparation import prepare
from dist_transformer.data.tokenizer.tokenizer import train_tokenizer

WORDS = 60_000
TOKENS_OF_WORD = 1.2
"""Approximate number of tokens per word with a tokenizer trained on the text."""
TRAINING_SENTENCES = 20_000
SYLLABLE_LETTERS = ("bdfghklmnprstvwz", "aeiou", "lmnrst")


def prepare_text(folder: Path, num_pairs: int, vocabulary: int, row_group_rows: int) -> Corpus:
    """Prepares the text of `write_text`, with a BPE model trained on it."""
    write_text(folder, num_pairs, row_group_rows)
    config = synthetic_config(folder, {"on_the_fly": True}, trained_tokenizer(folder, vocabulary))
    return Corpus(folder / "prepared", prepare(config, folder / "prepared"))


def trained_tokenizer(folder: Path, vocabulary: int) -> dict[str, object]:
    """Settings of the tokenizer: a BPE model trained on the first sentences of `folder`/text.parquet, which takes seconds."""
    columns = pq.read_table(folder / "text.parquet").slice(0, TRAINING_SENTENCES // 2).to_pydict()
    model = folder / "text.model"
    train_tokenizer(chain(*columns.values()), TokenizerConfig(vocabulary_size=vocabulary), model)
    return {"source_model": str(model)}


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
