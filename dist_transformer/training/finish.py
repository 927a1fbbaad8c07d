"""The end of a start, in every rank: rank 0 draws the report and waits for MLflow, and nobody is taken for hung meanwhile."""

from collections.abc import Callable

from dist_transformer.config.schema import Config
from dist_transformer.distributed.group import Ranks
from dist_transformer.distributed.rank_zero import run_on_rank_zero
from dist_transformer.distributed.rounds import WantsStop
from dist_transformer.reporting.run_report import report_after_training
from dist_transformer.run.folder import RunDir
from dist_transformer.tracking.tracker import CLOSE_SECONDS, MODEL_SECONDS, Status, Tracker
from dist_transformer.training.watchdog import Watchdog

REPORT_SECONDS = 600.0
"""So long the report may be drawn before waiting for it counts as a hang: many times what the largest one takes."""
MARGIN_SECONDS = 30.0
"""What closing takes beside its waits for the server."""


class RunEnd:
    """Draws the report and closes the tracker of a start, once.

    Args:
        tracker: None on all ranks but the first, and without tracking.
    """

    def __init__(
        self, config: Config, run_dir: RunDir, ranks: Ranks, watchdog: Watchdog, tracker: Tracker | None
    ) -> None:
        self._tracking, self._run_dir, self._ranks, self._watchdog = config.tracking, run_dir, ranks, watchdog
        self._tracker = tracker
        self._is_closed = False

    def draw_report(self, wants_stop: WantsStop) -> None:
        """The pictures and the page, for the run's artifacts (collective). A run that is not tracked gets none.

        Raises:
            Stopped: a rank wants to stop, on every rank.
        """

        def draw() -> None:
            if report_after_training(self._run_dir) and self._tracker is not None:
                self._tracker.figures_written(self._run_dir.figures)

        if self._tracking.enabled:
            self._by_first(draw, "drawing the report", REPORT_SECONDS, wants_stop)

    def close(self, status: Status) -> None:
        """Waits for MLflow, all ranks together (collective)."""
        self._is_closed = True  # whatever comes of it: nobody waits a second time

        def close() -> None:
            if self._tracker is not None:
                self._tracker.close(status)

        if self._tracking.enabled:
            seconds = CLOSE_SECONDS + MODEL_SECONDS + MARGIN_SECONDS
            self._by_first(close, "waiting for MLflow to take the rest", seconds)

    def close_alone(self, status: Status) -> None:
        """After an error, when other ranks may be gone; nothing when it is closed already."""
        if self._tracker is not None and not self._is_closed:
            self._watchdog.progress("waiting for MLflow to take the rest")
            self._tracker.close(status)

    def _by_first(
        self, work: Callable[[], None], doing: str, seconds: float, wants_stop: WantsStop | None = None
    ) -> None:
        run_on_rank_zero(self._ranks, work, lambda: self._watchdog.progress(doing), seconds, wants_stop)
