"""The attempts of a run under Slurm, as attempts.jsonl has them, and the newest checkpoint for the next attempt."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from functools import cache
from typing import Any

from dist_transformer.errors import say
from dist_transformer.run.folder import RunDir
from dist_transformer.run.records import read_record, records_of


def attempts(run_dir: RunDir) -> Iterator[dict[str, Any]]:
    """Yields the records of attempts.jsonl, oldest first; skips a line torn by a dying node."""
    with suppress(OSError):
        lines = run_dir.attempts.read_text(encoding="utf-8", errors="replace").split("\n")
        yield from (record for record in records_of(lines) if {"event", "time", "job"} <= record.keys())


def may_be_hidden(run_dir: RunDir, job_id: str) -> bool:
    """True if another user submitted a job, and no attempt of it has recorded that it is over."""
    [*_, newest] = [{}, *(record for record in attempts(run_dir) if record["job"] == job_id)]
    may_wait = newest.get("event") != "ended" or newest.get("requeued") or newest.get("how") == "ended"
    return bool(may_wait) and run_dir.job.exists() and run_dir.job.stat().st_uid != os.getuid()


def submitted_at(run_dir: RunDir, otherwise: float) -> float:
    """Returns when the newest job was given to Slurm, in Unix seconds; `otherwise`: job.json does not say it."""
    with suppress(ValueError, OverflowError):
        return datetime.fromisoformat(str(read_record(run_dir.job).get("submitted_at"))).timestamp()
    return otherwise


def newest_checkpoint(run_dir: RunDir) -> str | None:
    """Name of the newest finished checkpoint; an unfinished one has another name."""
    try:
        names = [path.name for path in run_dir.checkpoints.iterdir() if re.fullmatch(r"step_\d{1,15}", path.name)]
    except (FileNotFoundError, NotADirectoryError):
        return None
    return max(names, key=lambda name: int(name.removeprefix("step_")), default=None)


@cache
def warn_of_age(run_dir: RunDir) -> None:
    """Warns, once and on rank 0, of a model/ older than the newest checkpoint, unless it is that of a run at its end."""
    with suppress(OSError):
        config = run_dir.model / "config.json"
        checkpoint = run_dir.checkpoints / (newest_checkpoint(run_dir) or "step_0")
        newest = int(checkpoint.name.removeprefix("step_"))
        step = read_record(config).get("step", newest)
        # A model made later is one of older checkpoints, which somebody wanted.
        is_left_behind = step < newest and config.stat().st_mtime <= checkpoint.stat().st_mtime
        is_at_end = read_record(run_dir.state).get("state") == "finished"
        if is_left_behind and not is_at_end and os.environ.get("RANK", "0") == "0":
            average = f"`dist-transformer average {run_dir.quoted}` makes a model of it"
            say(f"warning: {run_dir.model} is of step {step}, the newest checkpoint of step {newest}: {average}")
