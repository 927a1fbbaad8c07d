"""The training loop: fetch, step, log, validate, save, stop. Every rank runs the same lines in the same order."""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

import torch

from dist_transformer.config.models import Config
from dist_transformer.data.loader import MicroBatch
from dist_transformer.data.position import Quarantined
from dist_transformer.data.window import BatchShape
from dist_transformer.distributed import Ranks
from dist_transformer.errors import DataError, UserError
from dist_transformer.run_dir import RunDir
from dist_transformer.training import checkpoints
from dist_transformer.training.engine import Engine
from dist_transformer.training.feed import Feed, GlobalBatch
from dist_transformer.training.records import INTERVAL_COUNTS, INTERVAL_SUMS, Interval, Journal, Progress
from dist_transformer.training.report import ProgressBar, interval_values, log_interval
from dist_transformer.training.schedule import learning_rate
from dist_transformer.training.validation import ValidationResult, forward, validate
from dist_transformer.training.watchdog import Watchdog

log = logging.getLogger(__name__)


MAX_SKIPS_IN_A_ROW = 100
"""More than fp16's loss scale needs on its way from any power of 2 down to its floor."""


class Outcome(Enum):
    """How a run's process ended."""

    FINISHED = "finished"
    STOPPED = "stopped"


class Trainer:
    """One process of a training run.

    Args:
        journal: None on all ranks but the first.
        recipe: what a resume must find unchanged; stored in each checkpoint.
        validation: micro-batches of the validation corpus, the same on every rank; may be empty.
        recorded: newest step of each event ("train", "validation") in metrics.jsonl, the same on every rank.
    """

    def __init__(
        self,
        config: Config,
        run_dir: RunDir,
        ranks: Ranks,
        engine: Engine,
        validation: Sequence[MicroBatch],
        recipe: dict[str, Any],
        journal: Journal | None,
        progress: Progress,
        recorded: dict[str, int],
    ) -> None:
        self._config, self._run_dir, self._ranks, self._engine = config, run_dir, ranks, engine
        self._validation, self._recipe, self._journal, self.progress = validation, recipe, journal, progress
        self._lane_positions = {
            lane: progress.position.lanes[lane] for lane in range(ranks.rank, config.data.lanes, ranks.num_ranks)
        }
        self._segment, self._digest = progress.position.segment, ""
        self._interval = self._new_interval()
        self._recorded = dict(recorded)
        self._validated: tuple[int, ValidationResult] | None = None
        self._saved: int | None = None
        self._skips_in_a_row = 0
        self._zero_weight = _zero_weight(recipe["pad_id"], recipe["eos_id"])

    def run(self, feed: Feed, bar: ProgressBar, watchdog: Watchdog) -> Outcome:
        """Trains until the end or a stop request (collective). A checkpoint of the last step is there afterwards."""
        config, progress, last_step = self._config, self.progress, self._config.training.max_steps
        self._watchdog, self._interval.started = watchdog, time.monotonic()
        while not self._has_ended():
            watchdog.progress(f"waiting for the batch after step {progress.step}")
            batch = self._next_batch(feed)
            if batch is None:
                break
            if batch.stop:
                self._save()
                return Outcome.STOPPED
            feed.begin()
            watchdog.progress(f"computing step {progress.step + 1}")
            if not self._step(batch):
                continue
            if progress.step % config.training.log_every_steps == 0:
                self._log(bar)
            if progress.step % config.validation.every_steps == 0:
                self._validate()
            if progress.step % config.checkpoints.every_steps == 0 and progress.step != last_step:
                self._save()
            bar.show(progress.step)
        self._log(bar)
        self._validate()
        self._save()
        return Outcome.FINISHED

    def restore(self, interval: dict[str, Any]) -> None:
        """Goes on with the sums of a log interval that a checkpoint cut in two."""
        for name in (*INTERVAL_SUMS, "seconds_before"):
            setattr(self._interval, name, interval.get(name, 0))
        for name in INTERVAL_COUNTS:
            getattr(self._interval, name).update(interval.get(name, {}))
        if self._ranks.is_first:
            self._interval.losses += torch.tensor(interval["losses"], dtype=torch.float64, device=self._ranks.device)

    def _has_ended(self) -> bool:
        training, progress = self._config.training, self.progress
        return (training.max_steps is not None and progress.step >= training.max_steps) or (
            training.max_target_tokens is not None and progress.total_target_tokens >= training.max_target_tokens
        )

    def _next_batch(self, feed: Feed) -> GlobalBatch | None:
        """The next batch with rows in it; None when the last epoch has ended."""
        max_epochs = self._config.training.max_epochs
        for _ in range(2):  # the end of an epoch, and the next one from its start
            batch = feed.wait()
            self._interval.wait_seconds += batch.wait_seconds
            if batch.stop:
                return batch
            if batch.quarantined:
                self._quarantine(batch.quarantined)
            if max_epochs is not None and batch.segment.epoch >= max_epochs:  # lowered since the last start
                return None
            if batch.pairs:
                return batch
            if batch.segment.epoch + 1 == max_epochs:
                return None
            feed.start_epoch()
        raise DataError(
            "a whole epoch has no pair to train on: all were dropped by data.filters, or their row groups left out; look "
            "at the log, and at the corpus with `dist-transformer data inspect`"
        ).agreed()

    def _step(self, batch: GlobalBatch) -> bool:
        """Forward, backward and update on one global batch. False: the update was skipped (fp16 overflow)."""
        progress, ranks = self.progress, self._ranks
        slots = -(-self._config.data.lanes // ranks.num_ranks)
        for slot in range(slots):
            micro_batch = batch.micro_batches[slot] if slot < len(batch.micro_batches) else None
            lane = ranks.rank + slot * ranks.num_ranks
            torch.manual_seed(_dropout_seed(self._config.run.seed, progress.batches, lane))
            loss, nll = forward(self._engine, micro_batch or self._zero_weight, ranks.device)
            self._engine.backward(loss, batch.target_tokens)
            self._interval.losses += torch.stack([loss.detach(), nll.detach()]).double()
        applied = self._engine.step(learning_rate(self._config, progress.step + 1))
        self._count(batch, applied)
        return applied

    def _count(self, batch: GlobalBatch, applied: bool) -> None:
        progress, interval = self.progress, self._interval
        progress.batches += 1
        progress.total_target_tokens += batch.target_tokens
        if applied:
            progress.step += 1
            self._skips_in_a_row = 0
        else:
            self._skip()
        interval.target_tokens += batch.target_tokens
        interval.source_tokens += batch.source_tokens
        interval.padded_tokens += batch.padded_tokens
        interval.straggler_sum += batch.straggler_ratio
        interval.batches += 1
        interval.pairs_by_corpus.update(batch.pairs_by_corpus)
        interval.dropped.update(batch.dropped)
        self._segment, self._digest = batch.segment, batch.digest
        self._lane_positions = batch.lane_positions
        if self._config.data.audit:
            self._audit(batch, progress.step if applied else progress.step + 1)

    def _skip(self) -> None:
        """Counts an update that was skipped; too many in a row are the end: the weights no longer move."""
        self.progress.skipped_updates += 1
        self._skips_in_a_row += 1
        step, scale = self.progress.step + 1, self._engine.loss_scale()
        log.info("step %d: gradient not finite, update skipped; loss scale %g", step, scale)
        if self._skips_in_a_row == MAX_SKIPS_IN_A_ROW:
            raise UserError(
                f"the gradients of {MAX_SKIPS_IN_A_ROW} batches in a row were not finite before step {step}: training "
                "diverged. Resume from the last checkpoint with a lower optimizer.learning_rate or a longer "
                "schedule.warmup_steps, or with training.gradient_clip_norm=1"
            )

    def _quarantine(self, row_groups: tuple[Quarantined, ...]) -> None:
        """Says and keeps what was left out; too much of it is the end, on every rank."""
        progress, most = self.progress, self._config.data.max_quarantined_row_groups
        progress.position = progress.position.leaving_out(row_groups)
        for row_group in row_groups if self._ranks.is_first else ():
            log.warning("data       left out of %s: %s (%s)", row_group.key, row_group.place, row_group.reason)
        if (count := len(progress.position.left_out)) > most:
            raise DataError(
                f"{count} row groups could not be read and were left out, more than data.max_quarantined_row_groups = "
                f"{most}; the last one: {row_groups[-1].place} ({row_groups[-1].reason}). Mend the "
                "files named in the log, or allow more."
            ).agreed()

    def _log(self, bar: ProgressBar) -> None:
        """One line in the log and one record in metrics.jsonl for the steps since the last (collective)."""
        progress, interval = self.progress, self._interval
        if not interval.target_tokens or progress.step <= self._recorded["train"]:
            return
        loss, nll = (self._ranks.sum(interval.losses.cpu()) / interval.target_tokens).tolist()
        seconds = interval.seconds
        values: dict[str, float | int | str] = {
            "epoch": self._segment.epoch,
            "loss": loss,
            "nll": nll,
            "learning_rate": learning_rate(self._config, progress.step),
            "gradient_norm": self._engine.gradient_norm(),
            "loss_scale": self._engine.loss_scale(),
            "skipped_updates": progress.skipped_updates,
            "total_target_tokens": progress.total_target_tokens,
            "quarantined_row_groups": len(progress.position.left_out),
            **interval_values(interval, seconds),
            "batch_digest": self._digest,
        }
        if self._journal:
            self._journal.metrics.append("train", progress.step, values)
        log_interval(progress.step, values)
        bar.show(progress.step, loss, interval.target_tokens / seconds)
        self._recorded["train"] = progress.step
        self._interval = self._new_interval()

    def _validate(self) -> None:
        """Loss on the validation corpus, once for a step (collective)."""
        step = self.progress.step
        if not self._validation or step <= self._recorded["validation"]:
            return
        started = time.monotonic()
        doing = f"validating after step {step}"
        result = validate(self._engine, self._validation, self._ranks, lambda: self._watchdog.progress(doing))
        self._validated, self._recorded["validation"] = (step, result), step
        if self._journal:
            self._journal.metrics.append("validation", step, _validation_metrics(result))
        log.info(
            "step %7d  validation loss %.4f  nll %.4f  perplexity %.2f",
            step,
            result.loss,
            result.nll,
            result.perplexity,
        )
        self._interval.started += time.monotonic() - started

    def _save(self) -> None:
        """A checkpoint of this step, once (collective)."""
        if self._saved == self.progress.step:
            return
        started, settings = time.monotonic(), self._config.checkpoints
        doing = f"saving step {self.progress.step}"
        path = checkpoints.save(
            self._run_dir, self._engine, self._state(), self._ranks, lambda: self._watchdog.progress(doing)
        )
        self._saved = self.progress.step
        if path is None:  # an earlier start wrote it
            return
        validated = self._validated
        if self._journal:
            checkpoints.keep_last(self._run_dir, settings.keep_last, settings.every_steps)
            is_current = validated is not None and validated[0] == self.progress.step
            self._journal.checkpoint_saved(
                self.progress.step, path, _validation_metrics(validated[1]) if validated and is_current else {}
            )
        seconds = time.monotonic() - started
        log.info("step %7d  saved %s in %.1f s", self.progress.step, path.name, seconds)
        self._interval.started += seconds

    def _state(self) -> dict[str, Any]:
        """What a checkpoint holds besides tensors (collective)."""
        progress, interval = self.progress, self._interval
        lanes = torch.zeros(self._config.data.lanes, 2, dtype=torch.int64)
        for lane, at in self._lane_positions.items():
            lanes[lane] = torch.tensor(at)
        lane_positions = tuple((window, emitted) for window, emitted in self._ranks.sum(lanes).tolist())
        losses = self._ranks.sum(interval.losses.cpu().clone())
        return {
            "version": 1,
            "step": progress.step,
            "batches": progress.batches,
            "skipped_updates": progress.skipped_updates,
            "total_target_tokens": progress.total_target_tokens,
            "position": replace(progress.position, segment=self._segment, lanes=lane_positions).to_json(),
            "scaler": self._engine.scaler_state(),
            "interval": {
                "losses": losses.tolist(),
                **{name: getattr(interval, name) for name in (*INTERVAL_SUMS, *INTERVAL_COUNTS)},
                "seconds_before": interval.seconds,
            },
            "recipe": self._recipe,
            "num_ranks": self._ranks.num_ranks,
            "zero_stage": self._config.training.zero_stage,
            "precision": self._config.training.precision,
        }

    def _audit(self, batch: GlobalBatch, step: int) -> None:
        """The row ids of the batch meant for `step`, by lane, into audit.jsonl (collective)."""
        mine = {b.lane: b.row_ids.tolist() for b in batch.micro_batches if b is not None}
        lanes = {str(lane): rows for part in self._ranks.gather(mine) for lane, rows in part.items()}
        if self._journal and self._journal.audit:
            rows = {lane: lanes[lane] for lane in sorted(lanes, key=int)}
            values = dict(batch=self.progress.batches, epoch=batch.segment.epoch, batch_digest=batch.digest, rows=rows)
            self._journal.audit.append("batch", step, values)

    def _new_interval(self) -> Interval:
        return Interval(torch.zeros(2, dtype=torch.float64, device=self._ranks.device))


def _validation_metrics(result: ValidationResult) -> dict[str, float]:
    return {"loss": result.loss, "nll": result.nll, "perplexity": result.perplexity}


def _dropout_seed(seed: int, batches: int, lane: int) -> int:
    """Dropout masks are a function of (seed, batch, lane): the same on any number of ranks, and nothing to save."""
    return ((seed * 1_000_003 + batches) * 65_537 + lane) % 2**63


def _zero_weight(pad_id: int, eos_id: int) -> MicroBatch:
    """A micro-batch without a real target token: its loss and gradient are zero, its collectives are everyone's."""
    token, pad = torch.full((1, 1), eos_id), torch.full((1, 1), pad_id)
    return MicroBatch(-1, BatchShape(1, 1, 1, 0, 0, 0), token, token, pad, torch.zeros(0, dtype=torch.int64))
