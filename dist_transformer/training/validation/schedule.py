"""Validations of a run: the steps at which one is due, its records, and early stopping."""

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from dist_transformer.config.metrics import is_better, signature_of
from dist_transformer.config.schema import ValidationConfig
from dist_transformer.distributed.rounds import WorkFailed
from dist_transformer.run.metrics_log import FIELDS
from dist_transformer.training.memory import give_back
from dist_transformer.training.metrics.console import ProgressBar
from dist_transformer.training.run import Run
from dist_transformer.training.run_log import RunLog
from dist_transformer.training.validation.runner import Validated, Validator, advice_on

log = logging.getLogger(__name__)


class ValidationSchedule:
    """Validates every `validation.every_steps` steps and at the end, each step once.

    Args:
        early_stopping: receives the measures of every regular validation.
        run_log: None on all ranks but rank 0.
        newest: newest "validation" record in metrics.jsonl, the same on every rank; its step alone if it counts no more.
        validated: called with the seconds that a validation took.
    """

    def __init__(
        self,
        run: Run,
        validator: Validator,
        early_stopping: "EarlyStopping",
        run_log: RunLog | None,
        newest: Mapping[str, Any],
        bar: ProgressBar,
        validated: Callable[[float], None],
    ) -> None:
        self._settings, self._ranks, self._validator = run.config.validation, run.ranks, validator
        self.early_stopping, self._run_log, self._bar, self._validated = early_stopping, run_log, bar, validated
        self._newest, self._recorded_step = newest, int(newest["step"])
        self._found: tuple[int, dict[str, float | str]] | None = None
        self._resumed: tuple[int, Mapping[str, Any]] = (-1, {})
        self.is_due = False
        """True if the last computed step is to be validated, and has not been yet."""

    def restore(self, state: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """Resumes from the state of a checkpoint. `settings`: all those of this start."""
        self._resumed = state["step"], settings
        self.is_due = state.get("validation_due", False)

    def state(self, step: int) -> dict[str, Any]:
        """Returns the part of a checkpoint's state that belongs to validation."""
        return {
            "early_stopping": self.early_stopping.state(),
            "validation": self._found[1] if self._found and self._found[0] == step else None,
            "validation_due": self.is_due and self._must_validate(step),
        }

    def step_computed(self, step: int, is_last: bool) -> None:
        """Decides whether this step is to be validated."""
        self.is_due = is_last or step % self._settings.every_steps == 0

    def validate(self, step: int, progress: Callable[[], None]) -> None:
        """Measures the validation corpora, once for a step (collective). A failure is reported and ends nothing. Raises
        Stopped: on every rank; the state is as if the validation had not begun."""
        if self._must_validate(step):
            started = time.monotonic()
            try:
                found = self._validator.validate(step, progress)
            except WorkFailed as failure:
                self._failed(step, f"{failure}{advice_on(failure)}")
            else:
                self._record(step, found)
            finally:
                self._validated(time.monotonic() - started)
        self.is_due = False

    def make_up(self, step: int, progress: Callable[[], None]) -> None:
        """Validates the step that an earlier start saved but did not validate (collective)."""
        if self._newest["step"] == step and len(self._newest) > 1:  # the start did, but the checkpoint lacks the result
            self._found_now(step, Validated({n: v for n, v in self._newest.items() if n not in FIELDS}, []))
        self.validate(step, progress)

    def _must_validate(self, step: int) -> bool:
        """True if there are corpora, and no validation of this step or a later one was made or failed."""
        return bool(self._validator.sets) and step > self._recorded_step

    def _record(self, step: int, found: Validated) -> None:
        self._recorded_step = step
        self._found_now(step, found)
        if (value := found.values.get(metric := self._settings.metric)) is not None:
            self._bar.show_score(step, metric, float(value))
        if self._run_log:
            self._run_log.metrics.append("validation", step, found.values)
            self._run_log.samples_written(step, found.samples)

    def _found_now(self, step: int, found: Validated) -> None:
        self._found, metric = (step, found.values), self._settings.metric
        then, now = (signature_of(each, metric) for each in (self._newest, found.values))
        self._newest = {**found.values, "step": step}
        if then and now and then != now:
            self.early_stopping = EarlyStopping(self._settings, None)
            log.info("step %7d  %s_signature is %s, not %s: best and patience begin anew", step, metric, now, then)
        if step % self._settings.every_steps == 0:  # the last validation of a run may be at any step
            self.early_stopping.add(step, found.values)
            log.info("step %7d  %s", step, self.early_stopping.standing())
        resumed_step, settings = self._resumed
        if self._run_log and step == resumed_step:  # its checkpoint is that of an earlier start
            self._run_log.validated_later(step, found.values, settings)

    def _failed(self, step: int, reason: str) -> None:
        self._recorded_step = step  # it would fail again
        give_back(self._ranks.device)
        log.error("validation of step %d failed, and training continues without it: %s", step, reason)
        if self._run_log:
            self._run_log.validation_failed(step, reason)


class EarlyStopping:
    """End of a run before its last step by `validation.metric`: `validation.patience` and `validation.target`.

    The decision is a pure function of the values added: stopped and resumed anywhere, a run ends at the same step.

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
        """Adds a regular validation; a metric that is not among `values`, or not finite, counts as no improvement."""
        metric = self._settings.metric
        value = float(values.get(metric, math.nan))
        if math.isfinite(value) and is_better(metric, value, self._best):
            self._best, self._best_step, self._num_since = value, step, 0
        else:
            self._num_since += 1

    def reason(self) -> str | None:
        """Returns the reason to end the run now ("no better bleu than 27.31 of step 12000 in 5 validations"), or None."""
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
