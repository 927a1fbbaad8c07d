"""Token buckets: the budget is kept, nothing is lost, and padding stays within the house's budget."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dist_transformer.data.batching import cut_by_tokens, snake_order

LENGTHS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=200)


@given(LENGTHS, st.integers(120, 2000))
def test_every_row_is_in_one_run_and_no_run_is_above_the_budget(lengths, max_tokens):
    source, target = np.array(lengths).T
    order = snake_order(source, target)
    runs = cut_by_tokens(source[order], target[order], max_tokens)
    assert sorted(order) == list(range(len(lengths)))
    assert [first for first, _ in runs] == [0, *(last for _, last in runs[:-1])]
    assert runs[-1][1] == len(lengths)
    for first, last in runs:
        rows = order[first:last]
        assert (last - first) * (source[rows].max() + target[rows].max()) <= max_tokens


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
