"""The log of a run: its last lines, and new lines as they are written, across requeues and new jobs."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

from dist_transformer.errors import UserError
from dist_transformer.run.folder import RunDir
from dist_transformer.run.tail import end_of_last_line, last_lines, lines_from

MAX_TAIL_BYTES = 16 << 20
"""Bytes from the end that are searched for lines: those of one rank may be few."""

LOOK_SECONDS = 0.5
ASK_SECONDS = 10.0
"""Interval at which Slurm is asked whether the run is over, long enough not to burden the cluster's controller."""

_HANG = "where each thread stands:"


def log_of_job(run_dir: RunDir, job_id: str) -> Path | None:
    """The log of one job, of whatever stage: job-5.log, prepare-4.log."""
    return next(iter(sorted(run_dir.slurm.glob(f"*-{job_id}.log"))), None)


def newest_log(run_dir: RunDir) -> Path | None:
    """The log of the newest training job, else train.log, which rank 0 always writes."""
    of_jobs = sorted(run_dir.slurm.glob("job-*.log"), key=lambda path: path.stat().st_mtime)
    return next((path for path in (*reversed(of_jobs), run_dir.log) if path.is_file()), None)


def log_of_run(run_dir: RunDir, job_id: str | None) -> Path | None:
    """The log of job `job_id`; before it has one, the newest log of the run."""
    return (log_of_job(run_dir, job_id) if job_id else None) or newest_log(run_dir)


def wait_for_log(find: Callable[[], Path | None], is_over: Callable[[], bool]) -> Path | None:
    """The path that `find` returns, as soon as it does; None: the run was over before. `is_over`: see `follow`."""
    return next(path for over in _looks(is_over) if (path := find()) is not None or over)


def _looks(is_over: Callable[[], bool]) -> Iterator[bool]:
    """Yields every LOOK_SECONDS whether the run is over, which is asked every ASK_SECONDS; between them False."""
    for look in count():
        yield look % round(ASK_SECONDS / LOOK_SECONDS) == 0 and is_over()
        time.sleep(LOOK_SECONDS)


def rank_filter(path: Path, rank: int | None) -> Callable[[str], str | None]:
    """A function that returns the text to show for a line of this log; None: the line is not of this rank. Raises
    UserError: the log does not tell ranks apart."""
    if rank is None or (rank == 0 and path.name == "train.log"):
        return lambda line: line
    if path.name == "train.log":
        raise UserError(f"{path}: is written by rank 0 alone, so nothing of rank {rank} is in it; leave --rank out")
    label = re.compile(rf" *{rank}: (.*)", re.DOTALL)  # srun pads the numbers of many ranks to one width
    return lambda line: match[1] if (match := label.fullmatch(line)) else None


def tail(path: Path, num_lines: int, rank: int | None, end: int | None = None) -> list[str]:
    """The last lines (of a rank) before `end` in bytes, found from there backwards."""
    found: list[str] = []
    show = rank_filter(path, rank)
    for line in last_lines(path, MAX_TAIL_BYTES, end):
        if len(found) >= num_lines:
            break
        text = show(line)
        if text is not None and (text or found):  # skips the empty text after the last line break
            found.append(text)
    return found[::-1]


def follow(
    find_newest: Callable[[], Path | None], path: Path, num_lines: int, rank: int | None, is_over: Callable[[], bool]
) -> Iterator[str]:
    """Yields the last lines of a log, new lines as they are written, then those of a newer job's log; ends when the run
    is over and everything was yielded.

    Args:
        find_newest: returns the newest log, which a newer job may have begun.
        path: the first log.
        is_over: called at the start and then every ASK_SECONDS; may be slow.
    """
    end = end_of_last_line(path)
    yield from tail(path, num_lines, rank, end)
    show = rank_filter(path, rank)
    for over in _looks(is_over):
        with suppress(FileNotFoundError):
            end = end if path.stat().st_size >= end else 0  # a file that was cut is read from its beginning
            for line, after in lines_from(path, end):
                end = after
                if (text := show(line[:-1].decode(errors="replace"))) is not None:
                    yield text
        newest = find_newest()
        if newest is not None and newest != path and newest.stat().st_mtime > path.stat().st_mtime:
            yield f"--- {newest}"
            path, end, show = newest, 0, rank_filter(newest, rank)
        elif over:
            if rest := show(next(last_lines(path, MAX_TAIL_BYTES), "")):
                yield rest
            return


def last_hang(path: Path, max_lines: int = 400) -> list[str]:
    """Stacks of the ranks from the newest attempt that a rank's Watchdog ended as hung; empty: none hung."""
    lines: list[str] = []
    first = None
    for line in last_lines(path, MAX_TAIL_BYTES):
        lines.append(line)
        if _HANG in line:
            first = len(lines)
        elif first is not None and re.search(r"job \S+ attempt \d+: ", line):
            break
    return [] if first is None else [line for line in lines[:first][::-1] if line][:max_lines]
