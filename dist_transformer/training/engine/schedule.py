"""Learning rate by step, as a pure function: nothing to save, nothing to restore."""

import math

from dist_transformer.config.schema import Config


def peak_learning_rate(config: Config) -> float:
    """Returns the configured peak, or the paper's (5.3): (d_model * warmup_steps) ** -0.5."""
    if config.optimizer.learning_rate is not None:
        return config.optimizer.learning_rate
    return float((config.model.d_model * config.schedule.warmup_steps) ** -0.5)


def learning_rate(config: Config, step: int) -> float:
    """Returns the learning rate of update number `step`, counted from 1.

    `inverse_sqrt` with the paper's peak is exactly 5.3:
    d_model ** -0.5 * min(step ** -0.5, step * warmup_steps ** -1.5).
    """
    warmup = config.schedule.warmup_steps
    return peak_learning_rate(config) * min(step / warmup, _decay(config, max(step, warmup)))


def _decay(config: Config, step: int) -> float:
    """Returns the share of the peak after warm-up; 1 at its end."""
    warmup, last = config.schedule.warmup_steps, config.training.max_steps
    match config.schedule.name:
        case "inverse_sqrt":
            return math.sqrt(warmup / step)
        case "linear":
            return 1.0 - _progress(step, warmup, last)
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * _progress(step, warmup, last)))
        case "constant":
            return 1.0


def _progress(step: int, warmup: int, last: int | None) -> float:
    """Returns 0 at the end of warm-up to 1 after the last step (so that the last step still learns)."""
    assert last is not None, "a schedule with an end is refused without training.max_steps"
    return min(1.0, (step - warmup) / (last + 1 - warmup))
