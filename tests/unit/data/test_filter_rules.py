"""Every rule drops and counts what it names, once."""

import pytest

from dist_transformer.config.data_schema import FilterConfig
from dist_transformer.data.filters import RULES, Cleaner, KeptText, filter_lengths
from dist_transformer.data.sources.corpus import RawBatch

PLAIN = FilterConfig(max_tokens=100, max_length_ratio=3.0)


def filtered(batch: RawBatch, settings: FilterConfig) -> tuple[list[int], dict[str, int]]:
    """Positions of the kept pairs, and the number of dropped ones by rule."""
    text = Cleaner(settings, ("en", "de")).clean(batch)
    return text.positions.tolist(), dict(text.counts())


def filtered_by_length(source: list[int], target: list[int]) -> tuple[list[int], dict[str, int]]:
    text = KeptText.all_of(["x"] * len(source), ["y"] * len(source)).without(filter_lengths(source, target, PLAIN))
    return text.positions.tolist(), dict(text.counts())


@pytest.mark.parametrize("empty", [None, "", "  ", "\t\u3000"])
@pytest.mark.parametrize("side", ["source", "target"])
def test_a_pair_with_an_empty_side_is_dropped_as_empty(empty: str | None, side: str):
    sides = {"source": ["a", "b"], "target": ["c", "d"], side: ["x", empty]}
    assert filtered(RawBatch(0, **sides), PLAIN) == ([0], {"empty": 1})


def test_a_badly_encoded_pair_is_counted_once_even_when_it_is_empty_too():
    batch = RawBatch(0, ["\ufffd", "b"], ["", "d"], bad_encoding=frozenset({0}))
    assert filtered(batch, PLAIN) == ([1], {"bad_encoding": 1})


def test_identical_sides_are_dropped_only_when_asked():
    batch = RawBatch(0, ["same ", "b"], ["same", "d"])
    assert filtered(batch, PLAIN) == ([0, 1], {})
    assert filtered(batch, PLAIN.model_copy(update={"drop_identical": True})) == ([1], {"identical": 1})


def test_a_side_longer_than_allowed_is_dropped_and_one_as_long_is_kept():
    assert filtered_by_length([100, 101, 50], [100, 100, 101]) == ([0], {"too_long": 2})


def test_a_pair_beyond_the_length_ratio_is_dropped_on_either_side_and_one_at_it_is_kept():
    assert filtered_by_length([30, 31, 10], [10, 10, 31]) == ([0], {"length_ratio": 2})


def test_pairs_under_ten_tokens_pass_the_length_ratio():
    assert filtered_by_length([2, 2], [9, 10]) == ([0], {"length_ratio": 1})


def test_a_side_that_is_only_the_end_of_sentence_is_empty():
    assert filtered_by_length([1, 5], [5, 5]) == ([1], {"empty": 1})


def test_a_pair_that_breaks_two_rules_is_counted_by_the_first():
    assert filtered_by_length([500], [2]) == ([], {"too_long": 1})
    assert RULES.index("too_long") < RULES.index("length_ratio")


def test_an_empty_batch_has_nothing_to_drop():
    assert filtered_by_length([], []) == ([], {})
