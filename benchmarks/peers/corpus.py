"""The text of the race: read or made up, cut into pieces once, the same lines for every trainer.

The invented text has sentences with lengths like those of English-German news; the target language says each word of the
source in the same order, spelled backwards, and leaves out or repeats some to reach its own length. So there is
something to learn, and no file to download.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import sentencepiece
from synthetic_corpus import SEED, pair_lengths, zipf_ranks
from synthetic_text import TOKENS_OF_WORD, WORDS, word

from dist_transformer.config.data_schema import TokenizerConfig
from dist_transformer.data.tokenizer.tokenizer import UNKNOWN_ID, train_tokenizer

SIDES = ("source", "target")
LONGEST_PIECES = 120
"""Longer sentences are left out for all, so that no trainer's own limit makes its work another."""
VALIDATION_PAIRS = 64
"""Some trainers do not start without; none of them gets to validating."""


@dataclass(frozen=True)
class Corpus:
    """Files in `folder`: train.source, train.target: text; *.pieces.*: the same lines as pieces with blanks between."""

    folder: Path
    pieces: tuple[str, ...]
    """Of both languages, without special ones."""
    num_pairs: int
    target_tokens: int
    """Ends of sentences included."""

    @property
    def tokenizer(self) -> Path:
        return self.folder / "pieces.model"

    def text(self, side: str) -> Path:
        return self.folder / f"train.{side}"

    def cut(self, split: str, side: str) -> Path:
        return self.folder / f"{split}.pieces.{side}"


def write_corpus(folder: Path, pairs: Iterator[tuple[str, str]], vocabulary_size: int) -> Corpus:
    """Trains the vocabulary on all of the pairs and writes the files."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = list(pairs)
    settings = TokenizerConfig(vocabulary_size=vocabulary_size)
    train_tokenizer(itertools.chain.from_iterable(lines), settings, folder / "pieces.model")
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "pieces.model"))
    cut = [model.encode(list(side), out_type=str) for side in zip(*lines, strict=True)]
    kept = [
        n
        for n, pieces in enumerate(zip(*cut, strict=True))
        if 0 < min(map(len, pieces)) <= max(map(len, pieces)) <= LONGEST_PIECES
    ]
    for number, side in enumerate(SIDES):
        _write(folder / f"train.{side}", [lines[n][number] for n in kept])
        whole = [" ".join(cut[number][n]) for n in kept]
        _write(folder / f"train.pieces.{side}", whole)
        _write(folder / f"valid.pieces.{side}", whole[:VALIDATION_PAIRS])
    pieces = tuple(model.id_to_piece(piece) for piece in range(UNKNOWN_ID + 1, model.get_piece_size()))
    return Corpus(folder, pieces, len(kept), sum(len(cut[1][n]) + 1 for n in kept))


def read_pairs(source: Path, target: Path, num_pairs: int) -> Iterator[tuple[str, str]]:
    """The first pairs of two aligned files of text."""
    with source.open(encoding="utf-8") as sources, target.open(encoding="utf-8") as targets:
        for pair in itertools.islice(zip(sources, targets, strict=False), num_pairs):
            yield pair[0].strip(), pair[1].strip()


def invented_pairs(num_pairs: int) -> Iterator[tuple[str, str]]:
    """Pairs of sentences of the invented languages; the same number gives the same text."""
    random = np.random.default_rng(SEED)
    words = np.array([word(rank) for rank in range(WORDS)], dtype=object)
    lengths = (np.maximum(1, np.rint(side / TOKENS_OF_WORD).astype(int)) for side in pair_lengths(num_pairs, random))
    for source_words, target_words in zip(*lengths, strict=True):
        source = words[zipf_ranks(WORDS, int(source_words), random)]
        target = [source[place * source_words // target_words][::-1] for place in range(target_words)]
        yield " ".join(source), " ".join(target)


def _write(path: Path, lines: list[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
