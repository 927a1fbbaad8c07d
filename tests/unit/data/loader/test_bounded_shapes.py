"""Bounded shapes: every micro-batch has one of a short closed list, holds its rows, and is seldom part-filled."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_transformer.data.loader.bounded_shapes import bounded_buckets, bounded_shapes

SIZES = st.integers(1, 300).flatmap(lambda longest: st.tuples(st.just(longest), st.integers(2 * longest, 9000)))


@given(SIZES)
def test_every_shape_is_within_the_budget_and_some_shape_holds_any_pair(sizes):
    longest, max_tokens = sizes
    shapes = bounded_shapes(max_tokens, longest)
    assert len(set(shapes)) == len(shapes) <= 40
    assert all(rows >= 1 and rows * (source + target) <= max_tokens for rows, source, target in shapes)
    assert max(source for _, source, _ in shapes) == max(target for _, _, target in shapes) >= longest
    assert (shapes[-1][1], shapes[-1][2]) == (max(source for _, source, _ in shapes),) * 2


def test_sizes_are_multiples_of_eight_where_the_budget_is_not_tight():
    shapes = bounded_shapes(8192, 256)
    assert all(number % 8 == 0 for shape in shapes for number in shape)
    assert len({source for _, source, _ in shapes}) == 12


def test_a_budget_of_exactly_one_longest_pair_is_enough():
    assert bounded_shapes(500, 250)[-1] == (1, 250, 250)


@given(SIZES, st.integers(0, 400), st.integers(0, 2**32 - 1))
def test_every_row_is_once_in_a_bucket_that_has_one_of_the_shapes_and_holds_it(sizes, num_rows, seed):
    longest, max_tokens = sizes
    random = np.random.default_rng(seed)
    source, target = random.integers(1, longest + 1, (2, num_rows))
    buckets = bounded_buckets(source, target, random.permutation(num_rows), max_tokens, longest)
    assert sorted(row for bucket in buckets for row in bucket.members) == list(range(num_rows))
    for members, *shape in buckets:
        assert tuple(shape) in bounded_shapes(max_tokens, longest)
        assert 1 <= len(members) <= shape[0]
        assert source[members].max() <= shape[1]
        assert target[members].max() <= shape[2]


@given(SIZES, st.integers(1, 400), st.integers(0, 2**32 - 1))
def test_a_part_filled_bucket_has_none_above_it_that_could_have_taken_its_rows(sizes, num_rows, seed):
    longest, max_tokens = sizes
    random = np.random.default_rng(seed)
    source, target = random.integers(1, longest + 1, (2, num_rows))
    buckets = bounded_buckets(source, target, np.arange(num_rows), max_tokens, longest)
    part_filled = [bucket for bucket in buckets if len(bucket.members) < bucket.rows]
    for one in part_filled:
        for other in buckets:
            covers = other.source_length >= one.source_length and other.target_length >= one.target_length
            assert not covers or (other.source_length, other.target_length) == (one.source_length, one.target_length)


def test_padding_of_lengths_like_real_text_is_at_most_fifteen_percent_with_two_part_filled_buckets():
    random = np.random.default_rng(1)
    source = np.clip(random.lognormal(3.27, 0.44, 20_000), 2, 256).astype(np.int64)
    target = np.clip(source * random.lognormal(0.05, 0.18, 20_000), 2, 256).astype(np.int64)
    buckets = bounded_buckets(source, target, np.arange(20_000), 8192, 256)
    padded = sum(bucket.rows * (bucket.source_length + bucket.target_length) for bucket in buckets)
    assert 1 - (source.sum() + target.sum()) / padded <= 0.15
    assert sum(len(bucket.members) < bucket.rows for bucket in buckets) <= 2


def test_rows_go_into_buckets_in_the_order_in_which_they_were_shuffled():
    order = np.random.default_rng(1).permutation(512)
    (bucket,) = bounded_buckets(np.full(512, 5), np.full(512, 7), order, 8192, 256)
    assert bucket.members.tolist() == order.tolist()


def test_a_row_above_the_longest_side_is_refused():
    with pytest.raises(AssertionError):
        bounded_buckets(np.array([9]), np.array([3]), np.array([0]), 100, 8)
