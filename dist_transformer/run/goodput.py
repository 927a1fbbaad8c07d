"""Goodput: where the wall time of a run went since its first submission, in classes that add up to all of it.

    submitted    began       training     died        noticed       began       training      ended
       | queue     | start      | steps ...  | detection  | queue      | start      | steps ...   |

docs/training.md says of what it is made, and what each class counts.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise, zip_longest
from typing import Any

from dist_transformer.files import modified
from dist_transformer.format import duration
from dist_transformer.run.attempts import attempts, submitted_at
from dist_transformer.run.folder import RunDir
from dist_transformer.run.metrics_log import read_records, read_records_from

Record = dict[str, Any]
CLASSES = {
    "steps": "steps that stayed",
    "data_wait": "waiting for data",
    "validations": "validations",
    "saves": "waiting for checkpoints",
    "start": "start: imports, corpus, checkpoint, dry run",
    "lost": "steps that were lost and computed again",
    "detection": "detection of failures",
    "queue": "queue, between starts, and suspended",
    "other": "the rest: the end of a start, with its save, validation, averages and report",
}
"""Each class with its words. Communication that nothing hides is part of the steps: `train --profile` shows it."""


@dataclass(frozen=True)
class Goodput:
    """Seconds of each class; `rank_seconds`: those times the ranks of the start, without what passed between starts."""

    seconds: dict[str, float]
    rank_seconds: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def trained_seconds(self) -> float:
        """Time between the starts of training and their ends."""
        return self.total - sum(self.seconds[name] for name in ("start", "detection", "queue"))

    def shares(self) -> dict[str, float]:
        """Returns the share of each class in all time; they add up to 1."""
        return {name: value / self.total for name, value in self.seconds.items()} if self.total > 0 else {}


@dataclass
class _Start:
    """A start: when its process began, trained and ended; `spent` seconds by class, first of the time between the last two."""

    began: float
    trained: float
    ended: float
    num_ranks: int
    has_died: bool
    has_finished: bool
    spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CLASSES, 0.0))

    @property
    def rest(self) -> float:
        return self.ended - self.trained - sum(self.spent.values())


@dataclass
class Counted:
    """Log lines that `goodput_of` has counted: the offset in bytes of their end, and the starts with their times."""

    offset: int = 0
    starts: Sequence[_Start] = ()


def goodput_of(run_dir: RunDir, now: float, counted: Counted | None = None) -> Goodput | None:
    """Returns the goodput of a run up to its end, or to `now` if it trains; None if no start is recorded. Log lines that
    a call before has added to `counted` are not read again; a rewind makes it invalid."""
    starts, counted = _starts(run_dir, now), counted or Counted()
    if not starts:
        return None
    for start, before in zip(starts, counted.starts, strict=False):
        start.spent, start.ended = {**before.spent}, max(start.ended, before.ended)
    end = counted.offset
    for record, after in read_records_from(run_dir.metrics, counted.offset, ("train",)):
        _count(record, starts)
        end = after
    counted.offset, counted.starts = end, [replace(start, spent={**start.spent}) for start in starts]
    _move_overlaps(starts)
    for start in starts:
        start.spent |= {"start": start.trained - start.began, "lost" if start.has_died else "other": start.rest}
    seconds = {name: sum(start.spent[name] for start in starts) for name in CLASSES}
    of_ranks = {name: sum(start.spent[name] * start.num_ranks for start in starts) for name in CLASSES}
    ends = [record["time"] for record in attempts(run_dir) if record["event"] == "ended"]
    seconds["queue"] += max(0.0, starts[0].began - submitted_at(run_dir, starts[0].began))
    for start, following in pairwise(starts):
        noticed = next((end for end in ends if start.ended <= end <= following.began), start.ended)
        seconds["detection"] += noticed - start.ended
        seconds["queue"] += 0.0 if start.has_finished else following.began - noticed  # a finished run waits for nothing
    return Goodput(seconds, of_ranks)


def _starts(run_dir: RunDir, now: float) -> list[_Start]:
    """Returns the starts in order, none of which begins before the one before it has ended."""
    records = [r for r in read_records(run_dir.history, "start", "end") if {"time", "step"} <= r.keys()]
    begins = [number for number, record in enumerate(records) if record["event"] == "start"]
    starts: list[_Start] = []
    for number, following in zip_longest(begins, begins[1:]):
        record = records[number]
        said = next((r for r in records[number + 1 : following] if r["event"] == "end"), {})  # its word of its end
        end = said.get("time")
        if end is None and following is not None:  # without a word of the next start, its last record decides (_count)
            end = records[following].get("before_seen") or records[following].get("began") or record["time"]
        earliest = starts[-1].ended if starts else 0.0
        trained = max(record["time"], earliest)
        began = min(max(record.get("began", trained), earliest), trained)
        state = said.get("state", "failed")  # the end of a start that failed may have the step of its beginning
        has_died = following is not None and (state == "failed" or records[following]["step"] < said["step"])
        ended = max(trained, _last_sign(run_dir, now) if end is None else end)
        starts.append(_Start(began, trained, ended, int(record.get("num_ranks", 1)), has_died, state == "finished"))
    return starts


def _last_sign(run_dir: RunDir, now: float) -> float:
    """Returns when a start without an end, and without another one after it, was seen last: `now` if it lives."""
    with suppress(OSError):
        return min(now, modified(run_dir.owner))
    return max((record.get("time", 0.0) for record in read_records(run_dir.metrics)), default=0.0)


def _count(record: Record, starts: Sequence[_Start]) -> None:
    """Adds what a log line's record says of its time to the start that wrote it."""
    written = bisect_right(starts, record.get("time", 0.0), key=lambda start: start.trained)
    if not written or not record.get("tokens_per_second", 0.0) > 0:
        return
    start, following = starts[written - 1], starts[written : written + 1]
    start.ended = max(start.ended, min([record["time"], *(each.began for each in following)]))
    seconds = record.get("target_tokens", 0) / record["tokens_per_second"]
    if not 0 <= seconds < math.inf:  # a record that was edited
        return
    waited = min(1.0, max(0.0, record.get("data_wait_share", 0.0))) * seconds
    start.spent["steps"] += seconds - waited
    start.spent["data_wait"] += waited
    start.spent["saves"] += record.get("save_seconds", 0.0)
    start.spent["validations"] += record.get("validation_seconds", 0.0)
    start.spent["queue"] += record.get("stop_seconds", 0.0)


def _move_overlaps(starts: Sequence[_Start]) -> None:
    """Moves time of records that a checkpoint cut in two, written by one start and partly spent in the one before it."""
    for before, start in reversed([*pairwise(starts)]):
        moved = min(max(0.0, -start.rest), start.spent["steps"])
        start.spent["steps"] -= moved
        before.spent["steps"] += moved
    for start in starts:  # clocks that were set
        start.spent["steps"] += min(0.0, start.rest)


def goodput_text(goodput: Goodput) -> str:
    """Returns the share of the steps that stayed, and the largest shares of everything else."""
    shares = goodput.shares()
    others = sorted((share, name) for name, share in shares.items() if name != "steps" and share >= 0.005)[:-4:-1]
    more = ", ".join(f"{name.replace('_', ' ')} {share:.1%}" for share, name in others)
    return f"{shares.get('steps', 0.0):.1%} of {duration(goodput.total)}" + (f" ({more})" if more else "")


def rows_of(goodput: Goodput) -> Iterator[tuple[str, float, float, float]]:
    """Yields (words, seconds, share, hours of ranks) of each class that has any time."""
    shares = goodput.shares()
    for name, words in CLASSES.items():
        if goodput.seconds[name] > 0:
            yield words, goodput.seconds[name], shares.get(name, 0.0), goodput.rank_seconds[name] / 3600
