"""Divergence: noticed when the loss stays high, never in ordinary training; recorded, and gone on from as the policy says."""

import json
import math
import random
from collections.abc import Callable
from contextlib import nullcontext, suppress
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from dist_transformer.config.schema import DivergenceConfig
from dist_transformer.errors import UserError
from dist_transformer.files import read_json, write_json
from dist_transformer.run.folder import RunDir
from dist_transformer.training import divergence
from dist_transformer.training.changed_settings import Changes
from dist_transformer.training.divergence import Diverged, LossMonitor, Recovery, first_bad_step, read_recovery, recover

DEFAULTS = DivergenceConfig()
PATIENCE = divergence.PATIENCE_STEPS


def usual_losses(num_steps: int, seed: int, spread: float = 0.06) -> list[float]:
    """A curve as of training: from ln(vocabulary) down to about 2, with noise of `spread` from batch to batch."""
    noise = random.Random(seed)
    return [(2.0 + 7.2 * (1 + step / 30) ** -0.7) * noise.gauss(1.0, spread) for step in range(num_steps)]


def climbing_losses(start: int, rate: float, spread: float) -> list[float]:
    """An ordinary curve that climbs from `start` on by `rate` a step, up to 7: the loss of a model that knows nothing."""
    usual = usual_losses(start + 2000, 7, spread)
    return [loss if step < start else min(7.0, loss * (1 + rate) ** (step - start)) for step, loss in enumerate(usual)]


@pytest.fixture
def constants(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Gives constants of the module other values: window_steps=3."""

    def change(**values: float) -> None:
        for name, value in values.items():
            monkeypatch.setattr(divergence, name.upper(), value)

    return change


def first_alarm(losses: list[float]) -> tuple[int, int] | None:
    """(step at which it is noticed, step since when), counted from 1."""
    monitor = LossMonitor(None)
    for step, loss in enumerate(losses, 1):
        try:
            monitor.add(step, loss)
        except Diverged as diverged:
            return step, diverged.since_step
    return None


@pytest.mark.parametrize("spread", [0.0, 0.005, 0.06, 0.2])
@pytest.mark.parametrize("seed", range(5))
def test_an_ordinary_curve_is_never_a_divergence(seed, spread):
    assert first_alarm(usual_losses(5000, seed, spread)) is None


def test_batches_of_two_very_different_kinds_are_no_divergence():
    """Long runs of one kind of batch, as from sorted data, whose loss is 30 % above the other's."""
    losses = [2.0 * (1.3 if step // 50 % 2 else 1.0) for step in range(3000)]
    assert first_alarm(losses) is None


def test_a_bump_in_the_warm_up_is_no_divergence():
    losses = [9.2 - 0.02 * step for step in range(150)] + [6.2 + 0.02 * step for step in range(100)]
    assert first_alarm(losses + usual_losses(500, 1)) is None


@given(seed=st.integers(0, 10**6), start=st.integers(1500, 2500), factor=st.floats(3.0, 100.0))
@hypothesis_settings(max_examples=25)
def test_a_jump_that_stays_is_noticed_after_exactly_the_patience(seed, start, factor):
    losses = usual_losses(start, seed, 0.03) + [factor * loss for loss in usual_losses(start + 100, seed, 0.03)[start:]]
    assert first_alarm(losses) == (start + PATIENCE, start + 1)


@given(
    height=st.floats(10.0, 1e30) | st.just(math.nan) | st.just(math.inf) | st.just(-math.inf),
    length=st.integers(1, PATIENCE - 1),
)
@hypothesis_settings(max_examples=25)
def test_spikes_shorter_than_the_patience_are_no_divergence_and_leave_no_trace(height, length):
    usual = usual_losses(1600, 4)
    with_spikes, without = LossMonitor(None), LossMonitor(None)
    for step, loss in enumerate([*usual[:1500], *[height] * length, *usual[1500:]]):
        with_spikes.add(step, loss)
    for step, loss in enumerate(usual):
        without.add(step, loss)
    averages = ("count", "average", "variance", "out_of_bounds")
    assert [with_spikes.state()[name] for name in averages] == [without.state()[name] for name in averages]


def test_losses_that_are_not_finite_count_from_the_first_step_on():
    assert first_alarm([math.nan] * 20) == (20, 1)
    assert first_alarm([9.0] * 5 + [math.inf] * 20) == (25, 6)
    assert first_alarm(([9.0] + [math.nan] * 19) * 10) is None


def test_high_losses_count_only_once_the_window_is_full(constants):
    constants(window_steps=30, patience_steps=5)
    assert first_alarm([1.0] * 29 + [50.0] * 5 + [1.0]) is None
    assert first_alarm([1.0] * 30 + [50.0] * 5) == (35, 31)


@pytest.mark.parametrize("spread", [0.005, 0.03, 0.06])
@pytest.mark.parametrize("rate", [0.001, 0.004, 0.01, 0.05])
def test_a_climb_is_noticed_before_its_end_however_slow(rate, spread):
    start, losses = 4000, climbing_losses(4000, rate, spread)
    end = start + math.log(7.0 / losses[start]) / math.log(1 + rate)
    alarm = first_alarm(losses)
    assert alarm is not None
    assert start < alarm[1] < end
    assert alarm[0] < end + PATIENCE


def test_after_other_data_begin_the_window_is_filled_anew():
    monitor = LossMonitor(None)
    for step in range(300):
        monitor.add(step, 2.0)
    monitor.begin_anew()
    for step in range(300, 600):
        monitor.add(step, 4.0)
    assert monitor.state()["average"] == 4.0
    for step in range(600, 619):
        monitor.add(step, 8.0)
    with pytest.raises(Diverged):
        monitor.add(619, 8.0)


def test_losses_that_are_not_finite_count_also_while_each_step_begins_anew():
    monitor = LossMonitor(None)
    for step in range(PATIENCE - 1):
        monitor.begin_anew()
        monitor.add(step, math.nan)
    monitor.begin_anew()
    with pytest.raises(Diverged):
        monitor.add(PATIENCE - 1, math.nan)


@given(seed=st.integers(0, 10**6), cut=st.integers(1, 1700), jump=st.integers(1500, 1650))
@hypothesis_settings(max_examples=25)
def test_a_resumed_run_decides_as_one_that_never_stopped(seed, cut, jump):
    losses = [loss * (3 if step >= jump else 1) for step, loss in enumerate(usual_losses(1700, seed, 0.03))]
    expected = first_alarm(losses)
    assert expected is not None
    monitor, noticed = LossMonitor(None), None
    for step, loss in enumerate(losses, 1):
        if step == cut:
            monitor = LossMonitor(json.loads(json.dumps(monitor.state())))
        try:
            monitor.add(step, loss)
        except Diverged as diverged:
            noticed = step, diverged.since_step
            break
    assert noticed == expected


@given(st.lists(st.floats(0.1, 20.0), min_size=2, max_size=50))
def test_the_first_window_has_the_plain_mean(losses):
    monitor = LossMonitor(None)
    for step, loss in enumerate(losses):
        monitor.add(step, loss)
    assert monitor.state()["average"] == pytest.approx(math.fsum(losses) / len(losses))


def test_later_losses_fade_exponentially(constants):
    """The weights of an exponential moving average by hand, from the moment the window is full."""
    constants(window_steps=4, deviations=1000.0)
    noise = random.Random(3)
    losses = [noise.uniform(1.0, 2.0) for _ in range(60)]
    monitor = LossMonitor(None)
    for step, loss in enumerate(losses):
        monitor.add(step, loss)
    weights = [0.25] * 4
    for _ in losses[4:]:
        weights = [weight * 0.75 for weight in weights] + [0.25]
    average = sum(weight * loss for weight, loss in zip(weights, losses, strict=True))
    assert monitor.state()["average"] == pytest.approx(average)


@pytest.mark.parametrize("spread", [0.02, 0.1, 0.3])
def test_the_deviation_is_that_of_even_noise(spread, constants):
    constants(window_steps=5000)
    noise, monitor = random.Random(5), LossMonitor(None)
    for step in range(20_000):
        monitor.add(step, noise.gauss(3.0, spread))
    assert math.sqrt(monitor.state()["variance"]) == pytest.approx(spread, rel=0.05)


def test_the_reason_says_what_was_usual_and_what_came(constants):
    constants(window_steps=2, patience_steps=2)
    usual = r"before, its average was 1\.000, its deviation 0\.010"
    alarms = {
        rf"the loss was above 1\.080 or not finite for 2 steps in a row, since step 4 \(now 7\.000; {usual}\)": [
            1.0,
            1.0,
            1.0,
            7.0,
        ],
        r"the loss was not finite for 2 steps in a row, since step 1$": [],
    }
    for reason, losses in alarms.items():
        monitor = LossMonitor(None)
        for step, loss in enumerate(losses or [math.nan], 1):
            monitor.add(step, loss)
        with pytest.raises(Diverged, match=reason):
            monitor.add(5, losses[-1] if losses else math.nan)


# ------------------------------------------------------------------------------------------------ how a run goes on


def a_return(run_dir: RunDir, since_step: int, policy: str = "lower_learning_rate", oldest: int = 0) -> int:
    """The step that a run with a checkpoint every 10 steps from `oldest` on goes on from after a divergence; 0: scratch."""
    diverged = Diverged("the loss was above 9", since_step)
    newest = (first_bad_step(run_dir, diverged, oldest) - 1) // 10 * 10
    good = newest if newest >= oldest else 0
    with suppress(UserError):
        recover(run_dir, DivergenceConfig.model_validate({"policy": policy}), "fp32", diverged, good)
    return good


def test_a_return_that_did_not_help_is_followed_by_one_that_goes_further_back(tmp_path, constants):
    constants(patience_steps=5, max_rollbacks=9)
    run_dir = RunDir(tmp_path)
    assert a_return(run_dir, 70) == 60  # 69 made the loss of step 70
    assert [a_return(run_dir, step) for step in (70, 66, 71, 75)] == [50, 40, 30, 20]
    assert a_return(run_dir, 95) == 90  # well beyond: what the last return went on from was good
    assert [a_return(run_dir, 8) for _ in range(3)] == [0, 0, 0]  # from scratch


def test_the_oldest_checkpoint_stays_though_a_return_to_it_did_not_help(tmp_path, constants):
    """The run would be lost with it: it is resumed again, with an even lower learning rate."""
    constants(max_rollbacks=9)
    run_dir = RunDir(tmp_path)
    assert [a_return(run_dir, 70, oldest=50) for _ in range(4)] == [60, 50, 50, 50]
    assert a_return(run_dir, 50, oldest=50) == 0  # but not one of the steps that diverged


def test_a_return_after_an_end_goes_to_the_newest_good_checkpoint_as_a_person_was_told(tmp_path):
    run_dir = RunDir(tmp_path)
    assert [a_return(run_dir, 70, "stop") for _ in range(3)] == [60, 60, 60]


DIVERGED = Diverged("the loss was above 9", 70)


def recovered(run_dir: RunDir, precision: str = "fp16", **settings: object) -> Recovery:
    return recover(run_dir, DivergenceConfig.model_validate(settings), precision, DIVERGED, 60)


def test_without_a_divergence_nothing_is_asked_for(tmp_path):
    assert read_recovery(RunDir(tmp_path)) == Recovery(1.0, False, 0)


def test_a_lower_learning_rate_is_lowered_again_each_time_by_the_factor_of_that_time(tmp_path, constants):
    run_dir = RunDir(tmp_path)
    assert recovered(run_dir, policy="lower_learning_rate") == Recovery(0.5, False, 1)
    constants(learning_rate_factor=0.2)
    assert recovered(run_dir, policy="lower_learning_rate") == Recovery(0.1, False, 2)
    assert read_recovery(run_dir) == Recovery(0.1, False, 2)


def test_a_switch_to_bf16_holds_and_a_second_one_ends_the_run(tmp_path):
    run_dir = RunDir(tmp_path)
    assert recovered(run_dir, policy="switch_to_bf16") == Recovery(1.0, True, 1)
    with pytest.raises(UserError, match=r"in bf16 already"):
        recovered(run_dir, policy="switch_to_bf16")
    assert read_recovery(run_dir).switch_to_bf16


def test_a_run_in_bf16_has_nothing_to_switch_to_and_ends(tmp_path):
    """The same batches in the same precision would only diverge again."""
    with pytest.raises(UserError, match=r"in bf16 already"):
        recovered(RunDir(tmp_path), "bf16", policy="switch_to_bf16")


def test_the_policy_stop_ends_the_run_and_says_what_it_goes_on_from_and_what_to_do(tmp_path):
    with pytest.raises(UserError) as ended:
        recovered(RunDir(tmp_path), policy="stop")
    message = str(ended.value)
    for part in (
        "training diverged at step 70: the loss was above 9", "divergence.policy is stop",
        "resumes from the checkpoint of step 60", "optimizer.learning_rate", "schedule.warmup_steps",
        "training.gradient_clip_norm=1", "training.precision=bf16", "divergence.policy=lower_learning_rate",
    ):  # fmt: skip
        assert part in message
    assert ended.value.exit_code == 2


def test_a_run_without_an_older_checkpoint_goes_on_from_scratch(tmp_path):
    with pytest.raises(UserError, match="resumes from scratch"):
        recover(RunDir(tmp_path), DEFAULTS, "fp32", DIVERGED, 0)


def test_a_person_who_reacts_by_hand_is_not_hindered(tmp_path, constants):
    """Neither by the ends before, nor by the returns that led to them."""
    constants(max_rollbacks=2)
    run_dir = RunDir(tmp_path)
    for _ in range(5):
        with pytest.raises(UserError):
            recovered(run_dir, policy="stop")
    assert read_recovery(run_dir) == Recovery(1.0, False, 0)
    for rollbacks in (1, 2):
        assert recovered(run_dir, policy="lower_learning_rate").rollbacks == rollbacks
    with pytest.raises(
        UserError, match=r"After 2 returns to a checkpoint the run ends.*0\.25 x the learning rate, unless you remove"
    ):
        recovered(run_dir, policy="lower_learning_rate")
    assert read_recovery(run_dir) == Recovery(0.25, False, 0)
    assert recovered(run_dir, policy="lower_learning_rate").rollbacks == 1


def test_the_record_says_what_happened_each_time(tmp_path):
    run_dir = RunDir(tmp_path)
    recovered(run_dir, policy="lower_learning_rate")
    with pytest.raises(UserError):
        recovered(run_dir, policy="stop")
    first, second = read_json(run_dir.divergence)
    assert (first["since_step"], first["reason"], first["went_on_from"]) == (70, "the loss was above 9", 60)
    assert [event["policy"] for event in (first, second)] == ["lower_learning_rate", "stop"]
    assert [event["learning_rate_factor"] for event in (first, second)] == [0.5, 1.0]
    assert all(a["time"] <= b["time"] for a, b in pairwise([first, second]))


def test_going_on_is_told_in_the_log(tmp_path, caplog):
    recovered(RunDir(tmp_path), policy="lower_learning_rate")
    assert "diverged at step 70" in caplog.text
    assert "from the checkpoint of step 60, with 0.5 x the learning rate (return 1 of at most 3)" in caplog.text


@pytest.mark.parametrize(
    "content",
    ["", "{", "{}", "[1]", '[{"policy": "stop"}]', "\xff"],
)
def test_a_damaged_record_is_named(tmp_path, content):
    run_dir = RunDir(tmp_path)
    run_dir.divergence.write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=r"divergence\.json: cannot be read.*put it back, or remove it"):
        read_recovery(run_dir)


@pytest.mark.parametrize(
    ("name", "value"),
    [("learning_rate_factor", "0.5"), ("learning_rate_factor", 0), ("since_step", None), ("other", 1)],
)
def test_a_record_with_values_of_another_kind_is_named(tmp_path, name, value):
    run_dir = RunDir(tmp_path)
    recovered(run_dir, policy="lower_learning_rate")
    [event] = read_json(run_dir.divergence)
    write_json(run_dir.divergence, [{**event, name: value}])
    with pytest.raises(UserError, match=r"divergence\.json: cannot be read"):
        read_recovery(run_dir)


@pytest.mark.parametrize(
    ("key", "begins_anew"),
    [("training.guided_alignment", True), ("model.dropout", True), ("training.label_smoothing", True),
     ("optimizer.learning_rate", False)],
)  # fmt: skip
def test_a_loss_that_was_set_otherwise_is_not_taken_for_a_divergence(key, begins_anew):
    """The checkpoint that the run went on from would be thrown away as diverged, and at the next start the one before."""
    monitor = LossMonitor(None)
    for step, loss in enumerate(usual_losses(2000, 1, 0.01), 1):
        monitor.add(step, loss)
    checkpoint = SimpleNamespace(state={"loss_monitor": monitor.state()})
    kept = Changes({}, 2000, {}, {key: (0.0, 0.1)}, "loss").loss_monitor(checkpoint)
    assert (kept is None) == begins_anew
    after = LossMonitor(kept)
    with nullcontext() if begins_anew else pytest.raises(Diverged):
        for step in range(2001, 2101):
            after.add(step, 5.0)
