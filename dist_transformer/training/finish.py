"""End of a start, in every rank: rank 0 writes the model, draws the report and waits for MLflow; the watchdogs of all
ranks receive progress meanwhile."""

import logging
import shutil

from dist_transformer.distributed.rank_zero import run_on_rank_zero
from dist_transformer.distributed.rounds import Stopped
from dist_transformer.errors import CheckpointError, MachineError, UserError
from dist_transformer.run.folder import RunDir
from dist_transformer.tracking.tracker import BUSY_SECONDS, CLOSE_SECONDS, Status, Tracker
from dist_transformer.training.checkpoint.final_model import write_final_model
from dist_transformer.training.run import Run
from dist_transformer.training.run_log import note

log = logging.getLogger(__name__)

REPORT_SECONDS = 600.0
"""Time for drawing the report before it counts as a hang: many times that of the largest report."""
MARGIN_SECONDS = 30.0
"""Time that closing takes in addition to its waits for the server."""
LARGEST_AT_END_BYTES = 200_000_000
"""Size limit of metrics.jsonl for a report at the end of a run, while all ranks and GPUs wait: 240 MB took 12 s."""
WAITING = "waiting for MLflow to take the rest"


class RunEnd:
    """Draws the report and closes the tracker of a start, once.

    Args:
        tracker: None on all ranks but rank 0, and without tracking.
    """

    def __init__(self, run: Run, tracker: Tracker | None) -> None:
        self._run, self.tracker, self._is_closed = run, tracker, False

    def draw_report(self) -> None:
        """Makes the report, for the run's artifacts (collective). A run that is not tracked gets none. Raises Stopped:
        on every rank: a rank was asked to stop."""

        run = self._run

        def draw() -> None:
            if report_after_training(run.run_dir) and self.tracker is not None:
                self.tracker.report_written()

        if run.config.tracking.enabled:
            run_on_rank_zero(run.ranks, draw, run.doing("drawing the report"), REPORT_SECONDS, run.wants_stop)

    def close(self, status: Status) -> None:
        """Waits for MLflow on all ranks (collective)."""
        self._is_closed = True  # even after a failure: no rank waits a second time

        def close() -> None:
            if self.tracker is not None:
                self.tracker.close(status)

        if self._run.config.tracking.enabled:
            seconds = CLOSE_SECONDS + BUSY_SECONDS + MARGIN_SECONDS
            run_on_rank_zero(self._run.ranks, close, self._run.doing(WAITING), seconds)

    def close_alone(self, status: Status) -> None:
        """Closes the tracker after an error, when other ranks may be gone; does nothing if it is closed."""
        if self.tracker is not None and not self._is_closed:
            self._run.watchdog.progress(WAITING)
            self.tracker.close(status)


def report_after_training(run_dir: RunDir) -> bool:
    """Writes the page at the end of a run (rank 0); returns True if it was written.

    A failure is a warning: the run is over and saved. A history that takes long to read is left to the user.
    """
    size = run_dir.metrics.stat().st_size if run_dir.metrics.is_file() else 0
    if size > LARGEST_AT_END_BYTES:
        megabytes, command = size / 1e6, f"dist-transformer report {run_dir.quoted}"
        log.info("report     not drawn now, %s has %.0f MB: %s", run_dir.metrics.name, megabytes, command)
        return False
    try:
        from dist_transformer.reporting.page import write_run_report  # numpy and matplotlib

        write_run_report(run_dir)
        return True
    except Exception as error:  # noqa: BLE001  (drawing must not turn a finished run into a failed one)
        log.warning("%s was not written: %s: %s", run_dir.report, type(error).__name__, error)
        return False


def finish(run: Run, end: RunEnd, step: int, early_stop: str) -> bool:
    """Writes the model and the report of a run after its last step (collective). False: interrupted by a stop."""
    try:
        _write_model(run, end.tracker)
        note(run.run_dir, run.ranks, "finished", step, early_stop)
        end.draw_report()
    except Stopped:
        return False
    return True


def _write_model(run: Run, tracker: Tracker | None) -> None:
    """Writes the model folder on rank 0; a failure or a stop is raised on every rank (collective)."""
    run_dir = run.run_dir

    def write() -> str:
        for left_over in run_dir.path.glob(f".{run_dir.model.name}.*.tmp"):  # of a start that was killed here
            shutil.rmtree(left_over, ignore_errors=True)
        try:
            return write_final_model(run.config, run_dir, run.data.folder, run.data.manifest, run_dir.model)
        except (UserError, OSError) as error:
            kind = MachineError if isinstance(error, MachineError | OSError) else CheckpointError
            raise kind(f"{run_dir.model} could not be written: {error}") from error

    made_of = run_on_rank_zero(run.ranks, write, run.doing("averaging the checkpoints"), wants_stop=run.wants_stop)
    log.info("model      %s: %s", run_dir.model, made_of)
    if tracker is not None:
        tracker.model_written(run_dir.model)
