"""End of a run before its last step: `validation.patience` and `validation.target`.

    stopping = EarlyStopping(config.validation, checkpoint.state.get("early_stopping"))
    stopping.add(step, values)          # each validation of every `validation.every_steps` steps
    stopping.reason()                   # "no better bleu than 27.31 of step 12000 in 5 validations", or None

The decision is a pure function of the values added: stopped and resumed anywhere, a run ends at the same step. A run
that has ended continues if the patience is raised.
"""

import math
from collections.abc import Mapping
from typing import Any

from dist_transformer.config.metrics import is_better
from dist_transformer.config.schema import ValidationConfig


class EarlyStopping:
    """Follows `validation.metric`.

    Args:
        state: result of `state()` if a run is resumed. That of another metric is ignored.
    """

    def __init__(self, settings: ValidationConfig, state: Mapping[str, Any] | None) -> None:
        state = state if state and state["metric"] == settings.metric else {}
        best = state.get("best")
        self._settings = settings
        self._best = math.nan if best is None else float(best)
        self._best_step = int(state.get("best_step", 0))
        self._num_since = int(state.get("num_since", 0))

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Adds a validation; a metric that is not among `values`, or not finite, counts as no improvement."""
        metric = self._settings.metric
        value = float(values.get(metric, math.nan))
        if math.isfinite(value) and is_better(metric, value, self._best):
            self._best, self._best_step, self._num_since = value, step, 0
        else:
            self._num_since += 1

    def reason(self) -> str | None:
        """Returns the reason to end the run now, or None."""
        settings, best = self._settings, self._best
        if settings.target is not None and not is_better(settings.metric, settings.target, best):
            return f"{settings.metric} {best:.4g} of step {self._best_step} has reached {settings.target:g}"
        if settings.patience is None or self._num_since < settings.patience:
            return None
        than = f"better {settings.metric} than {best:.4g} of step {self._best_step}"
        what = f"finite {settings.metric}" if math.isnan(best) else than
        return f"no {what} in {self._num_since} validations"

    def standing(self) -> str:
        """Returns a text for the log: "best bleu 27.31 of step 12000, 2 validations ago"."""
        if math.isnan(self._best):
            return f"no {self._settings.metric} yet that is a number"
        ago = {0: "now", 1: "1 validation ago"}.get(self._num_since, f"{self._num_since} validations ago")
        return f"best {self._settings.metric} {self._best:.4g} of step {self._best_step}, {ago}"

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {
            "metric": self._settings.metric,
            "best": None if math.isnan(self._best) else self._best,
            "best_step": self._best_step,
            "num_since": self._num_since,
        }
