"""The log of a run: its end, and what is added to it, over requeues and new jobs."""

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from dist_transformer.errors import UserError
from dist_transformer.run.folder import RunDir
from dist_transformer.run.tail import GrowingFile, end_of_last_line, last_lines

MAX_TAIL_BYTES = 16 << 20
"""How far back lines are looked for: those of one rank may be few."""

LOOK_SECONDS = 0.5
ASK_SECONDS = 10.0
"""How often is asked whether the run is over: not so often that the controller of a cluster would feel it."""
LOOKS_A_QUESTION = round(ASK_SECONDS / LOOK_SECONDS)

_HANG = "where each thread stands:"


def log_of_job(run_dir: RunDir, job_id: str) -> Path | None:
    """What one job wrote, of whatever stage: job-5.log, prepare-4.log."""
    return next(iter(sorted(run_dir.slurm.glob(f"*-{job_id}.log"))), None)


def newest_log(run_dir: RunDir) -> Path | None:
    """That of the newest training job, else train.log, which rank 0 writes everywhere."""
    of_jobs = sorted(run_dir.slurm.glob("job-*.log"), key=lambda path: path.stat().st_mtime)
    return next((path for path in (*reversed(of_jobs), run_dir.log) if path.is_file()), None)


def log_of_run(run_dir: RunDir, job_id: str | None) -> Path | None:
    """That of its newest job; before the job has one, the newest there is."""
    own = log_of_job(run_dir, job_id) if job_id else None
    return own or newest_log(run_dir)


def wait_for_log(
    find: Callable[[], Path | None], is_over: Callable[[], bool], wait: Callable[[float], None] = time.sleep
) -> Path | None:
    """What `find` finds as soon as it finds it; None: the run was over before. `is_over`: as of `follow`."""
    looks = 0
    while True:
        over = looks % LOOKS_A_QUESTION == 0 and is_over()
        path = find()
        if path is not None or over:
            return path
        wait(LOOK_SECONDS)
        looks += 1


def rank_filter(path: Path, rank: int | None) -> Callable[[str], str | None]:
    """What makes of a line of this log the text to show; None: it is not of this rank.

    Raises:
        UserError: the log does not tell ranks apart.
    """
    if rank is None:
        return lambda line: line
    if path.name == "train.log":
        if rank == 0:
            return lambda line: line
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
        if text is not None and (text or found):  # not the nothing behind the last line break
            found.append(text)
    return found[::-1]


def follow(
    find_newest: Callable[[], Path | None],
    path: Path,
    num_lines: int,
    rank: int | None,
    is_over: Callable[[], bool],
    wait: Callable[[float], None] = time.sleep,
) -> Iterator[str]:
    """The last lines of a log, those that are added to it, then those of a newer job's; ends when the run is over and
    all is said.

    Args:
        find_newest: the log that a newer job may have begun by now.
        path: the log to begin with.
        is_over: asked at the start and then every ASK_SECONDS; may be slow.
    """
    end = end_of_last_line(path)
    yield from tail(path, num_lines, rank, end)
    file, show = GrowingFile(path, end), rank_filter(path, rank)
    looks = 0
    while True:
        over = looks % LOOKS_A_QUESTION == 0 and is_over()
        yield from (text for line in file.new_lines() if (text := show(line)) is not None)
        newest = find_newest()
        if newest is not None and newest != file.path and newest.stat().st_mtime > file.path.stat().st_mtime:
            yield f"--- {newest}"
            file, show = GrowingFile(newest), rank_filter(newest, rank)
        elif over:
            if rest := show(file.unfinished_line()):
                yield rest
            return
        else:
            wait(LOOK_SECONDS)
            looks += 1


def last_hang(path: Path, max_lines: int = 400) -> list[str]:
    """Where the ranks stood when the watchdog of one ended the newest attempt that hung; empty: none did."""
    lines: list[str] = []
    first = None
    for line in last_lines(path, MAX_TAIL_BYTES):
        lines.append(line)
        if _HANG in line:
            first = len(lines)
        elif first is not None and re.search(r"job \S+ attempt \d+: ", line):
            break
    return [] if first is None else [line for line in lines[:first][::-1] if line][:max_lines]
