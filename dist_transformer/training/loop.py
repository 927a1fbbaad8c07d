"""The training loop: fetch, step, log, validate, save, stop. Every rank runs the same lines in the same order."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from typing import Any

import torch

from dist_transformer.config.schema import Config
from dist_transformer.data.loader.loader import MicroBatch
from dist_transformer.data.loader.position import Quarantined
from dist_transformer.data.loader.window import BatchShape
from dist_transformer.distributed.group import Ranks
from dist_transformer.distributed.rounds import Stopped
from dist_transformer.errors import CheckpointError, DataError
from dist_transformer.training.checkpoint.async_writer import AsyncWriter
from dist_transformer.training.divergence import Diverged, LossMonitor
from dist_transformer.training.engine.engine import Engine
from dist_transformer.training.global_batch import Fetched, GlobalBatch, GlobalBatchPrefetcher, RankStatus
from dist_transformer.training.metrics.console import ProgressBar
from dist_transformer.training.metrics.logger import Reporter
from dist_transformer.training.pending_loss import LossesTold, StepLoss
from dist_transformer.training.train_state import TrainState, dropout_seed
from dist_transformer.training.validation.token_metrics import forward
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
        identity: what every checkpoint says of its run: `run_id`, and the `recipe` and `libraries` that a resume must find
            unchanged.
        learning_rate: by step, counted from 1.
    """

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        engine: Engine,
        saver: AsyncWriter,
        reporter: Reporter,
        monitor: LossMonitor,
        progress: TrainState,
        identity: dict[str, Any],
        learning_rate: Callable[[int], float],
    ) -> None:
        self._config, self._ranks, self._engine = config, ranks, engine
        self._saver, self._reporter, self._monitor = saver, reporter, monitor
        self.progress, self._identity, self._learning_rate = progress, identity, learning_rate
        self._lane_positions = {
            lane: progress.position.lanes[lane] for lane in range(ranks.rank, config.data.lanes, ranks.num_ranks)
        }
        self._segment = progress.position.segment
        self._saved = self._began_save = -1
        self._skips_in_a_row = 0
        self._is_validation_due = False  # of the step that was computed last: a regular one, and not done yet
        self._news_of_save = -1
        self._losses = LossesTold(monitor, ranks)
        recipe = identity["recipe"]
        self._zero_weight = _zero_weight(recipe["pad_id"], recipe["eos_id"])
        self.current_batch: GlobalBatch | None = None

    def run(self, prefetcher: GlobalBatchPrefetcher, bar: ProgressBar, watchdog: Watchdog) -> Outcome:
        """Trains until the end or a stop request (collective). A checkpoint of the last step is there afterwards.

        Raises:
            Diverged: on every rank, at the same step.
        """
        try:
            outcome = self._train(prefetcher, bar, watchdog)
        except Stopped:  # in the middle of a validation, which is still due
            outcome = Outcome.STOPPED
        self._save(is_last=True)
        return outcome

    def _train(self, prefetcher: GlobalBatchPrefetcher, bar: ProgressBar, watchdog: Watchdog) -> Outcome:
        """As `run`, but for the last save."""
        config, progress = self._config, self.progress
        self._reporter.interval.started = time.monotonic()
        if self._is_validation_due:
            self._reporter.recall(progress.step)
            self._validate(bar, watchdog)
            self._reporter.add_to_checkpoint(progress.step)
        while not self._has_ended():
            watchdog.progress(f"waiting for the batch after step {progress.step}")
            batch = self._next_batch(prefetcher)
            if batch is None:
                break
            if batch.stop:
                return Outcome.STOPPED
            prefetcher.begin()
            if not self._step(batch, watchdog):
                continue
            if progress.step % config.training.log_every_steps == 0:
                self._log(bar)
            self._is_validation_due = progress.step % config.validation.every_steps == 0
            # The save first: a validation may take longer than what is left of a job.
            if progress.step % config.checkpoints.every_steps == 0 or self._has_ended():
                self._save()
            if self._is_validation_due:
                self._validate(bar, watchdog)
            bar.show(progress.step)
        self._log(bar)
        self._save()
        self._validate(bar, watchdog)
        return Outcome.FINISHED

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from a checkpoint's state with what is no part of `Progress`.

        Raises:
            Diverged: the checkpoint was saved while the loss was running away.
        """
        self._reporter.restore(state["interval"])
        self._is_validation_due = state.get("validation_due", False)
        self._losses.restore(state["losses_to_judge"])

    def news(self, wants_stop: bool) -> RankStatus:
        """What the other ranks must hear of this one; asked once for each batch."""
        self._news_of_save = self._began_save
        return RankStatus(wants_stop, self._saver.is_writing(), self._losses.tell())

    def end_save(self) -> None:
        """Lets the checkpoint in flight become whole, when a run ends otherwise than planned (collective)."""
        if self._began_save > self._saved:
            self._finish_save()

    def _has_ended(self) -> bool:
        training, progress = self._config.training, self.progress
        return (
            (training.max_steps is not None and progress.step >= training.max_steps)
            or (training.max_target_tokens is not None and progress.total_target_tokens >= training.max_target_tokens)
            or self._reporter.early_stopping.reason() is not None
        )

    def _next_batch(self, prefetcher: GlobalBatchPrefetcher) -> GlobalBatch | None:
        """The next batch with rows in it; None when the last epoch has ended."""
        max_epochs = self._config.training.max_epochs
        for _ in range(2):  # the end of an epoch, and the next one from its start
            batch = prefetcher.wait()
            self._reporter.interval.wait_seconds += batch.wait_seconds
            self._hear(batch)
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
            prefetcher.start_epoch()
        raise DataError(
            "a whole epoch has no pair to train on: all were dropped by data.filters, or their row groups left out; look "
            "at the log, and at the corpus with `dist-transformer data inspect`"
        ).agreed()

    def _hear(self, batch: GlobalBatch) -> None:
        """What all ranks told along with this batch."""
        self._losses.hear(batch.loss_sum)
        # What was told is from before the last step: it may be of an earlier checkpoint than the one in flight.
        if not batch.is_writing and self._news_of_save == self._began_save > self._saved:
            self._finish_save()

    def _step(self, batch: GlobalBatch, watchdog: Watchdog) -> bool:
        """Forward, backward and update on one global batch. False: the update was skipped (fp16 overflow)."""
        progress, ranks = self.progress, self._ranks
        self.current_batch = batch
        losses = torch.zeros(2, dtype=torch.float64, device=ranks.device)
        slots, doing = -(-self._config.data.lanes // ranks.num_ranks), f"computing step {progress.step + 1}"
        for slot in range(slots):
            watchdog.progress(f"{doing}, micro-batch {slot + 1} of {slots}")
            micro_batch = batch.micro_batches[slot] if slot < len(batch.micro_batches) else None
            lane = ranks.rank + slot * ranks.num_ranks
            torch.manual_seed(dropout_seed(self._config.run.seed, progress.batches, lane))
            loss, nll = forward(self._engine, micro_batch or self._zero_weight, ranks.device)
            self._engine.backward(loss, batch.target_tokens)
            losses += torch.stack([loss.detach(), nll.detach()]).double()
        loss_sum = Fetched(losses[0])  # before the update, whose end is not waited for then
        watchdog.progress(f"{doing}, the update")
        applied = self._engine.step(self._learning_rate(progress.step + 1))
        self._count(batch, applied, losses, loss_sum.value())
        self.current_batch = None
        return applied

    def _count(self, batch: GlobalBatch, applied: bool, losses: torch.Tensor, loss: float) -> None:
        progress = self.progress
        step = progress.step + 1
        is_of_other_text = batch.segment.shares != self._segment.shares
        self._losses.computed(StepLoss(step, batch.target_tokens, loss, is_of_other_text))
        progress.batches += 1
        progress.total_target_tokens += batch.target_tokens
        if applied:
            progress.step, self._skips_in_a_row = step, 0
        else:
            self._skip()
        self._reporter.count(batch, losses)
        self._segment, self._lane_positions = batch.segment, batch.lane_positions
        if self._config.data.audit:
            self._reporter.audit(batch, progress.batches, step)

    def _skip(self) -> None:
        """Counts an update that was skipped; too many in a row are a divergence: the weights no longer move."""
        self.progress.skipped_updates += 1
        self._skips_in_a_row += 1
        step, scale = self.progress.step + 1, self._engine.loss_scale()
        log.info("step %d: gradient not finite, update skipped; loss scale %g", step, scale)
        if self._skips_in_a_row == MAX_SKIPS_IN_A_ROW:
            raise Diverged(f"the gradients of {MAX_SKIPS_IN_A_ROW} batches in a row were not finite", step)

    def _quarantine(self, row_groups: tuple[Quarantined, ...]) -> None:
        """Says and keeps what was left out; too much of it is the end, on every rank."""
        progress, most = self.progress, self._config.data.max_quarantined_row_groups
        progress.position = progress.position.leaving_out(row_groups)
        for row_group in row_groups if self._ranks.is_rank_zero else ():
            log.warning("data       left out of %s: %s (%s)", row_group.key, row_group.place, row_group.reason)
        if (count := len(progress.position.left_out)) > most:
            raise DataError(
                f"{count} row groups could not be read and were left out, more than data.max_quarantined_row_groups = "
                f"{most}; the last one: {row_groups[-1].place} ({row_groups[-1].reason}). Mend the "
                "files named in the log, or allow more."
            ).agreed()

    def _log(self, bar: ProgressBar) -> None:
        self._reporter.log(self.progress, self._learning_rate(max(1, self.progress.step)), bar)

    def _validate(self, bar: ProgressBar, watchdog: Watchdog) -> None:
        """Measures the validation corpora; a checkpoint of this step that is in flight gets the scores (collective)."""
        step = self.progress.step
        self._reporter.validate(step, bar, lambda: watchdog.progress(f"validating after step {step}"))
        self._is_validation_due = False
        if self._began_save == step > self._saved:
            self._saver.complete(self._state_of_validation())

    def _save(self, is_last: bool = False) -> None:
        """Begins a checkpoint of this step, once (collective); the last one of a process is waited for."""
        started, step = time.monotonic(), self.progress.step
        if self._began_save == step and not is_last:
            return
        if self._began_save > self._saved:  # at most one is in flight
            self._finish_save(is_last and self._began_save == step)
        if self._began_save != step:
            self._saver.begin(self._engine, self._state())
            self._began_save = step
            self._reporter.stood_still(time.monotonic() - started)
        if is_last and self._saved != step:
            self._finish_save(is_last)

    def _finish_save(self, is_last: bool = False) -> None:
        """Makes the checkpoint in flight a whole one, or reports why it is none (collective)."""
        started = time.monotonic()
        saved = self._saver.finish()
        if saved is None or saved.path is not None:
            self._saved = self._began_save
        else:
            self._began_save = self._saved
        if saved is None:
            return
        if saved.path is None:
            message = f"checkpoint of step {saved.step} was given up: {saved.problem}"
            if is_last or self._config.checkpoints.stop_on_failed_save:
                raise CheckpointError(message).agreed()
            log.error("save       %s; training goes on, and tries again at the next one", message)
        elif self._reporter.journal and not saved.was_there:
            self._reporter.journal.checkpoint_saved(saved.step, saved.path)
        seconds = time.monotonic() - started
        self._reporter.stood_still(seconds)
        if saved.path is not None and not saved.was_there:
            log.info("step %7d  saved %s in %.1f s", saved.step, saved.path.name, saved.seconds)

    def _state(self) -> dict[str, Any]:
        """What a checkpoint holds besides tensors (collective)."""
        progress = self.progress
        lanes = torch.zeros(self._config.data.lanes, 2, dtype=torch.int64)
        for lane, at in self._lane_positions.items():
            lanes[lane] = torch.tensor(at)
        lane_positions = tuple((window, emitted) for window, emitted in self._ranks.all_reduce_sum(lanes).tolist())
        return {
            "step": progress.step,
            "batches": progress.batches,
            "skipped_updates": progress.skipped_updates,
            "total_target_tokens": progress.total_target_tokens,
            "position": replace(progress.position, segment=self._segment, lanes=lane_positions).to_json(),
            "scaler": self._engine.scaler_state(),
            "loss_monitor": self._monitor.state(),
            "losses_to_judge": self._losses.state(),
            "interval": self._reporter.state(),
            **self._state_of_validation(),
            **self._identity,
            "num_ranks": self._ranks.num_ranks,
            "zero_stage": self._config.training.zero_stage,
            "precision": self._config.training.precision,
        }

    def _state_of_validation(self) -> dict[str, Any]:
        step = self.progress.step
        return {
            "early_stopping": self._reporter.early_stopping.state(),
            "validation": self._reporter.validated(step),
            "validation_due": self._is_validation_due and self._reporter.must_validate(step),
        }


def _zero_weight(pad_id: int, eos_id: int) -> MicroBatch:
    """A micro-batch without a real target token: its loss and gradient are zero, its collectives are everyone's."""
    token, pad = torch.full((1, 1), eos_id), torch.full((1, 1), pad_id)
    return MicroBatch(-1, BatchShape(1, 1, 1, 0, 0, 0), token, token, pad, torch.zeros(0, dtype=torch.int64))
