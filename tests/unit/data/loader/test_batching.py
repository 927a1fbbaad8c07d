"""Token buckets: the budget is kept, nothing is lost, and padding stays within the house's budget."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_transformer.data.loader.batching import buckets_of, cut_by_tokens, snake_order, straggler_ratio

LENGTHS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=200)


def runs_row_by_row(source, target, max_tokens):
    """`cut_by_tokens` in plain words: a row begins a new run when it would make the present one too large."""
    runs, first = [], 0
    for row in range(1, len(source)):
        rows = slice(first, row + 1)
        if (row + 1 - first) * (source[rows].max() + target[rows].max()) > max_tokens:
            runs.append((first, row))
            first = row
    return [*runs, (first, len(source))]


@given(LENGTHS, st.integers(2, 2000))
def test_runs_are_those_of_taking_row_after_row_until_the_budget_is_full(lengths, max_tokens):
    source, target = np.array(lengths).T
    assert cut_by_tokens(source, target, max_tokens) == runs_row_by_row(source, target, max_tokens)


@given(LENGTHS, st.integers(120, 2000), st.integers(0, 9))
def test_every_row_is_in_one_bucket_that_is_as_long_as_its_longest_and_within_the_budget(lengths, max_tokens, seed):
    source, target = np.array(lengths).T
    order = np.random.default_rng(seed).permutation(len(lengths))
    buckets = buckets_of(source, target, order, max_tokens)
    assert sorted(row for bucket in buckets for row in bucket.members) == list(range(len(lengths)))
    for bucket in buckets:
        assert bucket.rows == len(bucket.members)
        assert bucket.source_length == source[bucket.members].max()
        assert bucket.target_length == target[bucket.members].max()
        assert bucket.rows * (bucket.source_length + bucket.target_length) <= max_tokens


def test_rows_of_equal_lengths_stay_in_the_order_in_which_they_were_shuffled():
    order = np.random.default_rng(1).permutation(100)
    (bucket,) = buckets_of(np.full(100, 5), np.full(100, 7), order, 1200)
    assert bucket.members.tolist() == order.tolist()


def test_no_rows_make_no_bucket():
    empty = np.zeros(0, np.int64)
    assert buckets_of(empty, empty, empty, 100) == []


def test_a_row_longer_than_the_budget_goes_alone():
    assert cut_by_tokens(np.array([5, 500, 5]), np.array([5, 500, 5]), 100) == [(0, 1), (1, 2), (2, 3)]


def test_padding_of_lengths_like_real_text_is_at_most_seven_percent_and_below_the_usual_sort():
    random = np.random.default_rng(1)
    source = np.clip(random.lognormal(3.2, 0.55, 20_000), 1, 200).astype(np.int64)
    target = np.clip(source * random.lognormal(0.05, 0.18, 20_000), 1, 200).astype(np.int64)

    def waste(order):
        runs = cut_by_tokens(source[order], target[order], 8192)
        padded = sum((b - a) * (source[order[a:b]].max() + target[order[a:b]].max()) for a, b in runs)
        return 1 - (source.sum() + target.sum()) / padded

    assert waste(snake_order(source, target)) <= 0.07
    assert waste(snake_order(source, target)) < waste(np.lexsort((source, target)))


def test_the_straggler_ratio_is_the_largest_lane_to_the_mean_of_those_that_have_a_batch():
    assert straggler_ratio([8000, 8000, 8000]) == 1
    assert straggler_ratio([3000, 1000]) == pytest.approx(1.5)
    assert straggler_ratio([3000, 0, 1000, 0]) == pytest.approx(1.5)
    assert straggler_ratio([0, 0]) == 1
