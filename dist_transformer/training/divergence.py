"""Divergence: its detection, and the recovery of a run after it.

    monitor = LossMonitor(checkpoint.state["loss_monitor"])
    monitor.add(step, loss)                     # raises Diverged, on every rank at the same step
    recovery = recover(run_dir, config.divergence, precision, diverged, good_step)     # rank 0

Decisions are recorded in divergence.json of the run folder, so that a later start resumes training in the same way.
"""

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dist_transformer.config.schema import DivergenceConfig
from dist_transformer.errors import UserError
from dist_transformer.files import read_json_patiently, write_json
from dist_transformer.run.folder import RunDir

log = logging.getLogger(__name__)

WINDOW_STEPS = 200
"""Steps of the loss's moving average and deviation: long beside the noise of batches, short beside a run."""
DEVIATIONS = 8.0
"""A loss so many deviations above the average is out of bounds; the noise of batches does not reach it."""
PATIENCE_STEPS = 20
"""Steps in a row out of bounds that count as divergence; a single bad batch passes."""
LEARNING_RATE_FACTOR = 0.5
"""The share of the schedule's learning rate that all later steps are trained with, by lower_learning_rate."""
MAX_ROLLBACKS = 3
"""Returns to a checkpoint before the run ends after all; by then lower_learning_rate is at an eighth."""
LEAST_DEVIATION = 0.01
"""Minimum of the deviation as a share of the average: a loss that hardly varies must not make every small rise count.
It varies little with few, long batches."""


class Diverged(Exception):
    """Divergence of training; every rank raises it at the same step.

    Attributes:
        reason: text for people.
        since_step: the step at which the divergence began: only checkpoints of earlier steps are good.
    """

    def __init__(self, reason: str, since_step: int) -> None:
        self.reason, self.since_step = reason, since_step
        super().__init__(reason)


class LossMonitor:
    """Watches the loss per target token for a lasting rise.

    It keeps an average and a deviation of the losses within bounds: first over all of them, later exponential moving
    ones over about WINDOW_STEPS. A loss is out of bounds if it is DEVIATIONS deviations above the average or not
    finite; PATIENCE_STEPS such losses in a row are a divergence. During the first WINDOW_STEPS losses only those
    that are not finite count.

    The deviation counts losses below the average twice, others not (for symmetric noise the usual one): a loss that
    climbs for hundreds of steps, as in most divergences, is always above its average and must not pass for noise.

    Args:
        state: result of `state()` if a run is resumed: the monitor then decides as if the run had never stopped.
    """

    def __init__(self, state: Mapping[str, Any] | None) -> None:
        state = state or {}
        self._count = int(state.get("count", 0))
        self._average = float(state.get("average", 0.0))
        self._variance = float(state.get("variance", 0.0))
        self._out_of_bounds = int(state.get("out_of_bounds", 0))
        self._since_step = int(state.get("since_step", 0))

    def add(self, step: int, loss: float) -> None:
        """Adds the mean loss of a step over all ranks. Raises Diverged: this was the last of PATIENCE_STEPS steps in a
        row that were out of bounds."""
        if math.isfinite(loss) and not (self._count >= WINDOW_STEPS and loss > self._bound()):
            self._out_of_bounds = 0
            self._include(loss)
            return
        if self._out_of_bounds == 0:
            self._since_step = step
        self._out_of_bounds += 1
        if self._out_of_bounds >= PATIENCE_STEPS:
            raise Diverged(self._reason(loss), self._since_step)

    def begin_anew(self) -> None:
        """Forgets the losses so far, which are no measure of a new stage of a mixture; those not finite still count."""
        self._count, self._out_of_bounds = 0, self._out_of_bounds if self._count < WINDOW_STEPS else 0

    def state(self) -> dict[str, Any]:
        """Returns the state of the monitor, for a checkpoint."""
        return {name.removeprefix("_"): value for name, value in vars(self).items()}

    def _bound(self) -> float:
        return self._average + DEVIATIONS * self._deviation()

    def _deviation(self) -> float:
        return max(math.sqrt(self._variance), LEAST_DEVIATION * abs(self._average))

    def _include(self, loss: float) -> None:
        """Adds a loss to the average. Weights 1, 1/2, 1/3 ... 1/window begin with the plain mean: no start value."""
        self._count += 1
        share = max(1.0 / self._count, 1.0 / WINDOW_STEPS)
        if self._count == 1:
            self._average, self._variance = loss, 0.0
            return
        difference = loss - self._average
        self._average += share * difference
        self._variance = (1.0 - share) * (self._variance + share * 2.0 * min(difference, 0.0) ** 2)

    def _reason(self, loss: float) -> str:
        steps = f"for {self._out_of_bounds} steps in a row, since step {self._since_step}"
        if self._count < WINDOW_STEPS:
            return f"the loss was not finite {steps}"
        usual = f"its average was {self._average:.3f}, its deviation {self._deviation():.3f}"
        return f"the loss was above {self._bound():.3f} or not finite {steps} (now {loss:.3f}; before, {usual})"


@dataclass(frozen=True)
class Event:
    """A divergence and the reaction to it. `policy` "stop": the run ended, and a person decides."""

    since_step: int
    reason: str
    policy: str
    went_on_from: int
    """Step of the checkpoint that the run resumes from; 0: from scratch."""
    learning_rate_factor: float
    """Further factor of the learning rate of all later steps; 1 unless the policy lowers the learning rate."""
    time: float


@dataclass(frozen=True)
class Recovery:
    """Changes that all divergences so far require of a start.

    Attributes:
        rollbacks: rollbacks to a checkpoint that the run made by itself since a person last started it.
    """

    learning_rate_factor: float
    switch_to_bf16: bool
    rollbacks: int

    def text(self) -> str:
        """Returns a description of the changes."""
        precision = " in bf16, where fp16 is given" if self.switch_to_bf16 else ""
        return f"{self.learning_rate_factor:g} x the learning rate{precision}"


def read_recovery(run_dir: RunDir) -> Recovery:
    """Reads divergence.json; without the file nothing changes. Raises UserError: the file is damaged, or not ours."""
    events = _read_events(run_dir)
    ends = [number for number, event in enumerate(events) if event.policy == "stop"]
    return Recovery(
        learning_rate_factor=math.prod(event.learning_rate_factor for event in events),
        switch_to_bf16=any(event.policy == "switch_to_bf16" for event in events),
        rollbacks=len(events) - (ends[-1] + 1 if ends else 0),
    )


def record(run_dir: RunDir, event: Event) -> None:
    """Adds an event to divergence.json (rank 0)."""
    write_json(run_dir.divergence, [asdict(known) for known in [*_read_events(run_dir), event]])


def first_bad_step(run_dir: RunDir, diverged: Diverged, oldest_step: int) -> int:
    """Returns the first step whose checkpoint must not be resumed.

    After a rollback that did not help, the next one goes further back: if the run diverges again at about the same
    step, the checkpoint that it resumed from was bad already. But the oldest checkpoint, of `oldest_step`, stays: without
    it the run would start from scratch.
    """
    bad = diverged.since_step - 1  # the loss of a step is that of the weights before its update
    last = next(reversed(_read_events(run_dir)), None)
    if last and last.policy != "stop" and diverged.since_step <= last.since_step + PATIENCE_STEPS:
        said = "divergence the return to step %d did not help: this one goes further back, if a checkpoint is older"
        log.warning(said, last.went_on_from)
        bad = min(bad, max(last.went_on_from, oldest_step + 1))
    return max(1, bad)


def recover(
    run_dir: RunDir, settings: DivergenceConfig, precision: str, diverged: Diverged, good_step: int
) -> Recovery:
    """Decides how the run continues, and records it (rank 0, after the bad checkpoints were set aside). Raises
    UserError: the run ends here: the policy is "stop", or has no further means.

    Args:
        precision: training.precision.
        good_step: step of the checkpoint that the run resumes from; 0: from scratch.
    """
    before = read_recovery(run_dir)
    end = _reason_to_end(settings, precision, before)
    policy = settings.policy if end is None else "stop"
    factor = LEARNING_RATE_FACTOR if policy == "lower_learning_rate" else 1.0
    event = Event(diverged.since_step, diverged.reason, policy, good_step, factor, round(time.time(), 3))
    record(run_dir, event)
    seen = f"training diverged at step {event.since_step}: {event.reason}."
    place = f"from the checkpoint of step {good_step}" if good_step else "from scratch, as no checkpoint is older"
    if end is not None:
        raise UserError(f"{seen} {end} The same command resumes {place}. {_advice(before)}")
    after = read_recovery(run_dir)
    change = "in bf16" if policy == "switch_to_bf16" else f"with {after.learning_rate_factor:g} x the learning rate"
    said = "divergence %s Resuming %s, %s (return %d of at most %d)"
    log.warning(said, seen, place, change, after.rollbacks, MAX_ROLLBACKS)
    return after


def _reason_to_end(settings: DivergenceConfig, precision: str, before: Recovery) -> str | None:
    if settings.policy == "stop":
        return "divergence.policy is stop."
    if before.rollbacks >= MAX_ROLLBACKS:
        return f"After {before.rollbacks} returns to a checkpoint the run ends."
    if settings.policy == "switch_to_bf16" and (before.switch_to_bf16 or precision == "bf16"):
        return "divergence.policy is switch_to_bf16, and it was trained in bf16 already."
    return None


def _advice(before: Recovery) -> str:
    factor = before.learning_rate_factor
    kept = f" It will train with {factor:g} x the learning rate, unless you remove divergence.json."
    return (
        "Give it a lower optimizer.learning_rate, a longer schedule.warmup_steps, training.gradient_clip_norm=1 or, where "
        "it trains in fp16, training.precision=bf16; with divergence.policy=lower_learning_rate a run helps itself."
        + (kept if factor != 1 else "")
    )


def _read_events(run_dir: RunDir) -> list[Event]:
    try:
        values = read_json_patiently(run_dir.divergence)
        if not isinstance(values, list):
            raise TypeError(f"expected a list, got {type(values).__name__}")
        return [_event(value) for value in values]
    except FileNotFoundError:
        return []
    except (OSError, TypeError, ValueError) as error:
        raise UserError(
            f"{run_dir.divergence}: cannot be read as the record of this run's divergences ({error}). It says with which "
            "learning rate and precision the run resumes: put it back, or remove it to resume as the configuration says."
        ) from error


def _event(value: Any) -> Event:
    event = Event(**value)
    numbers = (event.since_step, event.went_on_from)
    factor = event.learning_rate_factor
    if not all(type(number) is int for number in numbers) or type(factor) not in (int, float) or not 0 < factor <= 1:
        raise ValueError(f"not a divergence: {value}")
    return event
