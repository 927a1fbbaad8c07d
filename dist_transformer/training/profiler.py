"""`train --profile`: after steps to warm up and steps that are only timed, a few steps under torch's profiler.

Until it is written, ranges (record_function) mark the calls of the loop and of the sub-layers. A profile adds no
synchronisation.
"""

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function, schedule

from dist_transformer.distributed import group
from dist_transformer.files import write_text
from dist_transformer.format import table
from dist_transformer.model import transformer
from dist_transformer.model.attention import CrossAttention, SelfAttention
from dist_transformer.model.layers import FeedForward
from dist_transformer.training.engine.engine import Engine
from dist_transformer.training.global_batch import GlobalBatch, GlobalBatchPrefetcher
from dist_transformer.training.metrics.logger import MetricsLogger
from dist_transformer.training.run import Run

log = logging.getLogger(__name__)

WARM_UP_STEPS, PLAIN_STEPS, PROFILED_STEPS = 5, 10, 3
"""Steps that are ignored; timed without the profiler, which slows down small operators; profiled: some 100,000
operators with many layers and lanes, which take 0.1 ms each to record. One more between them warms the profiler up."""
PREFIX = "dist_transformer."
STEP = "ProfilerStep*"
"""The range of steps, which torch's profiler makes itself."""
PARTS = (
    "data", "forward", "attention", "feed-forward", "loss", "backward", "optimizer", "communication", "tracking",
    "validation", "checkpoint",
)  # fmt: skip
"""Parts of a step in the order of the table. A range has all that is within it: attention, feed-forward and loss lie in
the forward pass, communication in whatever waits for other ranks."""
MOST_OPERATORS = 15

Calls = Sequence[tuple[Any, str, str]]
"""Owner and name of a method, and the part of a step that it is."""


@contextmanager
def profiling(
    run: Run,
    engine: Engine,
    batches: GlobalBatchPrefetcher,
    metrics: MetricsLogger,
    calls: Calls,
    written: Callable[[Path], None] | None,
) -> Iterator[None]:
    """Profiles steps of the run in the block, on every rank: a trace and a table in the folder `profile` of the run.

    If a run ends within the profiled steps, they are those that were computed; if before, a warning is logged.

    Args:
        calls: those that are marked besides the ones of `engine`, `batches` and `metrics`.
        written: called with the path of the table, to report it to MLflow; None on other ranks, and without tracking.
    """
    with ExitStack() as marks:
        recorder = _Recorder(run, engine, metrics, marks, written)
        marks.enter_context(patch.object(batches, "next", partial(recorder.next, batches.next)))
        own: Calls = [
            (batches, "prefetch", "data"), (engine, "backward", "backward"), (engine, "step", "optimizer"),
            *((metrics, name, "tracking") for name in ("count", "log", "audit")),
            (transformer, "label_smoothed_cross_entropy", "loss"), (engine.objective, "forward", "forward"),
        ]  # fmt: skip
        for owner, name, part in (*own, *calls, *_sub_layers(engine.objective)):
            marks.enter_context(patch.object(owner, name, record_function(PREFIX + part)(getattr(owner, name))))
        marks.enter_context(group.around_waits(partial(record_function, f"{PREFIX}communication")))
        with recorder.profiler:
            try:
                yield
            except BaseException:
                recorder.profiler.on_trace_ready = None  # a run that fails writes none
                with suppress(RuntimeError):  # another rank may have ended
                    engine.wait_for_weights()
                raise
            engine.wait_for_weights()  # see `_Recorder.next`
    if not recorder.is_written:
        log.warning("profile    none: this start ended before step %d of its own", WARM_UP_STEPS + PLAIN_STEPS + 2)


class _Recorder:
    """Tells the profiler of each step, which begins when the loop requests a batch, and writes what it recorded."""

    def __init__(
        self, run: Run, engine: Engine, metrics: MetricsLogger, marks: ExitStack, written: Callable[[Path], None] | None
    ) -> None:
        self._run, self._engine, self._metrics, self._marks, self._written = run, engine, metrics, marks, written
        self._on_gpu = run.ranks.device.type == "cuda"
        self._clocks = [(time.perf_counter(), time.process_time())]  # at the beginning of each step
        self._is_computing, self.is_written = False, False
        steps = schedule(skip_first=WARM_UP_STEPS + PLAIN_STEPS, wait=0, warmup=1, active=PROFILED_STEPS, repeat=1)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        self.profiler = profile(activities=activities, schedule=steps, on_trace_ready=self._write)

    def next(self, next_batch: Callable[[], GlobalBatch]) -> GlobalBatch:
        """Replaces `GlobalBatchPrefetcher.next` (collective).

        No collective may be on its way when the profiler stops: gloo's threads record theirs in the list that it reads
        (torch 2.13: a segmentation fault).
        """
        if self._is_computing:  # else an epoch has ended, and the step continues with the next one
            began = time.monotonic()
            if self.profiler.current_action is ProfilerAction.RECORD_AND_SAVE:
                self._engine.wait_for_weights()
            self._clocks.append((time.perf_counter(), time.process_time()))
            self.profiler.step()
            self._metrics.exclude(time.monotonic() - began)  # to write a profile does not count for the speed
        with record_function(f"{PREFIX}data"):
            batch = next_batch()
        self._is_computing = bool(batch.pairs) and not batch.stop
        return batch

    def _write(self, profiler: profile) -> None:
        """Writes this rank's trace and table. An error of the disk is only a warning."""
        ranks, folder, self.is_written = self._run.ranks, self._run.run_dir.profile, True
        self._run.watchdog.progress("writing the profile")
        self._marks.close()
        averages: Any = profiler.key_averages()
        lines, path = self._lines(averages), folder / f"profile_rank{ranks.rank}.md"
        sort_by = "self_device_time_total" if self._on_gpu else "self_cpu_time_total"
        operators = averages.table(sort_by=sort_by, row_limit=MOST_OPERATORS, max_name_column_width=75)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(folder / f"trace_rank{ranks.rank}.json.gz"))
            write_text(path, "\n".join(["# Where a step goes", "", "```", *lines, "", operators, "```", ""]))
        except OSError as error:
            log.warning("profile    %s cannot be written: %s", path, error)
            return
        finally:
            profiler.profiler = None  # frees the recorded events, which are large
        for line in lines:
            log.info("profile    %s", line)
        log.info("profile    more in %s; traces to open at https://ui.perfetto.dev beside it", path)
        if self._written is not None:
            self._written(path)

    def _lines(self, averages: Iterable[Any]) -> list[str]:
        ranks, plain = self._run.ranks, self._clocks[WARM_UP_STEPS : WARM_UP_STEPS + PLAIN_STEPS + 1]
        wall, cpu = (median(b - a for a, b in itertools.pairwise(c)) for c in zip(*plain, strict=True))
        found = {one.key.removeprefix(PREFIX): one for one in averages if one.device_type.name == "CPU"}
        step = found[STEP]
        rows = [
            [
                "the step" if part == STEP else part,
                f"{one.count / step.count:.1f}",
                f"{one.cpu_time_total / 1000 / step.count:.2f}",
                f"{one.cpu_time_total / step.cpu_time_total:.1%}",
                *([f"{one.device_time_total / 1000 / step.count:.2f}"] if self._on_gpu else []),
            ]
            for part, one in ((part, found[part]) for part in (*PARTS, STEP) if part in found)
        ]
        return [
            f"rank {ranks.rank} of {ranks.num_ranks}, {ranks.device.type}, {self._run.training.precision}, "
            f"threads {torch.get_num_threads()}; {step.count} steps",
            f"a step takes {1000 * wall:.1f} ms, and {1000 * cpu:.1f} ms of the CPUs; under the profiler, as below, "
            f"{step.cpu_time_total / 1000 / step.count:.1f} ms",
            *table(["part", "times a step", "ms a step", "share", *(["GPU ms"] if self._on_gpu else [])], rows),
        ]


def _sub_layers(objective: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, str]]:
    for module in objective.modules():
        if isinstance(module, SelfAttention | CrossAttention):
            yield module, "forward", "attention"
        elif isinstance(module, FeedForward):
            yield module, "forward", "feed-forward"
