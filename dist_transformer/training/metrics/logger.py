"""What a run says of itself: sums over a log interval, log lines, validation, and the records of each."""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dist_transformer.config.schema import Config
from dist_transformer.distributed.group import Ranks
from dist_transformer.distributed.rounds import WorkFailed
from dist_transformer.run.metrics_log import FIELDS
from dist_transformer.training.engine.engine import Engine
from dist_transformer.training.global_batch import GlobalBatch
from dist_transformer.training.memory import give_back
from dist_transformer.training.metrics.console import ProgressBar, interval_values, log_interval
from dist_transformer.training.metrics.system_metrics import NodeSampler
from dist_transformer.training.train_state import INTERVAL_COUNTS, INTERVAL_SUMS, Interval, RunLog, TrainState
from dist_transformer.training.validation.early_stopping import EarlyStopping
from dist_transformer.training.validation.runner import Validated, Validator
from dist_transformer.training.validation.token_metrics import LESS_MEMORY

SYSTEM_SECONDS = 30.0
"""Of training between two "system" records, at least: every log line would be thousands of points a minute on many GPUs."""

log = logging.getLogger(__name__)


class Reporter:
    """Counts what the trainer does, and writes it down: into the log, metrics.jsonl and audit.jsonl.

    Args:
        early_stopping: hears of every regular validation.
        sampler: how busy the nodes are, noted with a log line every SYSTEM_SECONDS; None: not wanted.
        journal: None on all ranks but the first.
        recorded: newest record of each event ("train", "validation") in metrics.jsonl, the same on every rank.
        mfu: of an interval and its seconds, `Mfu.of`.
    """

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        engine: Engine,
        validator: Validator,
        early_stopping: EarlyStopping,
        sampler: NodeSampler | None,
        journal: RunLog | None,
        recorded: Mapping[str, Mapping[str, Any]],
        mfu: Callable[[Interval, float], float],
    ) -> None:
        self._config, self._ranks, self._engine, self._mfu = config, ranks, engine, mfu
        self._validator, self.journal = validator, journal
        self._recorded = {event: int(record["step"]) for event, record in recorded.items()}
        self._newest_validation = recorded["validation"]
        self.early_stopping, self._sampler = early_stopping, sampler
        self.interval = self._new_interval()
        self._last: GlobalBatch | None = None
        self._validated: tuple[int, dict[str, float]] | None = None
        self._system_seconds = SYSTEM_SECONDS

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on with the sums of a log interval that a checkpoint cut in two."""
        for name in (*INTERVAL_SUMS, "seconds_before"):
            setattr(self.interval, name, state.get(name, 0))
        for name in INTERVAL_COUNTS:
            getattr(self.interval, name).update(state.get(name, {}))
        if self._ranks.is_rank_zero:
            self.interval.losses += torch.tensor(state["losses"], dtype=torch.float64, device=self._ranks.device)

    def state(self) -> dict[str, Any]:
        """The interval so far, for a checkpoint (collective)."""
        interval = self.interval
        return {
            "losses": self._ranks.all_reduce_sum(interval.losses.cpu().clone()).tolist(),
            **{name: getattr(interval, name) for name in (*INTERVAL_SUMS, *INTERVAL_COUNTS)},
            "seconds_before": interval.seconds,
        }

    def count(self, batch: GlobalBatch, losses: torch.Tensor) -> None:
        """Adds a batch; `losses` (2,) are this rank's sums of loss and nll over it."""
        interval = self.interval
        interval.losses += losses
        interval.target_tokens += batch.target_tokens
        interval.source_tokens += batch.source_tokens
        interval.padded_tokens += batch.padded_tokens
        interval.straggler_sum += batch.straggler_ratio
        interval.batches += 1
        interval.pairs_by_corpus.update(batch.pairs_by_corpus)
        interval.dropped.update(batch.dropped)
        self._last = batch

    def log(self, progress: TrainState, learning_rate: float, bar: ProgressBar) -> None:
        """One line in the log and one record in metrics.jsonl for the steps since the last (collective)."""
        interval, last = self.interval, self._last
        if last is None or not interval.target_tokens or progress.step <= self._recorded["train"]:
            return
        loss, nll, since_system = self._ranks.all_reduce_sum(torch.cat([interval.losses.cpu(), self._clock()])).tolist()
        loss, nll = loss / interval.target_tokens, nll / interval.target_tokens
        seconds = interval.seconds
        values: dict[str, float | int | str] = {
            "epoch": last.segment.epoch,
            "loss": loss,
            "nll": nll,
            "learning_rate": learning_rate,
            "gradient_norm": self._engine.gradient_norm(),
            "loss_scale": self._engine.loss_scale(),
            "skipped_updates": progress.skipped_updates,
            "total_target_tokens": progress.total_target_tokens,
            "quarantined_row_groups": len(progress.position.left_out),
            **interval_values(interval, seconds),
            "mfu": self._mfu(interval, seconds),
            "batch_digest": last.digest,
        }
        if self.journal:
            self.journal.metrics.append("train", progress.step, values)
        log_interval(progress.step, values)
        bar.show(progress.step, loss, interval.target_tokens / seconds)
        self._recorded["train"] = progress.step
        self._system_seconds += seconds
        if self._sampler is not None and since_system >= SYSTEM_SECONDS:
            self._log_system(self._sampler.means(), progress.step)
        self.interval = self._new_interval()

    def must_validate(self, step: int) -> bool:
        """Whether there is what to measure, and none of it was measured at this step or later, or tried to."""
        return bool(self._validator.sets) and step > self._recorded["validation"]

    def validate(self, step: int, bar: ProgressBar, progress: Callable[[], None]) -> None:
        """Measures the validation corpora, once for a step (collective). One that fails is said, and ends nothing.

        Raises:
            Stopped: on every rank; it is as if the validation had not begun.
        """
        if not self.must_validate(step):
            return
        started = time.monotonic()
        try:
            found = self._validator.validate(step, progress)
        except WorkFailed as failure:
            self._fail(step, str(failure))
        else:
            self._keep(step, found, bar)
        finally:
            self.interval.started += time.monotonic() - started

    def recall(self, step: int) -> None:
        """Hears of the validation of this step by its record, where the start that made it ended before it was in a
        checkpoint."""
        if self._newest_validation["step"] == step:
            values = {name: value for name, value in self._newest_validation.items() if name not in FIELDS}
            self._hear(step, Validated(values, []))

    def add_to_checkpoint(self, step: int) -> None:
        """What was measured at this step, to the checkpoint of it that an earlier start wrote without."""
        if self.journal and (measures := self.validated(step)):
            self.journal.validated_later(step, measures)

    def validated(self, step: int) -> dict[str, float] | None:
        """What was measured at exactly this step."""
        return self._validated[1] if self._validated and self._validated[0] == step else None

    def _keep(self, step: int, found: Validated, bar: ProgressBar) -> None:
        self._recorded["validation"] = step
        self._hear(step, found)
        if (value := found.numbers.get(metric := self._config.validation.metric)) is not None:
            bar.show_score(step, metric, value)
        if self.journal:
            self.journal.metrics.append("validation", step, found.values)
            self.journal.samples_written(step, found.samples)

    def _hear(self, step: int, found: Validated) -> None:
        self._validated = (step, found.numbers)
        if step % self._config.validation.every_steps == 0:  # the last one of a run may be at any step
            self.early_stopping.add(step, found.numbers)
            log.info("step %7d  %s", step, self.early_stopping.standing())

    def _fail(self, step: int, reason: str) -> None:
        self._recorded["validation"] = step  # it would fail again
        give_back(self._ranks.device)
        log.error("validation of step %d failed, and training goes on without it: %s. %s", step, reason, LESS_MEMORY)
        if self.journal:
            self.journal.validation_failed(step, reason)

    def stood_still(self, seconds: float) -> None:
        """Training stood still for a checkpoint; it is no part of the interval's speed."""
        self.interval.started += seconds
        self.interval.save_seconds += seconds

    def audit(self, batch: GlobalBatch, number: int, step: int) -> None:
        """The row ids of global batch `number`, meant for `step`, by lane, into audit.jsonl (collective)."""
        mine = {b.lane: b.row_ids.tolist() for b in batch.micro_batches if b is not None}
        lanes = {str(lane): rows for part in self._ranks.all_gather_object(mine) for lane, rows in part.items()}
        if self.journal and self.journal.audit:
            rows = {lane: lanes[lane] for lane in sorted(lanes, key=int)}
            values = dict(batch=number, epoch=batch.segment.epoch, batch_digest=batch.digest, rows=rows)
            self.journal.audit.append("batch", step, values)

    def _clock(self) -> torch.Tensor:
        """(1,): summed up over the ranks, the seconds of training since the last "system" record, as rank 0 counts them."""
        seconds = self._system_seconds + self.interval.seconds if self._ranks.is_rank_zero else 0.0
        return torch.tensor([seconds], dtype=torch.float64)

    def _log_system(self, means: dict[str, float], step: int) -> None:
        """No means, the same on every rank: no sample was taken yet, and the next log line asks again."""
        if not means:
            return
        self._system_seconds = 0.0
        if self.journal:
            self.journal.metrics.append("system", step, means)

    def _new_interval(self) -> Interval:
        return Interval(torch.zeros(2, dtype=torch.float64, device=self._ranks.device))
