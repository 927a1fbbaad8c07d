"""`dist-transformer train` with clocks in it, for benchmarks/budgets.py.

    python benchmarks/timed_train.py CLOCKS.json RUN.yaml [SECTION.KEY=VALUE ...]

It records at each log line the time that the training thread spent on counting, logging and drawing, and the
CPU-seconds of the threads that follow the run (the tracker's, the sampler's); of each checkpoint, those of the thread
that writes it. All sums are since the start. The module has no slow imports at the top, as loader processes import the
main module too.
"""

import contextlib
import functools
import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLLOWERS = ("tracking ", "system metrics")
"""Prefixes of the names of the threads that follow a run."""


class Clocks:
    """Sums of seconds by purpose, and their samples at log lines."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.samples: list[dict[str, float]] = []
        self._depth = 0

    def time(self, owner: Any, name: str) -> None:
        """Counts wall seconds of the outermost of these calls, in the training thread, as "logging"."""

        def timed(method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
            self._depth += 1
            began = time.perf_counter()
            try:
                return method(*arguments, **options)
            finally:
                self._depth -= 1
                self.seconds["logging"] += 0.0 if self._depth else time.perf_counter() - began

        _wrap(owner, name, timed)

    def time_thread(self, owner: Any, name: str, what: str) -> None:
        """Counts CPU-seconds of a thread whose whole work is this call."""

        def timed(method: Callable[..., Any], *arguments: Any) -> None:
            method(*arguments)
            self.seconds[what] += time.thread_time()
            self.seconds[f"{what}, times"] += 1

        _wrap(owner, name, timed)

    def sample_after(self, owner: Any, name: str, is_tracked: Callable[[Any], bool]) -> None:
        """Takes a sample after each such call; `is_tracked` returns whether the object's MLflow run has been made."""

        def sampled(method: Callable[..., Any], self_: Any, *arguments: Any) -> None:
            method(self_, *arguments)
            times = {"wall": time.perf_counter(), "followers": _cpu_seconds_of_followers()}
            self.samples.append({**self.seconds, **times, "tracked": is_tracked(self_)})

        _wrap(owner, name, sampled)


def main() -> None:
    from dist_transformer.cli.main import main as command
    from dist_transformer.training import rank
    from dist_transformer.training.checkpoint import async_writer
    from dist_transformer.training.metrics.console import ProgressBar
    from dist_transformer.training.metrics.logger import MetricsLogger

    clocks, file, train = Clocks(), Path(sys.argv[1]), rank.train_rank
    for owner, name in ((MetricsLogger, "count"), (MetricsLogger, "log"), (ProgressBar, "show")):
        clocks.time(owner, name)
    clocks.time_thread(async_writer._Writer, "run", "writing")
    clocks.sample_after(MetricsLogger, "log", lambda logger: logger._run_log._run_dir.tracking.exists())

    def train_and_write(*arguments: Any) -> int:
        code = train(*arguments)
        file.write_text(json.dumps(clocks.samples), encoding="utf-8")
        return code

    rank.train_rank = train_and_write  # type: ignore[assignment]
    sys.argv[1:] = ["train", *sys.argv[2:]]
    command()


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    method = getattr(owner, name)

    @functools.wraps(method)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        return around(method, *arguments, **options)

    setattr(owner, name, wrapped)


def _cpu_seconds_of_followers() -> float:
    seconds = 0.0
    for thread in threading.enumerate():
        if thread.name.startswith(FOLLOWERS) and thread.ident is not None:
            with contextlib.suppress(OSError):  # the thread has just ended
                seconds += time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return seconds


if __name__ == "__main__":
    main()
