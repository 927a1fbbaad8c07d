"""The plan: every row of an epoch in exactly one window, whatever the corpus and the lanes."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from dist_transformer.data.plan import EpochPlan

GROUPS = st.lists(st.integers(1, 50), min_size=1, max_size=30).map(tuple)


def rows_of(plan: EpochPlan, lane: int) -> list[tuple[int, int]]:
    return [
        (piece.row_group, row)
        for window in range(plan.num_windows(lane))
        for piece in plan.slices(lane, window)
        for row in range(piece.first, piece.last)
    ]


@given(GROUPS, st.integers(1, 12), st.integers(1, 100), st.integers(0, 5), st.integers(0, 3))
def test_every_row_of_an_epoch_lies_in_exactly_one_window(groups, num_lanes, window_rows, seed, epoch):
    plan = EpochPlan(groups, num_lanes, window_rows, seed, epoch)
    found = Counter(place for lane in range(num_lanes) for place in rows_of(plan, lane))
    assert found == Counter((group, row) for group, rows in enumerate(groups) for row in range(rows))


@given(GROUPS, st.integers(1, 12), st.integers(1, 100))
def test_lanes_are_equally_long_and_windows_no_longer_than_asked(groups, num_lanes, window_rows):
    plan = EpochPlan(groups, num_lanes, window_rows, 0, 0)
    lengths = [len(rows_of(plan, lane)) for lane in range(num_lanes)]
    assert max(lengths) - min(lengths) <= 1
    for lane in range(num_lanes):
        for window in range(plan.num_windows(lane)):
            assert 0 < sum(piece.last - piece.first for piece in plan.slices(lane, window)) <= window_rows


def test_epochs_and_seeds_give_other_orders_and_the_same_ones_again():
    groups = (10,) * 40
    orders = {(seed, epoch): tuple(EpochPlan(groups, 4, 10, seed, epoch).order) for seed in (1, 2) for epoch in (0, 1)}
    assert len(set(orders.values())) == 4
    assert tuple(EpochPlan(groups, 4, 10, 2, 1).order) == orders[2, 1]
