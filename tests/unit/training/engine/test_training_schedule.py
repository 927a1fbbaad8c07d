"""Learning rates against the formulas they come from."""

import math
import typing

import pytest

from dist_transformer.config.checks import cross_problems
from dist_transformer.config.schema import ENDLESS, Config, ScheduleConfig
from dist_transformer.training.engine.schedule import learning_rate

DATA = {"train": {"demo": "train"}}


def config(**sections: dict) -> Config:
    return Config.model_validate({"data": DATA, **sections})


@pytest.mark.parametrize("step", [1, 7, 3999, 4000, 4001, 40_000, 100_000])
def test_the_default_is_the_formula_of_section_5_3(step):
    expected = 512**-0.5 * min(step**-0.5, step * 4000**-1.5)
    assert learning_rate(config(), step) == pytest.approx(expected, rel=1e-12)


def test_a_given_peak_is_reached_at_the_end_of_warm_up():
    made = config(optimizer={"learning_rate": 3e-4}, schedule={"warmup_steps": 10})
    assert learning_rate(made, 1) == pytest.approx(3e-5)
    assert learning_rate(made, 10) == pytest.approx(3e-4)
    assert learning_rate(made, 40) == pytest.approx(1.5e-4)


@pytest.mark.parametrize(
    ("name", "share"),
    [("linear", lambda p: 1 - p), ("cosine", lambda p: 0.5 * (1 + math.cos(math.pi * p))), ("constant", lambda p: 1.0)],
)
def test_other_schedules_follow_their_formula_and_still_learn_in_the_last_step(name, share):
    made = config(
        optimizer={"learning_rate": 1.0}, schedule={"name": name, "warmup_steps": 10}, training={"max_steps": 109}
    )
    for step in (10, 35, 109):
        assert learning_rate(made, step) == pytest.approx(share((step - 10) / 100))
    assert learning_rate(made, 109) > 0


@pytest.mark.parametrize("name", typing.get_args(ScheduleConfig.model_fields["name"].annotation))
def test_a_schedule_with_an_end_is_refused_without_a_last_step_and_any_other_needs_none(name):
    length = {"max_steps": None, "max_epochs": 3}
    made = config(optimizer={"learning_rate": 1.0}, schedule={"name": name, "warmup_steps": 10}, training=length)
    problems = [problem for problem in cross_problems(dict(made)) if problem.startswith("schedule.name")]
    if name in ENDLESS:
        assert problems == []
        assert learning_rate(made, 50_000) > 0
    else:
        assert len(problems) == 1
        with pytest.raises(AssertionError):
            learning_rate(made, 50_000)
