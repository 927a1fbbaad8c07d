"""Failures: Young's and Daly's published formulas, the closed form against played runs, properties of both."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from played_runs import played_runs

from dist_transformer.planning.failures import (
    SLIGHT_LOSS,
    Conditions,
    barren_share,
    best_interval,
    expected_attempt,
    young_interval,
)
from dist_transformer.planning.scale import given_up_share

HOUR = 3600.0
CALM = Conditions(1e12, 0, 0, 0, 0, 0)
BUSY = Conditions(
    between_failures_seconds=6 * HOUR,
    detect_seconds=300,
    requeue_seconds=120,
    restart_seconds=90,
    save_seconds=2,
    write_seconds=40,
)


def daly_interval(conditions):
    """Daly (2006), equation 37: Young's with two more terms, without the save itself; M if a save takes 2 M or more."""
    save, mean = conditions.save_seconds, conditions.between_failures_seconds
    root = math.sqrt(save / (2 * mean))
    return mean if save >= 2 * mean else young_interval(conditions) * (1 + root / 3 + root**2 / 9) - save


def dalys_wall_seconds(conditions, interval):
    """Of a second of training: the complete model of Daly (2006), equation 20."""
    mean, save, restart = conditions.between_failures_seconds, conditions.save_seconds, conditions.restart_seconds
    return mean * math.exp(restart / mean) * math.expm1((interval + save) / mean) / interval


@pytest.mark.parametrize(("hours", "minutes"), [(24, 117), (6, 57), (0.25, 9.1)])
def test_dalys_interval_is_that_of_his_figures_3_to_5(hours, minutes):
    conditions = replace(CALM, between_failures_seconds=hours * HOUR, save_seconds=300)
    assert daly_interval(conditions) / 60 == pytest.approx(minutes, rel=0.01)


def test_youngs_interval_is_the_root_and_dalys_comes_near_it_where_saves_are_cheap():
    conditions = replace(CALM, between_failures_seconds=1e6, save_seconds=0.02)
    assert young_interval(conditions) == pytest.approx(200)
    assert daly_interval(conditions) == pytest.approx(200, rel=1e-3)
    assert daly_interval(replace(conditions, save_seconds=3e6)) == 1e6


@pytest.mark.parametrize("interval", [60.0, 600.0, 7200.0, 90000.0])
@pytest.mark.parametrize("mean", [900.0, 6 * HOUR])
def test_without_write_limit_and_wait_the_closed_form_is_dalys_complete_model(interval, mean):
    conditions = Conditions(mean, 0, 0, restart_seconds=600, save_seconds=300, write_seconds=0)
    share = expected_attempt(conditions, interval).kept_share
    assert 1 / share == pytest.approx(dalys_wall_seconds(conditions, interval))


def test_without_failures_only_saves_and_the_restarts_at_the_limit_cost_something():
    conditions = replace(CALM, save_seconds=3, write_seconds=20)
    assert expected_attempt(conditions, 57).kept_share == pytest.approx(57 / 60)
    assert expected_attempt(replace(conditions, write_seconds=75), 57).kept_share == pytest.approx(57 / 75)
    limited = replace(conditions, restart_seconds=100, limit_seconds=700)
    assert expected_attempt(limited, 57).kept_share == pytest.approx(570 / (700 + 3 + 20))
    done = played_runs(replace(conditions, restart_seconds=100), 57, 570, num_runs=3, patience=1, seed=1)
    assert done.wall_seconds == pytest.approx(100 + 570 + 9 * 3 + 3 + 20)
    assert (done.attempts, done.gave_up_share) == (1, 0)


def test_more_failures_longer_outages_and_slower_saves_each_leave_less():
    def kept(**changes):
        return expected_attempt(replace(BUSY, **changes), 600).kept_share

    worse = ("detect_seconds", "restart_seconds", "save_seconds", "write_seconds")
    assert all(kept(**{name: 2 * getattr(BUSY, name)}) < kept() for name in worse)
    means = [kept(between_failures_seconds=hours * HOUR) for hours in (0.1, 1, 10, 100)]
    assert means == sorted(means)
    assert kept(requeue_seconds=1e4) == kept()  # the nodes are others' meanwhile
    assert expected_attempt(BUSY, 600).wall == pytest.approx(expected_attempt(BUSY, 600).held + 120)


@pytest.mark.parametrize("mean", [1200.0, 6 * HOUR, 100 * HOUR])
@pytest.mark.parametrize("limit", [math.inf, 4 * HOUR])
@pytest.mark.parametrize("write", [0.0, 40.0, 900.0])
def test_played_runs_keep_what_the_closed_form_says(mean, limit, write):
    conditions = replace(BUSY, between_failures_seconds=mean, limit_seconds=limit, write_seconds=write)
    expected = expected_attempt(conditions, 600)
    found = played_runs(conditions, 600, 400 * expected.kept, num_runs=200, patience=3, seed=1)
    assert found.kept_share == pytest.approx(expected.kept_share, rel=0.01)
    assert found.wall_seconds == pytest.approx(400 * expected.wall, rel=0.01)
    assert found.attempts == pytest.approx(400, rel=0.02)  # of the last one only a part is needed


@pytest.mark.parametrize("patience", [1, 5, 9])
@pytest.mark.parametrize("limit", [math.inf, 400.0])
def test_as_many_played_runs_are_given_up_as_the_closed_form_says(limit, patience):
    conditions = replace(BUSY, between_failures_seconds=900.0, limit_seconds=limit)
    barren, expected = barren_share(conditions, 600), expected_attempt(conditions, 600)
    assert barren == pytest.approx(1 - math.exp(-min(90 + 602 + 40, limit + 42) / 900))
    found = played_runs(conditions, 600, 40 * expected.kept, num_runs=4000, patience=patience, seed=2)
    assert given_up_share(40, barren, patience) == pytest.approx(found.gave_up_share, abs=0.05)


def test_a_job_that_ends_before_it_trains_makes_no_checkpoint():
    hopeless = replace(BUSY, limit_seconds=50)
    assert expected_attempt(hopeless, 600).kept_share == 0
    assert barren_share(hopeless, 600) == 1
    assert given_up_share(math.inf, 1.0, 3) == 1
    assert barren_share(CALM, 600) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("limit", [math.inf, 24 * HOUR])
def test_the_rarer_failures_are_the_more_is_kept_up_to_all_but_saves_and_restarts(limit):
    conditions = replace(BUSY, limit_seconds=limit)
    means = [10.0**power for power in range(4, 31)]
    shares = [expected_attempt(replace(conditions, between_failures_seconds=mean), 600).kept_share for mean in means]
    assert all(later >= earlier - 1e-9 for earlier, later in itertools.pairwise(shares))
    never = 600 / (600 + 2) if math.isinf(limit) else shares[means.index(1e12)]
    assert shares[-1] == pytest.approx(never, rel=1e-6)


@pytest.mark.parametrize("mean", [0.5 * HOUR, 6 * HOUR, 1000 * HOUR])
@pytest.mark.parametrize("write", [1.0, 300.0])
def test_no_other_interval_keeps_more_than_the_best(mean, write):
    conditions = replace(BUSY, between_failures_seconds=mean, write_seconds=write)
    found = best_interval(conditions, 0.5)
    best = expected_attempt(conditions, found.best_steps * 0.5).kept_share
    for interval in (*np.geomspace(1, 10 * mean, 300), young_interval(conditions), daly_interval(conditions)):
        assert expected_attempt(conditions, interval).kept_share < best + 1e-5
    for steps in (found.least_steps, found.most_steps):
        assert best - SLIGHT_LOSS <= expected_attempt(conditions, steps * 0.5).kept_share
    assert expected_attempt(conditions, 1.2 * found.most_steps * 0.5).kept_share < best - SLIGHT_LOSS


def test_every_interval_between_the_shortest_and_the_longest_good_one_is_good():
    conditions = Conditions(3 * HOUR, 300, 120, 600, 120, 600, 4 * HOUR)
    found = best_interval(conditions, 1.0)
    assert found.least_steps <= found.best_steps <= found.most_steps
    best = expected_attempt(conditions, found.best_steps).kept_share
    for steps in range(found.least_steps, found.most_steps + 1):
        assert expected_attempt(conditions, steps).kept_share >= best - 1.5 * SLIGHT_LOSS


def test_where_saves_cost_nothing_long_intervals_are_as_good_as_failures_are_rare():
    conditions = Conditions(800 * HOUR, 300, 120, 60, 0, 0)
    assert best_interval(conditions, 0.5).most_steps > 0.9 * 2 * SLIGHT_LOSS * 800 * HOUR / 0.5


def test_where_saves_are_the_only_cost_the_best_interval_is_dalys():
    conditions = replace(CALM, between_failures_seconds=6 * HOUR, save_seconds=300)
    assert best_interval(conditions, 1.0).best_steps == pytest.approx(daly_interval(conditions), rel=0.02)
