"""The training loop: fetch, step, log, save, validate, stop. Every rank runs the same lines in the same order."""

import logging
from dataclasses import replace
from typing import Any

import torch

from dist_transformer.data.loader.loader import MicroBatch
from dist_transformer.data.loader.position import Quarantined
from dist_transformer.data.loader.window import BatchShape
from dist_transformer.data.special_tokens import SpecialTokens
from dist_transformer.distributed.group import Fetched
from dist_transformer.distributed.rounds import Stopped
from dist_transformer.errors import DataError
from dist_transformer.training.agreement import Agreement, StepLoss
from dist_transformer.training.checkpoint.saver import CheckpointSaver
from dist_transformer.training.divergence import Diverged, LossMonitor
from dist_transformer.training.engine.engine import Engine
from dist_transformer.training.engine.objective import inputs_of
from dist_transformer.training.global_batch import GlobalBatch, GlobalBatchPrefetcher, RankStatus, next_with_pairs
from dist_transformer.training.metrics.console import ProgressBar
from dist_transformer.training.metrics.logger import MetricsLogger
from dist_transformer.training.run import Run
from dist_transformer.training.silent_errors import COMPARE_EVERY_STEPS, Pass, SilentErrors
from dist_transformer.training.train_state import TrainState, dropout_seed, seed_dropout
from dist_transformer.training.validation.schedule import ValidationSchedule

log = logging.getLogger(__name__)

MAX_SKIPS_IN_A_ROW = 100
"""Limit above the number of skips that fp16's loss scale needs from any power of 2 down to its floor."""


class Loop:
    """Training in one rank, from `state` on.

    Args:
        identity: entries of every checkpoint of the run: `run_id`, and the `recipe` and `libraries` that a resume must
            find unchanged.
    """

    def __init__(
        self,
        run: Run,
        engine: Engine,
        batches: GlobalBatchPrefetcher,
        state: TrainState,
        metrics: MetricsLogger,
        validation: ValidationSchedule,
        saver: CheckpointSaver,
        monitor: LossMonitor,
        errors: SilentErrors,
        bar: ProgressBar,
        identity: dict[str, Any],
    ) -> None:
        self._run, self._config, self._ranks = run, run.config, run.ranks
        self._engine, self._batches, self.state = engine, batches, state
        self._metrics, self._validation, self._saver = metrics, validation, saver
        self._monitor, self._agreement = monitor, Agreement(run.ranks, monitor, saver)
        self._bar, self._identity, self._errors = bar, identity, errors
        self._partition = state.position.partition
        lanes = range(run.ranks.rank, run.config.data.lanes, run.ranks.num_ranks)
        self._lane_positions = {lane: state.position.lanes[lane] for lane in lanes}
        self._skips_in_a_row = 0
        self._weightless = _weightless(run.data.manifest.special)

    def restore(self, state: dict[str, Any]) -> None:
        """Resumes from the state of a checkpoint, but for `TrainState`. Raises Diverged: the checkpoint was saved while
        the loss was running away."""
        self._metrics.restore(state["interval"])
        self._validation.restore(state, self._identity["settings"])
        self._agreement.restore(state["losses_to_judge"])

    def run(self) -> bool:
        """Trains until the end (True) or a stop request (False; collective). A checkpoint of the last step is there
        then. Raises Diverged: on every rank, at the same step."""
        try:
            self._train()
            is_finished = True
        except Stopped:  # at a batch, or in the middle of a validation, which is still due
            is_finished = False
        self._errors.compare(self.state.step)
        self._saver.save_last(self.state.step, self._checkpoint_state)
        return is_finished

    def _train(self) -> None:
        state, every = self.state, self._config.checkpoints.every_steps
        max_epochs = self._config.training.max_epochs
        self._batches.prefetch(self._status())
        self._metrics.start_clock()
        if self._validation.is_due:
            self._validation.make_up(state.step, self._validating)
        self._run.watchdog.stop_seconds = 0.0
        while not self._has_ended():
            self._run.watchdog.progress(f"waiting for the batch after step {state.step}")
            batch = next_with_pairs(self._receive, lambda: self._batches.start_epoch(self._status()), max_epochs)
            if batch is None:
                log.info("epochs     training.max_epochs=%d ends the run", max_epochs)
                break
            if not self._step(batch):
                continue
            if state.step % self._config.training.log_every_steps == 0:
                self._log()
            if state.step % COMPARE_EVERY_STEPS == 0:
                self._errors.compare(state.step)
            self._validation.step_computed(state.step, self._has_ended())
            # The save comes first: a validation may take longer than the rest of a job.
            if state.step % every == 0 or self._has_ended():
                self._save()
            if self._validation.is_due:
                self._validate()
            self._bar.show(state.step)
        self._log()
        self._save()
        self._validate()

    def _status(self) -> RankStatus:
        return self._agreement.status(self._run.wants_stop())

    def _has_ended(self) -> bool:
        training, state = self._config.training, self.state
        return (
            training.max_steps is not None and state.step >= training.max_steps
        ) or self._validation.early_stopping.reason() is not None

    def _receive(self) -> GlobalBatch:
        batch = self._batches.next()
        self._metrics.waited(batch.wait_seconds)
        self._agreement.apply(batch)
        if batch.stop:
            raise Stopped
        if batch.quarantined:
            self._quarantine(batch.quarantined)
        return batch

    def _step(self, batch: GlobalBatch) -> bool:
        """Computes forward, backward and update on one global batch. False: the update was skipped (fp16 overflow)."""
        state, watchdog, doing = self.state, self._run.watchdog, f"computing step {self.state.step + 1}"
        losses = self._add_gradients(batch)
        while self._errors.must_repeat(state.step + 1):
            self._engine.drop_gradients()
            losses = self._add_gradients(batch)
        watchdog.progress(f"{doing}, reading the next batch")
        self._batches.prefetch(self._status())  # while a GPU still computes
        loss_sum = Fetched(losses[0], self._ranks)  # before the update, so that reading it does not wait for the update
        watchdog.progress(f"{doing}, the update")
        is_applied = self._engine.step(self._run.learning_rate(state.step + 1))
        self._count(batch, is_applied, losses, loss_sum.value())
        return is_applied

    def _add_gradients(self, batch: GlobalBatch) -> torch.Tensor:
        """Computes all passes of the step. Returns this rank's sums of loss and nll: (2,), fp64, on the device."""
        state, device, engine = self.state, self._ranks.device, self._engine
        losses = torch.zeros(2, dtype=torch.float64, device=device)
        slots, at_once = -(-self._config.data.lanes // self._ranks.num_ranks), self._config.training.lanes_per_pass
        for first in range(0, slots, at_once):
            self._run.watchdog.progress(f"computing step {state.step + 1}, micro-batch {first + 1} of {slots}")
            found = [each for each in batch.micro_batches[first : first + at_once] if each is not None]
            if self._config.training.zero_stage == 3:  # as many look-ups, and so as many gathers, on each rank
                found += [self._weightless] * (min(at_once, slots - first) - len(found))
            lane = self._ranks.rank + first * self._ranks.num_ranks
            seed = dropout_seed(self._config.run.seed, state.batches, lane)
            computed = Pass(found or [self._weightless], seed, batch.target_tokens)
            if is_audited := self._errors.is_audited(state.batches, first):
                engine.gradient_sums.start()
            seed_dropout(seed, device)
            loss, nll = engine(*inputs_of(computed.micro_batches, device))
            engine.backward(loss, batch.target_tokens, is_last=first + at_once >= slots)
            losses += torch.stack([loss.detach(), nll.detach()]).double()
            if is_audited:
                self._errors.audit(computed, engine.gradient_sums.take())
        return losses

    def _count(self, batch: GlobalBatch, is_applied: bool, losses: torch.Tensor, loss: float) -> None:
        state, step = self.state, self.state.step + 1
        is_fading = batch.fading_lanes > 0 and len(self._run.data.planner.stages) > 1
        is_of_other_text = is_fading or batch.partition.shares != self._partition.shares
        self._agreement.pending_loss = StepLoss(step, batch.target_tokens, loss, is_of_other_text)
        state.batches += 1
        state.total_target_tokens += batch.target_tokens
        if is_applied:
            state.step, self._skips_in_a_row = step, 0
        else:
            self._count_skip()
        self._metrics.count(batch, losses)
        self._partition, self._lane_positions = batch.partition, batch.lane_positions
        if self._config.data.audit:
            self._metrics.audit(batch, state.batches, step)

    def _count_skip(self) -> None:
        """Counts an update that was skipped; too many in a row are a divergence: the weights no longer move."""
        self.state.skipped_updates += 1
        self._skips_in_a_row += 1
        step, scale = self.state.step + 1, self._engine.loss_scale()
        # fp16 looks for its scale in this way.
        level = logging.INFO if self._run.training.precision == "fp16" else logging.WARNING
        log.log(level, "step %d: gradient not finite, update skipped; loss scale %g", step, scale)
        if self._skips_in_a_row == MAX_SKIPS_IN_A_ROW:
            raise Diverged(f"the gradients of {MAX_SKIPS_IN_A_ROW} batches in a row were not finite", step)

    def _quarantine(self, row_groups: tuple[Quarantined, ...]) -> None:
        """Logs and keeps quarantined row groups; too many of them end the run, on every rank."""
        state, most = self.state, self._config.data.max_quarantined_row_groups
        state.position = state.position.with_quarantined(row_groups)
        for row_group in row_groups if self._ranks.is_rank_zero else ():
            log.warning("data       quarantined %s: %s (%s)", row_group.key, row_group.place, row_group.reason)
        if (count := len(state.position.ever_quarantined)) > most:
            raise DataError(
                f"{count} row groups could not be read and were quarantined, more than data.max_quarantined_row_groups = "
                f"{most}; the last one: {row_groups[-1].place} ({row_groups[-1].reason}). Repair the files named in the "
                "log, or allow more."
            ).agreed()

    def _log(self) -> None:
        stopped, self._run.watchdog.stop_seconds = self._run.watchdog.stop_seconds, 0.0
        self._metrics.log(self.state, self._run.learning_rate(max(1, self.state.step)), stopped)

    def _save(self) -> None:
        stopped = self._run.watchdog.stop_seconds
        self._errors.compare(self.state.step)
        self._saver.save(self.state.step, self._checkpoint_state)
        self._run.watchdog.stop_seconds = stopped  # a stop within a pause is excluded with it

    def _validate(self) -> None:
        """Measures the validation corpora; a checkpoint of this step that is in flight gets the scores (collective)."""
        step, stopped = self.state.step, self._run.watchdog.stop_seconds
        self._validation.validate(step, self._validating)
        self._saver.complete(step, self._validation.state(step))
        self._run.watchdog.stop_seconds = stopped

    def _validating(self) -> None:
        self._run.watchdog.progress(f"validating after step {self.state.step}")

    def _checkpoint_state(self) -> dict[str, Any]:
        """Returns the content of a checkpoint except its tensors (collective)."""
        state, training = self.state, self._run.training
        lanes = torch.zeros(self._config.data.lanes, 2, dtype=torch.int64)
        for lane, at in self._lane_positions.items():
            lanes[lane] = torch.tensor(at)
        lane_positions = tuple((window, emitted) for window, emitted in self._ranks.all_reduce_sum(lanes).tolist())
        return {
            **vars(state),
            "position": replace(state.position, partition=self._partition, lanes=lane_positions).to_json(),
            "scaler": self._engine.scaler_state(),
            "loss_monitor": self._monitor.state(),
            "losses_to_judge": self._agreement.state(),
            "interval": self._metrics.state(),
            **self._validation.state(state.step),
            **self._identity,
            "num_ranks": self._ranks.num_ranks,
            "num_threads": torch.get_num_threads(),
            "zero_stage": training.zero_stage,
            "precision": training.precision,
        }


def _weightless(special: SpecialTokens) -> MicroBatch:
    """Returns a micro-batch without a real target token: its loss and gradient are zero, its collectives the same."""
    token, pad = torch.full((1, 1), special.eos), torch.full((1, 1), special.pad)
    return MicroBatch(-1, BatchShape(1, 1, 1, 0, 0, 0), token, token, pad, torch.zeros(0, dtype=torch.int64))
