"""`train --profile`: after some steps to warm up and some to measure, a few steps under torch's profiler.

During these, ranges mark the calls of the loop and of the sub-layers (see accounting.py); before and afterwards no call
is marked. A profile adds no synchronisation.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from dist_transformer.data.loader.loader import MicroBatch
from dist_transformer.distributed import group
from dist_transformer.distributed.group import Ranks
from dist_transformer.files import write_text
from dist_transformer.model import transformer
from dist_transformer.model.attention import CrossAttention, SelfAttention
from dist_transformer.model.layers import FeedForward
from dist_transformer.planning.flops import ModelFlops, add_flops
from dist_transformer.training.checkpoint.async_writer import AsyncWriter
from dist_transformer.training.engine.engine import Engine
from dist_transformer.training.global_batch import GlobalBatch, GlobalBatchPrefetcher
from dist_transformer.training.metrics.console import ProgressBar
from dist_transformer.training.metrics.logger import MetricsLogger
from dist_transformer.training.metrics.mfu import Peak
from dist_transformer.training.profiling import accounting as parts
from dist_transformer.training.profiling.accounting import PREFIX, Span, account
from dist_transformer.training.profiling.table import RankProfile, summary_of, text_of
from dist_transformer.training.validation.schedule import ValidationSchedule

log = logging.getLogger(__name__)

WARM_UP_STEPS, PLAIN_STEPS, PROFILED_STEPS = 5, 10, 3
"""Steps that are ignored; timed without the profiler, which slows down small operators; profiled: some 100,000
operators with many layers and lanes, which take 0.1 ms each to record."""
TABLE = "profile.md"

FlopsOf = Callable[[Sequence[MicroBatch | None]], ModelFlops]


@dataclass(frozen=True)
class Watched:
    """The parts of a start whose calls are marked."""

    engine: Engine
    batches: GlobalBatchPrefetcher
    metrics: MetricsLogger
    validation: ValidationSchedule
    writer: AsyncWriter
    bar: ProgressBar


@dataclass(frozen=True)
class Job:
    """Settings of a profile.

    Attributes:
        folder: folder of the traces and the table.
        progress: reports progress to the watchdog.
        written: called with the path of the table; None on all ranks but rank 0.
    """

    ranks: Ranks
    folder: Path
    precision: str
    peak: Peak
    progress: Callable[[str], None]
    written: Callable[[Path], None] | None


@contextmanager
def profiling(watched: Watched, job: Job, flops_of: FlopsOf) -> Iterator[None]:
    """Profiles steps of the run in the block (collective): a trace for each rank, and a table by rank 0.

    If a run ends within the profiled steps, the table has those that were computed; if before, a warning is logged.
    `flops_of` returns the model FLOPs of a rank's micro-batches of a step.
    """
    recorder = _Recorder(watched, job, flops_of)
    with ExitStack() as changed:
        _replace(changed, watched.batches, "next", partial(recorder.next, watched.batches.next))
        try:
            yield
        finally:
            recorder.stop()
    recorder.end()


class _Recorder:
    """Counts steps, which begin when the loop requests a batch, and starts and stops the profiler."""

    def __init__(self, watched: Watched, job: Job, flops_of: FlopsOf) -> None:
        self._watched, self._job, self._flops_of = watched, job, flops_of
        self._num_ended = 0
        self._began: tuple[float, float] | None = None
        self._batch: GlobalBatch | None = None
        self._plain: list[tuple[float, float, float]] = []  # seconds, CPU-seconds and FLOPs of a step
        self._flops = ModelFlops(0, 0, 0, 0)
        self._profiler: profile | None = None
        self._marks, self._step_range = ExitStack(), ExitStack()
        self._is_written = False

    def next(self, next_batch: Callable[[], GlobalBatch]) -> GlobalBatch:
        """Replaces `GlobalBatchPrefetcher.next` (collective)."""
        if self._batch is not None:
            self._end_step(self._batch)
        if self._is_written:
            return next_batch()
        if self._began is None:  # else an epoch has ended, and the step continues with the next one
            self._began = time.perf_counter(), time.process_time()
            if self._profiler is not None:
                self._step_range.enter_context(record_function(PREFIX + parts.STEP))
        with record_function(PREFIX + parts.DATA):
            batch = next_batch()
        if batch.pairs and not batch.stop:
            self._batch = batch
        return batch

    def stop(self) -> None:
        """Stops the profiler and removes all marks."""
        self._step_range.close()
        self._marks.close()
        if self._profiler is not None:
            self._profiler.stop()

    def end(self) -> None:
        """Writes the profile at the end of a run, if it is not written yet (collective)."""
        before = WARM_UP_STEPS + PLAIN_STEPS
        if self._num_ended > before and not self._is_written:
            self._write(self._num_ended - before)
        elif not self._is_written:
            log.warning("profile    none: this start ended before step %d of its own", before + 2)

    def _end_step(self, batch: GlobalBatch) -> None:
        assert self._began is not None
        flops = self._flops_of(batch.micro_batches)
        if self._profiler is not None:
            self._flops = add_flops(self._flops, flops)
        elif self._num_ended >= WARM_UP_STEPS:
            began, cpu_began = self._began
            self._plain.append((time.perf_counter() - began, time.process_time() - cpu_began, flops.total))
        self._step_range.close()
        self._num_ended += 1
        self._batch = self._began = None
        if self._num_ended == WARM_UP_STEPS + PLAIN_STEPS:
            self._start()
        elif self._num_ended == WARM_UP_STEPS + PLAIN_STEPS + PROFILED_STEPS:
            stopped = time.monotonic()
            self.stop()
            self._write(PROFILED_STEPS)
            self._watched.metrics.exclude(time.monotonic() - stopped)  # does not count for the speed

    def _start(self) -> None:
        device = self._job.ranks.device.type
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
        self._profiler = profile(activities=activities)
        _mark(self._marks, self._watched)
        self._profiler.start()

    def _write(self, num_steps: int) -> None:
        """Writes this rank's trace, and on rank 0 the table of itself and of the rank others wait for (collective)."""
        profiler, job, ranks = self._profiler, self._job, self._job.ranks
        assert profiler is not None
        self._is_written, self._profiler = True, None  # frees the recorded events, which are large
        job.progress("writing the profile")
        seconds, cpu_seconds, flops = zip(*self._plain, strict=True)
        mine = RankProfile(
            where=f"rank {ranks.rank} of {ranks.num_ranks}, {ranks.device.type}, {job.precision}, "
            f"threads {torch.get_num_threads()}",
            num_steps=num_steps,
            plain_seconds=median(seconds),
            cpu_seconds=median(cpu_seconds),
            plain_flops=fmean(flops),
            flops=self._flops,
            account=account(_spans(profiler, num_steps)),
            peak=job.peak,
            has_gpu=ranks.device.type == "cuda",
        )
        trace = job.folder / f"trace_rank{ranks.rank}.json.gz"
        _on_disk(trace, partial(profiler.export_chrome_trace, str(trace)))
        of_ranks = ranks.all_gather_object((mine.busy_seconds, text_of(mine)))
        slowest = max(range(ranks.num_ranks), key=lambda rank: of_ranks[rank][0])
        if ranks.is_rank_zero:
            for line in filter(None, summary_of(mine)):
                log.info("profile    %s", line)
            self._write_table([of_ranks[rank][1] for rank in dict.fromkeys((0, slowest))])

    def _write_table(self, texts: list[str]) -> None:
        table, written = self._job.folder / TABLE, self._job.written
        _on_disk(table, lambda: write_text(table, "\n\n".join(["# Where a step goes", *texts]) + "\n"))
        log.info("profile    more in %s; traces to open at https://ui.perfetto.dev beside it", table)
        if written is not None and table.is_file():
            written(table)


def _mark(changed: ExitStack, watched: Watched) -> None:
    """Puts ranges around the calls of a step, until `changed` is closed."""
    calls: list[tuple[Any, str, str]] = [
        (watched.batches, "prefetch", parts.DATA),
        (watched.engine, "backward", parts.BACKWARD),
        (watched.engine, "step", parts.OPTIMIZER),
        *((watched.metrics, name, parts.TRACKING) for name in ("count", "log", "audit")),
        (watched.bar, "show", parts.TRACKING),
        (watched.validation, "validate", parts.VALIDATION),
        *((watched.writer, name, parts.CHECKPOINT) for name in ("begin", "finish")),
        (transformer, "label_smoothed_cross_entropy", parts.LOSS),
    ]
    for owner, name, part in calls:
        _replace(changed, owner, name, _ranged(getattr(owner, name), part))
    changed.enter_context(group.around_waits(partial(record_function, PREFIX + parts.COMMUNICATION)))
    objective = watched.engine.objective
    _mark_module(changed, objective, parts.FORWARD)
    for module in objective.modules():
        if isinstance(module, SelfAttention | CrossAttention):
            _mark_module(changed, module, parts.ATTENTION)
        elif isinstance(module, FeedForward):
            _mark_module(changed, module, parts.FEED_FORWARD)


def _mark_module(changed: ExitStack, module: nn.Module, part: str) -> None:
    """Puts a range around a module. A layer recomputed in the backward pass stops early: its range still ends."""
    entered: list[record_function] = []
    before = module.register_forward_pre_hook(lambda *_: entered.append(_enter(part)))
    after = module.register_forward_hook(lambda *_: entered.pop().__exit__(None, None, None), always_call=True)
    changed.callback(before.remove)
    changed.callback(after.remove)


def _replace(changed: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Sets `owner.name` to `value` until `changed` is closed; the previous value may be an attribute of the class."""
    if name in vars(owner):
        changed.callback(setattr, owner, name, vars(owner)[name])
    else:
        changed.callback(delattr, owner, name)
    setattr(owner, name, value)


def _ranged(call: Callable[..., Any], part: str) -> Callable[..., Any]:
    @wraps(call)
    def ranged(*arguments: Any, **named: Any) -> Any:
        with record_function(PREFIX + part):
            return call(*arguments, **named)

    return ranged


def _enter(part: str) -> record_function:
    entered = record_function(PREFIX + part)
    entered.__enter__()  # type: ignore[no-untyped-call]
    return entered


def _spans(profiler: profile, num_steps: int) -> list[Span]:
    """Returns the spans recorded in the first `num_steps` steps."""
    seen = profiler.events() or ()  # type: ignore[no-untyped-call]
    events = [event for event in seen if event.device_type.name == "CPU" and not event.is_async]
    spans = [
        Span(
            event.name,
            event.thread,
            event.time_range.start,
            event.time_range.end,
            event.sequence_nr,
            event.is_user_annotation,
            sum(kernel.duration for kernel in event.kernels),
        )
        for event in events
    ]
    end = sorted(span.end for span in spans if span.name == PREFIX + parts.STEP)[num_steps - 1]
    return [span for span in spans if span.start < end]


def _on_disk(path: Path, write: Callable[[], None]) -> None:
    """Writes a file of the profile; logs a warning if the disk fails, and training continues."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write()
    except OSError as error:
        log.warning("profile    %s cannot be written: %s", path, error)
