"""Sums over a log interval, written to the log, metrics.jsonl and audit.jsonl."""

import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from dist_transformer.distributed.group import Ranks
from dist_transformer.training.engine.engine import Engine
from dist_transformer.training.global_batch import GlobalBatch
from dist_transformer.training.metrics.console import ProgressBar, interval_values, log_interval
from dist_transformer.training.metrics.system_metrics import NodeSampler
from dist_transformer.training.run_log import RunLog
from dist_transformer.training.train_state import Interval, TrainState

SYSTEM_SECONDS = 30.0
"""Minimum time of training between two "system" records: one per log line would be too many points with many GPUs."""

log = logging.getLogger(__name__)


class MetricsLogger:
    """Counts batches and writes a record for each log interval.

    Args:
        sampler: load of the nodes, recorded with a log line every SYSTEM_SECONDS.
        run_log: None on all ranks but rank 0.
        recorded_step: newest "train" record in metrics.jsonl, the same on every rank.
        mfu: called with an interval and its seconds.
    """

    def __init__(
        self,
        ranks: Ranks,
        engine: Engine,
        sampler: NodeSampler,
        run_log: RunLog | None,
        recorded_step: int,
        bar: ProgressBar,
        mfu: Callable[[Interval, float], float],
    ) -> None:
        self._ranks, self._engine, self._mfu, self._bar = ranks, engine, mfu, bar
        self._run_log, self._sampler, self._recorded_step = run_log, sampler, recorded_step
        self._interval = self._new_interval()
        self._last: GlobalBatch | None = None
        self._last_before: dict[str, float | int | str] = {}
        self._system_seconds = SYSTEM_SECONDS

    def restore(self, state: dict[str, Any]) -> None:
        """Resumes a log interval that a checkpoint cut in two."""
        interval, self._last_before = self._interval, state.get("last", {})
        for name in vars(interval).keys() & state.keys() - {"losses"}:
            setattr(interval, name, type(getattr(interval, name))(state[name]))
        if self._ranks.is_rank_zero:
            interval.losses += torch.tensor(state["losses"], dtype=torch.float64, device=self._ranks.device)

    def state(self) -> dict[str, Any]:
        """Returns the interval so far, for a checkpoint (collective)."""
        interval = self._interval
        return {
            **{name: value for name, value in vars(interval).items() if name != "started"},
            "losses": self._ranks.all_reduce_sum(interval.losses.cpu().clone()).tolist(),
            "seconds_before": interval.seconds,
            "last": self._of_last_batch(),
        }

    def start_clock(self) -> None:
        """Starts the time of the interval, when training begins."""
        self._interval.started = time.monotonic()

    def exclude(self, seconds: float) -> None:
        """Excludes seconds that were not spent on training from the interval, such as those of a profile."""
        self._interval.started += seconds

    def validated(self, seconds: float) -> None:
        """Excludes the time of a validation, and records it as `validation_seconds`."""
        self.exclude(seconds)
        self._interval.validation_seconds += seconds

    def stood_still(self, seconds: float) -> None:
        """Excludes the time that training waited for a checkpoint, and records it as `save_seconds`."""
        self.exclude(seconds)
        self._interval.save_seconds += seconds

    def waited(self, seconds: float) -> None:
        """Adds the time that training waited for data."""
        self._interval.wait_seconds += seconds

    def count(self, batch: GlobalBatch, losses: torch.Tensor) -> None:
        """Adds a batch; `losses` (2,) are this rank's sums of loss and nll over it."""
        interval = self._interval
        interval.losses += losses
        interval.target_tokens += batch.target_tokens
        interval.source_tokens += batch.source_tokens
        interval.padded_tokens += batch.padded_tokens
        interval.straggler_sum += batch.straggler_ratio
        interval.batches += 1
        interval.pairs_by_corpus.update(batch.pairs_by_corpus)
        interval.dropped.update(batch.dropped)
        self._last = batch

    def log(self, state: TrainState, learning_rate: float, stop_seconds: float) -> None:
        """Writes one line in the log and one record in metrics.jsonl for the steps since the last (collective). The process
        was stopped for `stop_seconds` since then."""
        interval, of_last = self._interval, self._of_last_batch()
        if not (of_last and interval.target_tokens) or state.step <= self._recorded_step:
            return
        self.exclude(stop_seconds)
        losses = interval.losses.cpu()  # waits for the device
        since_system = self._system_seconds + interval.seconds if self._ranks.is_rank_zero else 0.0
        sums = self._ranks.all_reduce_sum(torch.cat([losses, losses.new_tensor([since_system])]))
        loss, nll, since_system = sums.tolist()
        loss, nll = loss / interval.target_tokens, nll / interval.target_tokens
        seconds = interval.seconds
        values: dict[str, float | int | str] = {
            **of_last,
            "loss": loss,
            "nll": nll,
            "learning_rate": learning_rate,
            "loss_scale": self._engine.loss_scale(),
            "skipped_updates": state.skipped_updates,
            "total_target_tokens": state.total_target_tokens,
            "quarantined_row_groups": len(state.position.ever_quarantined),
            **interval_values(interval, seconds),
            **({"stop_seconds": stop_seconds} if stop_seconds else {}),
            "mfu": self._mfu(interval, seconds),
        }
        if self._run_log:
            self._run_log.metrics.append("train", state.step, values)
        log_interval(state.step, values)
        self._bar.show(state.step, loss, interval.target_tokens / seconds)
        self._recorded_step = state.step
        self._system_seconds += seconds
        # Without a sample yet the next log line tries again. The means are the same on every rank.
        if since_system >= SYSTEM_SECONDS and (means := self._sampler.means()):
            self._system_seconds = 0.0
            if self._run_log:
                self._run_log.metrics.append("system", state.step, means)
        self._interval = self._new_interval()

    def audit(self, batch: GlobalBatch, number: int, step: int) -> None:
        """Writes the row ids of global batch `number`, meant for `step`, by lane, into audit.jsonl (collective)."""
        mine = {b.lane: b.row_ids.tolist() for b in batch.micro_batches if b is not None}
        lanes = {str(lane): rows for part in self._ranks.all_gather_object(mine) for lane, rows in part.items()}
        if self._run_log and self._run_log.audit:
            rows = {lane: lanes[lane] for lane in sorted(lanes, key=int)}
            values = dict(batch=number, epoch=batch.partition.epoch, batch_digest=batch.digest, rows=rows)
            self._run_log.audit.append("batch", step, values)

    def _of_last_batch(self) -> dict[str, float | int | str]:
        """Returns the values of a record that are of one batch; {} before the first, or after an older version's last."""
        if (last := self._last) is None:
            return self._last_before
        norm = self._engine.gradient_norm()
        return {"epoch": last.partition.epoch, "gradient_norm": norm, "batch_digest": last.digest}

    def _new_interval(self) -> Interval:
        return Interval(torch.zeros(2, dtype=torch.float64, device=self._ranks.device))
