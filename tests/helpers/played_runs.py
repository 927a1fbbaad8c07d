"""Runs of a job that fails, played attempt by attempt, and ranks that wait for each other: what closed forms must agree with."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dist_transformer.planning.failures import Conditions

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Played:
    """Mean of the runs. `gave_up_share`: of the runs with `patience` attempts in a row without a checkpoint."""

    kept_share: float
    wall_seconds: float
    attempts: float
    gave_up_share: float


def played_runs(
    conditions: Conditions, interval: float, work_seconds: float, num_runs: int, patience: int, seed: int
) -> Played:
    """Plays runs of `work_seconds` of training from their first start to their end."""
    generator = np.random.default_rng(seed)
    left = np.full(num_runs, float(work_seconds))
    held, wall, attempts, barren, gave_up = (np.zeros(num_runs) for _ in range(5))
    while (running := np.flatnonzero(left > 0)).size:
        life = generator.exponential(conditions.between_failures_seconds, running.size)
        kept, seconds, failed = played_attempts(conditions, interval, left[running], life)
        seconds += np.where(failed, conditions.detect_seconds, 0.0)
        left[running] -= kept
        held[running] += seconds
        wall[running] += seconds + np.where(left[running] > 0, conditions.requeue_seconds, 0.0)
        attempts[running] += 1
        barren[running] = np.where(kept > 0, 0, barren[running] + 1)
        gave_up = np.maximum(gave_up, barren >= patience)
    means = (float(values.mean()) for values in (wall, attempts, gave_up))
    return Played(work_seconds * num_runs / float(held.sum()), *means)


def played_attempts(
    conditions: Conditions, interval: float, left: Numbers, life: Numbers
) -> tuple[Numbers, Numbers, NDArray[np.bool_]]:
    """Plays one attempt of each run: seconds of training kept, seconds that it took, whether it failed.

    Args:
        left: seconds of training to the end of each run.
        life: seconds until each attempt fails, unless it ends before.
    """
    period, restart = conditions.period_seconds(interval), conditions.restart_seconds
    saves_to_end = np.maximum(np.ceil(left / interval) - 1, 0)
    finish = restart + left + saves_to_end * (period - interval) + conditions.save_seconds + conditions.write_seconds
    is_last = finish <= conditions.end_seconds
    end = np.where(is_last, finish, conditions.end_seconds)
    most_saves, by_limit = saves_to_end, left
    if not math.isinf(conditions.limit_seconds):
        training = max(0.0, conditions.limit_seconds - restart)
        saves = math.floor(training / period)
        most_saves = np.minimum(saves_to_end, saves)
        by_limit = np.minimum(left, saves * interval + min(training - saves * period, interval))
    failed = life < end
    whole = np.clip(np.floor((life - restart - conditions.write_seconds) / period), 0, most_saves)
    kept = np.where(failed, whole * interval, np.where(is_last, left, by_limit))
    return kept, np.minimum(life, end), failed


def drawn_stragglers(num_ranks: int, micro_batches: int, lane_spread: float, num_steps: int) -> float:
    """Time of the slowest rank over the mean, from drawn micro-batches."""
    variance, generator = math.log1p(lane_spread**2), np.random.default_rng(7)
    drawn = generator.lognormal(-variance / 2, math.sqrt(variance), (num_steps, num_ranks, micro_batches))
    return float(drawn.mean(axis=2).max(axis=1).mean())
