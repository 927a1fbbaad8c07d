"""Alignment of tokens: pairs made from a known lexicon in a known order are aligned as they were made."""

from pathlib import Path

import numpy as np
import pytest
from made_pairs import END, WORDS, made_pairs

from dist_transformer.data.token_aligner import Lexicon, train_aligner
from dist_transformer.errors import DataError


def test_the_likeliest_translation_of_each_token_is_that_of_the_true_lexicon():
    lexicon = train_aligner((pair for pair, _ in made_pairs(2000, seed=1)), num_target=200)
    for word in (*range(10, 10 + WORDS), END):
        first, last = np.searchsorted(lexicon.keys, [word * 200, (word + 1) * 200])
        best = lexicon.keys[first:last][lexicon.probabilities[first:last].argmax()] % 200
        assert best == (END if word == END else word + 100)
    assert np.all(np.diff(lexicon.keys) > 0)
    assert lexicon.shares.sum() == pytest.approx(1)


def test_a_lexicon_comes_back_from_its_file_and_a_damaged_file_is_named(tmp_path: Path):
    lexicon = train_aligner((pair for pair, _ in made_pairs(50, seed=1)), num_target=200)
    path = tmp_path / "lexicon.npz"
    lexicon.save(path)
    for name in ("keys", "probabilities", "shares"):
        assert np.array_equal(getattr(Lexicon.load(path), name), getattr(lexicon, name))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match=r"lexicon\.npz: no lexicon can be read .* delete it"):
        Lexicon.load(path)


def test_the_same_pairs_give_the_same_lexicon_and_none_give_an_empty_one():
    first, second = (train_aligner((pair for pair, _ in made_pairs(50, seed=1)), 200) for _ in range(2))
    assert np.array_equal(first.probabilities, second.probabilities)
    assert len(train_aligner([], 200).keys) == 0
