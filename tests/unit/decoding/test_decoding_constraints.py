"""What may follow: repeated n-grams against a plain search of lists, and which constraint wins."""

import pytest
import torch

from dist_transformer.config.schema import DecodingConfig
from dist_transformer.data.special_tokens import SpecialTokens
from dist_transformer.decoding.constraints import Constraints, forbid_repeats
from dist_transformer.model.search_interface import SearchInput

IDS = SpecialTokens(bos=1, eos=2, pad=0)
VOCABULARY = 8


def allowed(
    tokens: list[int], prefix: list[int], longest: int = 20, rows_per_sentence: int = 1, **settings: int
) -> list[set[int]]:
    """For each row: the tokens that may follow `tokens`."""
    config = DecodingConfig(beam_size=rows_per_sentence, max_extra_tokens=longest - 1, **settings)
    constraints = Constraints([SearchInput([2], prefix, 0)], IDS, None, config)
    logits = torch.arange(VOCABULARY).float().repeat(rows_per_sentence, 1)
    expected = logits.clone()
    constraints.apply(logits, torch.tensor([tokens] * rows_per_sentence).view(rows_per_sentence, -1))
    is_allowed = logits > -torch.inf
    assert torch.equal(logits[is_allowed], expected[is_allowed])  # what may follow is as likely as before
    return [set(row.nonzero().flatten().tolist()) for row in is_allowed]


WORDS = {3, 4, 5, 6, 7}


def test_without_constraints_all_but_padding_and_bos_may_follow() -> None:
    assert allowed([], []) == [WORDS | {2}]
    assert allowed([3, 3, 3], []) == [WORDS | {2}]


def test_the_prefix_is_followed_to_its_end_by_every_row() -> None:
    assert allowed([], [5, 4], rows_per_sentence=3) == [{5}] * 3
    assert allowed([5], [5, 4], rows_per_sentence=3) == [{4}] * 3
    assert allowed([5, 4], [5, 4], rows_per_sentence=3) == [WORDS | {2}] * 3


def test_at_the_longest_length_only_the_end_may_follow() -> None:
    assert allowed([3, 4], [], longest=4) == [WORDS | {2}]
    assert allowed([3, 4, 5], [], longest=4) == [{2}]


def test_a_prefix_may_repeat_what_search_may_not() -> None:
    assert allowed([4, 4], [4, 4, 4], no_repeat_ngram_size=1) == [{4}]
    assert allowed([4, 4, 4], [4, 4, 4], no_repeat_ngram_size=1) == [{2, 3, 5, 6, 7}]


def test_the_end_is_left_when_every_word_would_repeat() -> None:
    assert allowed([3, 4, 5, 6, 7], [], no_repeat_ngram_size=1) == [{2}]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_token_is_forbidden_exactly_if_it_ends_an_ngram_that_the_row_has(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    num_forbidden = 0
    for length in range(12):
        tokens = torch.randint(3, 5, (4, length), generator=generator)
        logits = torch.zeros(4, VOCABULARY)
        forbid_repeats(logits, tokens, size)
        for row, row_logits in zip(tokens.tolist(), logits, strict=True):
            ngrams = [row[place : place + size] for place in range(length - size + 1)]
            expected = {word for word in range(VOCABULARY) if [*row, word][-size:] in ngrams and length >= size}
            assert set((row_logits == -torch.inf).nonzero().flatten().tolist()) == expected
            num_forbidden += len(expected)
    assert num_forbidden > 10


def test_sentences_that_are_done_take_their_constraints_along() -> None:
    batch = [SearchInput([2], [3], 0), SearchInput([2], [4], 1), SearchInput([2], [5], 2)]
    constraints = Constraints(batch, IDS, None, DecodingConfig(beam_size=1))
    constraints.select([2, 0])
    logits = torch.zeros(2, VOCABULARY)
    constraints.apply(logits, torch.empty(2, 0, dtype=torch.long))
    assert (logits == 0).nonzero().tolist() == [[0, 5], [1, 3]]
