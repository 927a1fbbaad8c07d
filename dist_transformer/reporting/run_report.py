"""The report of one run."""

import logging
from pathlib import Path

from dist_transformer.run.folder import RunDir
from dist_transformer.run.outputs import write_output

log = logging.getLogger(__name__)

LARGEST_AT_END_BYTES = 200_000_000
"""Size limit of metrics.jsonl for a report at the end of a run, while all ranks and GPUs wait: 240 MB took 12 s."""


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
        write_run_report(run_dir)
        return True
    except Exception as error:  # noqa: BLE001  (drawing must not turn a finished run into a failed one)
        log.warning("%s was not written: %s: %s", run_dir.report, type(error).__name__, error)
        return False


def write_run_report(run_dir: RunDir, output: Path | None = None) -> Path:
    """Writes the page about a run, by default report.html in its folder, and returns its path. Raises UserError: the
    page cannot be written."""
    from dist_transformer.reporting.page import run_page  # numpy and matplotlib
    from dist_transformer.reporting.run_history import read_story

    write_output(output or run_dir.report, run_page(read_story(run_dir)))
    return output or run_dir.report
