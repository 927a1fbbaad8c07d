"""Share of its time that a job keeps despite failures, in closed form, and the best save interval: docs/scaling.md.

With period P = interval + save and a mean M between failures, an attempt without limit keeps on average interval x
exp(-(restart + write) / M) / (exp(P / M) - 1) and takes M: with write, detect and requeue 0 this is the model of Daly (2006).
"""

import math
from dataclasses import dataclass

SLIGHT_LOSS = 0.001
"""Share of node-hours that an interval may cost more than the best one."""
INTERVALS_LOOKED_AT = 400


@dataclass(frozen=True)
class Conditions:
    """Conditions of one job, in seconds; docs/scaling.md explains each.

    Attributes:
        between_failures_seconds: mean of the whole job: a node's mean divided by the number of nodes.
        requeue_seconds: from the release of the nodes to the next attempt.
        limit_seconds: from the beginning of an attempt to the request to save and stop; inf: none.
    """

    between_failures_seconds: float
    detect_seconds: float
    requeue_seconds: float
    restart_seconds: float
    save_seconds: float
    write_seconds: float
    limit_seconds: float = math.inf

    def period_seconds(self, interval: float) -> float:
        """Time from save to save; only one is in flight, so that the next one waits for it."""
        return max(interval + self.save_seconds, self.write_seconds)

    @property
    def end_seconds(self) -> float:
        """Duration of an attempt that reaches its limit, including the wait for its last checkpoint."""
        return self.limit_seconds + self.save_seconds + self.write_seconds


@dataclass(frozen=True)
class Attempt:
    """Mean seconds of an attempt: of training that is kept, with nodes, and including the wait after it."""

    kept: float
    held: float
    wall: float

    @property
    def kept_share(self) -> float:
        """Share of node-hours spent on training that is kept."""
        return self.kept / self.held


def young_interval(conditions: Conditions) -> float:
    """Seconds of training between saves by Young (1974): sqrt(2 x save x M)."""
    return math.sqrt(2 * conditions.save_seconds * conditions.between_failures_seconds)


def expected_attempt(conditions: Conditions, interval: float) -> Attempt:
    """Closed form of an attempt with `interval` seconds of training between saves."""
    mean, period = conditions.between_failures_seconds, conditions.period_seconds(interval)
    at_end = math.exp(-conditions.end_seconds / mean)
    each, first = math.exp(-period / mean), math.exp(-(conditions.restart_seconds + conditions.write_seconds) / mean)
    all_saves = interval * first * each / -math.expm1(-period / mean)
    training = max(0.0, conditions.limit_seconds - conditions.restart_seconds)
    if math.isinf(training):
        kept = all_saves
    else:  # attempts that fail keep the saves up to the limit, the others all training
        saves = math.floor(training / period)
        kept = all_saves * -math.expm1(-saves * period / mean) - saves * interval * at_end
        kept += at_end * (saves * interval + min(training - saves * period, interval))
    fails = -math.expm1(-conditions.end_seconds / mean)  # 1 - at_end, exact where failures are rare
    held = fails * (mean + conditions.detect_seconds)
    return Attempt(kept, held, held + conditions.requeue_seconds)


def barren_share(conditions: Conditions, interval: float) -> float:
    """Share of attempts that make no complete checkpoint."""
    if conditions.limit_seconds <= conditions.restart_seconds:
        return 1.0
    first = conditions.restart_seconds + conditions.period_seconds(interval) + conditions.write_seconds
    return -math.expm1(-min(first, conditions.end_seconds) / conditions.between_failures_seconds)


@dataclass(frozen=True)
class SaveInterval:
    """Best interval in steps, and the shortest and longest between which none costs more than SLIGHT_LOSS more."""

    least_steps: int
    best_steps: int
    most_steps: int


def best_interval(conditions: Conditions, step_seconds: float, longest_steps: float = math.inf) -> SaveInterval:
    """Best interval by the closed form, which unlike Young's includes the write, the limit and whole steps."""
    shortest = max(young_interval(conditions), conditions.write_seconds, step_seconds)
    longest = max(30 * shortest, conditions.between_failures_seconds)
    ratio = (longest / step_seconds) ** (1 / INTERVALS_LOOKED_AT)
    steps = sorted({round(min(ratio**power, longest_steps)) for power in range(INTERVALS_LOOKED_AT + 1)})
    shares = {count: expected_attempt(conditions, count * step_seconds).kept_share for count in steps}
    best = max(steps, key=lambda count: shares[count])
    is_bad = [shares[count] < shares[best] - SLIGHT_LOSS for count in steps]
    at = steps.index(best)
    below = next((n for n in range(at, -1, -1) if is_bad[n]), -1)
    above = next((n for n in range(at, len(steps)) if is_bad[n]), len(steps))
    return SaveInterval(steps[below + 1], best, steps[above - 1])
