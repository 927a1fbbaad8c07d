"""Curves: read from metrics.jsonl as they were written, thinned without losing a spike."""

import tracemalloc

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from run_builder import append, train_record, validation_record

from dist_transformer.reporting.curves import Curve, read_curves, thinned


def curve_of(values: list[float]) -> Curve:
    return Curve(np.arange(1.0, len(values) + 1), np.asarray(values))


def test_every_number_of_every_record_is_a_point(tmp_path):
    records = [train_record(step) for step in (5, 10, 15)] + [validation_record(10, 20)]
    append(tmp_path / "metrics.jsonl", records)
    curves = read_curves(tmp_path / "metrics.jsonl")
    for name, value in records[0].items():
        if isinstance(value, int | float) and name != "step":
            found = curves.of("train", name)
            assert found is not None
            assert found.steps.tolist() == [5, 10, 15]
            assert found.values.tolist() == [record[name] for record in records[:3]]
    newstest = curves.of("validation", "newstest/bleu")
    assert newstest is not None
    assert newstest.values.tolist() == [records[3]["newstest/bleu"]]
    assert curves.newest["train"] == records[2]
    assert curves.last_step == 15


def test_what_is_torn_is_left_out_and_what_is_missing_has_no_curves(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append(path, [train_record(5)])
    with path.open("a") as file:
        file.write('{"event": "train", "step": 10, "lo')
    loss = read_curves(path).of("train", "loss")
    assert loss is not None
    assert loss.steps.tolist() == [5]
    assert read_curves(tmp_path / "nothing").names("train") == []
    assert read_curves(tmp_path / "nothing").last_step == 0


def test_curves_of_a_long_run_are_read_in_the_memory_of_their_numbers(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append(path, [{"event": "train", "step": step, "loss": step / 7, "nll": step / 9} for step in range(1000, 6000)])
    read_curves(path)  # what the first reading imports is not counted
    tracemalloc.start()
    try:
        curves = read_curves(path)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    size = sum(each.steps.nbytes + each.values.nbytes for each in curves.by_event["train"].values())
    assert most < 3 * size  # lists of floats and integers take almost five times


def test_values_that_are_not_finite_are_kept_apart(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append(path, [{"event": "train", "step": step, "loss": loss} for step, loss in ((1, "nan"), (2, 3.0), (3, "inf"))])
    loss = read_curves(path).of("train", "loss")
    assert loss is not None
    finite = loss.finite()
    assert finite is not None
    assert (finite.steps.tolist(), finite.values.tolist()) == ([2], [3.0])
    assert loss.best("bleu") == (2, 3.0)
    assert curve_of([float("nan")]).finite() is None


@given(st.lists(st.floats(-1e6, 1e6), min_size=30, max_size=300), st.integers(2, 25))
def test_a_thinned_curve_has_few_points_and_all_extremes(values, num_points):
    few = thinned(curve_of(values), num_points)
    assert len(few.steps) <= num_points
    assert few.low is not None
    assert few.high is not None
    assert few.high.max() == max(values)
    assert few.low.min() == min(values)
    slack = 1e-9 * max(1.0, max(map(abs, values)))
    assert ((few.low - slack <= few.middle) & (few.middle <= few.high + slack)).all()
    assert (np.diff(few.steps) > 0).all()


def test_a_short_curve_is_drawn_as_it_is():
    curve = curve_of([3.0, 1.0, 2.0])
    few = thinned(curve, 3)
    assert few.low is None
    assert few.middle.tolist() == [3.0, 1.0, 2.0]


def test_the_best_of_a_loss_is_the_lowest_and_of_a_score_the_highest():
    curve = curve_of([3.0, 1.0, 4.0, 1.0])
    assert curve.best("newstest/loss") == (2, 1.0)
    assert curve.best("newstest/bleu") == (3, 4.0)
    assert curve.best("newstest/of_a_later_version") is None  # in which direction it is better is not known
