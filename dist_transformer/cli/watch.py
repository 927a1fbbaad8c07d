"""status --watch: runs while they train, shown anew every few seconds until all have ended."""

import time
from array import array
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.text import Text

from dist_transformer.cluster.job_status import Document, is_alive, run_folders, short_reports
from dist_transformer.cluster.queue import OVER
from dist_transformer.errors import UserError
from dist_transformer.format import duration
from dist_transformer.reporting.curves import Curve, thinned
from dist_transformer.reporting.formatting import number, scores_text
from dist_transformer.run.folder import RunDir
from dist_transformer.run.metrics_log import read_records_from

REFRESH_SECONDS = 4
BARS = "▁▂▃▄▅▆▇█"
CURVE_POINTS = 40


def watch(folder: Path, *, is_run: bool) -> None:
    """Shows a run, or all runs in a folder, until all have ended or Ctrl-C; plain lines where there is no terminal."""
    with suppress(KeyboardInterrupt), Live(console=Console(), auto_refresh=False) as live:
        while True:
            documents = short_reports([folder] if is_run else run_folders(folder))
            if not documents:
                raise UserError(f"{folder}: no run in it; expected a run folder, or a folder of them")
            lines = [[*_facts(document)] for document in documents]
            if live.console.is_terminal:
                live.update(Text("\n").join(Text("\n  ").join(map(Text, facts)) for facts in lines), refresh=True)
            else:
                print(*("  ".join(facts) for facts in lines), sep="\n", flush=True)
            if all(map(_has_ended, documents)):
                return
            time.sleep(REFRESH_SECONDS)


def sparkline(curve: Curve | None) -> str:
    """A curve as a row of bars, the lowest and the highest of which are the extremes; empty without finite values."""
    finite = curve.finite() if curve else None
    if finite is None:
        return ""
    values = thinned(finite, CURVE_POINTS).middle
    heights = (values - values.min()) / (float(values.max() - values.min()) or 1.0) * (len(BARS) - 1)
    return "".join(BARS[round(height)] for height in heights)


def _facts(document: Document) -> Iterator[str]:
    job = f"  job {document['job_id']} {document['job_state'] or ''}".rstrip() if document["job_id"] else ""
    of = f" of {document['max_steps']}" if document["max_steps"] else ""
    yield f"{document['run']}: {document['state'] or '-'}  step {document['step']}{of}  starts {document['starts']}{job}"
    if document["slurm_problem"]:
        yield document["slurm_problem"]
    if document["record_time"] is not None:
        bars, scores = next(_looks(RunDir(Path(document["folder"])).metrics))
        left = f"  {duration(seconds)} left" if (seconds := document["seconds_to_last_step"]) is not None else ""
        speed = number(document["tokens_per_second"], ",.0f")
        yield f"loss {bars} {number(document['loss'], '.4f')}  {speed} tokens/s{left}"
        if scores:
            yield f"validation at step {scores.get('step')}: {scores_text(scores)}"


@lru_cache(maxsize=4096)
def _looks(metrics: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the bars of the loss and the newest validation for each look, which reads what was added since the last one."""
    inode = offset = 0
    while True:
        status = metrics.stat()
        if status.st_ino != inode or status.st_size < offset:  # a resume that drops records replaces the file
            inode, offset, points, newest = status.st_ino, 0, array("d"), dict[str, dict[str, Any]]()
        for record, end in read_records_from(metrics, offset, ("train", "validation")):
            newest[record["event"]], offset = record, end
            if record["event"] == "train" and isinstance(loss := record.get("loss"), int | float):
                points.extend((record.get("step", 0), loss))
        curve = np.array(points).reshape(-1, 2)
        yield sparkline(Curve(*curve[curve[:, 0].argsort(kind="stable")].T)), newest.get("validation", {})


def _has_ended(document: Document) -> bool:
    """True if nobody trains the run and no job of it waits or runs; not while Slurm cannot be asked."""
    is_over = document["job_state"] in (None, *OVER) and document["slurm_problem"] is None
    return is_over and not is_alive(document)
