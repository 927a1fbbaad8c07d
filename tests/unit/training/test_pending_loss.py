"""The loss among the counts of the small all-reduce: exact in any order, and never an overflow."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_transformer.training.global_batch import LOSS_UNIT, fixed_point, from_fixed_point


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=64), st.randoms())
def test_the_sum_is_the_same_in_any_order_and_near_the_exact_one(losses, random):
    def told(values: list[float]) -> float:
        return from_fixed_point(*torch.tensor([fixed_point(loss) for loss in values]).sum(0).tolist())

    shuffled = random.sample(losses, len(losses))
    assert told(losses) == told(shuffled)
    assert told(losses) == pytest.approx(math.fsum(losses), abs=len(losses) * LOSS_UNIT)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, 1e30, -1e13])
def test_what_is_no_number_or_too_large_makes_the_sum_no_number(loss):
    sums = torch.tensor([fixed_point(7.0), fixed_point(loss)]).sum(0)
    assert math.isnan(from_fixed_point(*sums.tolist()))
