"""Every rule drops and counts what it names, once."""

import pytest

from dist_transformer.config.data_schema import FilterConfig
from dist_transformer.data.filters import RULES, filter_lengths, filter_text
from dist_transformer.data.sources.corpus import RawBatch

PLAIN = FilterConfig(max_tokens=100, max_length_ratio=3.0)


@pytest.mark.parametrize("empty", [None, "", "  ", "\t\u3000"])
@pytest.mark.parametrize("side", ["source", "target"])
def test_a_pair_with_an_empty_side_is_dropped_as_empty(empty: str | None, side: str):
    sides = {"source": ["a", "b"], "target": ["c", "d"], side: ["x", empty]}
    assert filter_text(RawBatch(0, **sides), PLAIN) == ([0], {"empty": 1})


def test_a_badly_encoded_pair_is_counted_once_even_when_it_is_empty_too():
    batch = RawBatch(0, ["\ufffd", "b"], ["", "d"], bad_encoding=frozenset({0}))
    assert filter_text(batch, PLAIN) == ([1], {"bad_encoding": 1})


def test_identical_sides_are_dropped_only_when_asked():
    batch = RawBatch(0, ["same ", "b"], ["same", "d"])
    assert filter_text(batch, PLAIN) == ([0, 1], {})
    assert filter_text(batch, PLAIN.model_copy(update={"drop_identical": True})) == ([1], {"identical": 1})


def test_a_side_longer_than_allowed_is_dropped_and_one_as_long_is_kept():
    kept, dropped = filter_lengths([100, 101, 50], [100, 100, 101], PLAIN)
    assert kept.tolist() == [True, False, False]
    assert dropped == {"too_long": 2}


def test_a_pair_beyond_the_length_ratio_is_dropped_on_either_side_and_one_at_it_is_kept():
    kept, dropped = filter_lengths([30, 31, 10], [10, 10, 31], PLAIN)
    assert kept.tolist() == [True, False, False]
    assert dropped == {"length_ratio": 2}


def test_pairs_under_ten_tokens_pass_the_length_ratio():
    kept, dropped = filter_lengths([2, 2], [9, 10], PLAIN)
    assert kept.tolist() == [True, False]
    assert dropped == {"length_ratio": 1}


def test_a_side_that_is_only_the_end_of_sentence_is_empty():
    kept, dropped = filter_lengths([1, 5], [5, 5], PLAIN)
    assert kept.tolist() == [False, True]
    assert dropped == {"empty": 1}


def test_a_pair_that_breaks_two_rules_is_counted_by_the_first():
    _, dropped = filter_lengths([500], [2], PLAIN)
    assert dropped == {"too_long": 1}
    assert RULES.index("too_long") < RULES.index("length_ratio")


def test_an_empty_batch_has_nothing_to_drop():
    kept, dropped = filter_lengths([], [], PLAIN)
    assert (kept.tolist(), dropped) == ([], {})
