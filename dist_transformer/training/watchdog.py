"""Detection of hangs: a rank without progress prints each thread's stack and leaves with its own code."""

import faulthandler
import os
import threading
import time

from dist_transformer.distributed.causes import exit_code_of_victim
from dist_transformer.distributed.group import Ranks
from dist_transformer.errors import EXIT_HANG, say
from dist_transformer.processes.stop_request import STOPPED_SECONDS


class Watchdog:
    """Ends this process if `progress` was not called for `hang_seconds`, but for those in which it was stopped (their sum,
    until a reader sets it to 0: `stop_seconds`). The message names the last progress and the current or last collective:
    ranks that name different ones are out of step."""

    def __init__(self, hang_seconds: int, ranks: Ranks) -> None:
        self._hang_seconds, self._ranks = hang_seconds, ranks
        self.stop_seconds = 0.0
        self._doing, self._since = "starting", time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._since = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()

    def progress(self, doing: str) -> None:
        """Reports progress; `doing` describes the work that begins now."""
        self._doing, self._since = doing, time.monotonic()

    def _watch(self) -> None:
        pause, now = min(1.0, self._hang_seconds / 4), time.monotonic()
        while not self._ended.wait(pause):
            before, now = now, time.monotonic()
            if (stopped := now - before - pause) > STOPPED_SECONDS:
                self._since = min(now, self._since + stopped)
                self.stop_seconds += stopped
            if (silent := now - self._since) > self._hang_seconds:
                self._end(silent)

    def _end(self, silent_seconds: float) -> None:
        say(
            f"rank {self._ranks.rank}: no progress for {silent_seconds:.0f} s (training.hang_seconds = "
            f"{self._hang_seconds}) while {self._doing}; {self._ranks.last.text()}; where each thread stands:"
        )
        faulthandler.dump_traceback(2)  # all threads; the number of the file, as standard error may be closed
        waits_for_others = self._ranks.last.ended is None and self._ranks.num_ranks > 1
        os._exit(exit_code_of_victim(EXIT_HANG) if waits_for_others else EXIT_HANG)
