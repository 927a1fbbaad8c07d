"""The attempts of a run under Slurm, as attempts.jsonl has them, and the newest checkpoint for the next attempt."""

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from dist_transformer.run.folder import RunDir
from dist_transformer.run.records import records_of


def attempts(run_dir: RunDir) -> Iterator[dict[str, Any]]:
    """Yields the records of attempts.jsonl, oldest first; skips a line torn by a dying node."""
    with suppress(OSError):
        lines = run_dir.attempts.read_text(encoding="utf-8", errors="replace").split("\n")
        yield from (record for record in records_of(lines) if {"event", "time", "job"} <= record.keys())


def newest_checkpoint(run_dir: RunDir) -> str | None:
    """Name of the newest finished checkpoint; an unfinished one has another name."""
    try:
        names = [path.name for path in run_dir.checkpoints.iterdir() if re.fullmatch(r"step_\d{1,15}", path.name)]
    except (FileNotFoundError, NotADirectoryError):
        return None
    return max(names, key=lambda name: int(name.removeprefix("step_")), default=None)
