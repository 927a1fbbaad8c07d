"""Early stopping: a function of the values alone, the same wherever it is stopped and gone on with."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_transformer.config.metrics import TOKEN_MEASURES, TRANSLATION_MEASURES, is_better
from dist_transformer.config.schema import ValidationConfig
from dist_transformer.training.validation.schedule import EarlyStopping

METRICS = st.sampled_from([*TOKEN_MEASURES, *TRANSLATION_MEASURES, "news/loss", "news/bleu"])
VALUES = st.lists(st.one_of(st.integers(0, 5).map(float), st.just(math.nan), st.just(math.inf)), max_size=20)
HIGHER = ("token_accuracy", "bleu", "chrf", "plugin")


def ended_at(settings: ValidationConfig, values: list[float], cut: int | None = None) -> int | None:
    """How many validations it takes to the end; None: it does not end. A state is saved and loaded after `cut` of them."""
    stopping = EarlyStopping(settings, None)
    for number, value in enumerate(values, start=1):
        stopping.add(number, {settings.metric: value})
        if number == cut:
            stopping = EarlyStopping(settings, stopping.state())
        if stopping.reason() is not None:
            return number
    return None


def better(metric: str, value: float, than: float) -> bool:
    return value > than if metric.split("/")[-1] in HIGHER else value < than


@given(METRICS, VALUES, st.integers(1, 4))
def test_it_ends_with_the_first_validation_that_no_better_one_is_among_the_last_so_many_of(metric, values, patience):
    expected = None
    for number in range(patience, len(values) + 1):
        before = [v for v in values[: number - patience] if math.isfinite(v)]
        recent = [v for v in values[number - patience : number] if math.isfinite(v)]
        if not any(all(better(metric, v, b) for b in before) for v in recent):
            expected = number
            break
    assert ended_at(ValidationConfig(metric=metric, patience=patience), values) == expected


@given(METRICS, VALUES, st.integers(1, 4), st.integers(0, 5), st.integers(1, 20))
def test_a_stop_and_a_resume_anywhere_end_at_the_same_validation(metric, values, patience, target, cut):
    settings = ValidationConfig(metric=metric, patience=patience, target=target)
    assert ended_at(settings, values, cut) == ended_at(settings, values)


@given(METRICS, VALUES, st.integers(0, 5))
def test_it_ends_when_the_target_is_reached(metric, values, target):
    reached = [n for n, v in enumerate(values, 1) if math.isfinite(v) and not better(metric, target, v)]
    assert ended_at(ValidationConfig(metric=metric, target=target), values) == (reached[0] if reached else None)


@given(METRICS, VALUES)
def test_without_patience_and_target_it_never_ends(metric, values):
    assert ended_at(ValidationConfig(metric=metric), values) is None


@given(METRICS, st.floats(allow_nan=True), st.floats(allow_nan=True))
def test_nan_is_never_better(metric, value, than):
    assert not is_better(metric, math.nan, than)
    assert is_better(metric, value, math.nan) != math.isnan(value)


def test_the_reason_names_the_best_value_its_step_and_how_long_ago_it_was():
    settings = ValidationConfig(metric="bleu", patience=2, target=30)
    stopping = EarlyStopping(settings, None)
    for step, bleu in ((1000, 20.0), (2000, 27.31), (3000, 27.31), (4000, 25.0)):
        assert stopping.reason() is None
        stopping.add(step, {"bleu": bleu, "loss": 1.0})
    assert stopping.reason() == "no better bleu than 27.31 of step 2000 in 2 validations"
    stopping.add(5000, {"bleu": 31.5})
    assert stopping.reason() == "bleu 31.5 of step 5000 has reached 30"


def test_a_metric_that_is_never_finite_ends_the_run_too():
    stopping = EarlyStopping(ValidationConfig(patience=1), None)
    stopping.add(1000, {"loss": math.nan})
    assert stopping.reason() == "no finite loss in 1 validations"


def test_a_raised_patience_lets_a_run_go_on_and_another_metric_begins_anew():
    stopping = EarlyStopping(ValidationConfig(patience=1), None)
    for step in (1000, 2000):
        stopping.add(step, {"loss": 2.0})
    state = stopping.state()
    assert stopping.reason() is not None
    assert EarlyStopping(ValidationConfig(patience=1), state).reason() is not None
    assert EarlyStopping(ValidationConfig(patience=2), state).reason() is None
    assert EarlyStopping(ValidationConfig(patience=1, metric="nll"), state).reason() is None
    assert EarlyStopping(ValidationConfig(patience=1), {}).reason() is None


def test_the_log_is_told_what_is_best_and_how_long_ago_that_was():
    stopping = EarlyStopping(ValidationConfig(metric="bleu"), None)
    told = []
    for step, value in enumerate([math.nan, 27.314, 20.0, 20.0], start=1):
        stopping.add(step, {"bleu": value})
        told.append(stopping.standing())
    assert told == [
        "no bleu yet that is a number",
        "best bleu 27.31 of step 2, now",
        "best bleu 27.31 of step 2, 1 validation ago",
        "best bleu 27.31 of step 2, 2 validations ago",
    ]


def test_a_measure_without_a_known_direction_is_never_taken_to_be_better_where_it_is_higher() -> None:
    with pytest.raises(KeyError):
        is_better("news/unknown", 10.0, 60.0)
