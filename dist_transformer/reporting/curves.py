"""The curves of a run: one array of steps and one of values for each number in metrics.jsonl, thinned for charts.

curves = read_curves(run_dir.metrics)
curves.of("train", "loss")              # Curve(steps, values), or None
thinned(curve, 500)                     # at most 500 points, with the lowest and highest value around each
"""

from array import array
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dist_transformer.config.metrics import MEASURES, corpus_and_measure, is_lower_better
from dist_transformer.run.metrics_log import read_records

Floats = NDArray[np.float64]
TOO_LARGE = 1e300
"""Near the largest number the ends of a chart's axis would be infinite."""


@dataclass(frozen=True)
class Curve:
    """Values by step, steps ascending; both of the same length, at least 1. Values may be NaN or infinite."""

    steps: Floats
    values: Floats

    @property
    def last(self) -> float:
        return float(self.values[-1])

    def finite(self) -> "Curve | None":
        """The finite points that fit a chart; None without any."""
        is_finite = np.abs(self.values) < TOO_LARGE
        return Curve(self.steps[is_finite], self.values[is_finite]) if is_finite.any() else None

    def best(self, measure: str, after_step: int = -1) -> tuple[int, float] | None:
        """Step and value of the first best finite point of a validation measure: loss, newstest2013/bleu. None: unknown."""
        later = self.steps > after_step
        finite = Curve(self.steps[later], self.values[later]).finite()
        if finite is None or corpus_and_measure(measure)[1] not in MEASURES:
            return None
        index = int(np.argmin(finite.values) if is_lower_better(measure) else np.argmax(finite.values))
        return int(finite.steps[index]), float(finite.values[index])


@dataclass(frozen=True)
class Curves:
    """Content of metrics.jsonl.

    Attributes:
        by_event: the curves of "train", "validation", "system" by the name of the number, including "time".
        newest: the newest record of each event, unchanged.
    """

    by_event: dict[str, dict[str, Curve]] = field(default_factory=dict)
    newest: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def last_step(self) -> int:
        """The newest step of any record; 0 without records."""
        return max((int(record.get("step", 0)) for record in self.newest.values()), default=0)

    def of(self, event: str, name: str) -> Curve | None:
        return self.by_event.get(event, {}).get(name)

    def names(self, event: str) -> list[str]:
        return list(self.by_event.get(event, {}))


@dataclass(frozen=True)
class Thinned:
    """A curve with fewer points: `middle` is the mean around each, `low` and `high` the extremes; None: not thinned."""

    steps: Floats
    middle: Floats
    low: Floats | None = None
    high: Floats | None = None


def read_curves(path: Path) -> Curves:
    """Reads every number of every record, except for torn lines; a missing file has no curves."""
    columns: dict[tuple[str, str], tuple[array[float], array[float]]] = defaultdict(lambda: (array("d"), array("d")))
    newest: dict[str, dict[str, Any]] = {}
    for record in read_records(path):
        event, step = str(record["event"]), record.get("step", 0)
        newest[event] = record
        for name, value in record.items():
            if type(value) in (int, float) and name != "step":
                steps, values = columns[event, name]
                steps.append(step)
                values.append(value)
    curves: dict[str, dict[str, Curve]] = {}
    for (event, name), (steps, values) in columns.items():
        order = np.argsort(steps, kind="stable")
        curves.setdefault(event, {})[name] = Curve(np.asarray(steps)[order], np.asarray(values)[order])
    return Curves(curves, newest)


def thinned(curve: Curve, num_points: int) -> Thinned:
    """At most `num_points` points, equally spaced in steps, of a curve of finite values; a spike stays in `high`."""
    if len(curve.steps) <= num_points:
        return Thinned(curve.steps, curve.values)
    first, last = curve.steps[0], curve.steps[-1]
    bucket = np.minimum((curve.steps - first) / (last - first) * num_points, num_points - 1).astype(int)
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    counts = np.diff(starts, append=len(bucket))
    return Thinned(
        np.add.reduceat(curve.steps, starts) / counts,
        np.add.reduceat(curve.values, starts) / counts,
        np.minimum.reduceat(curve.values, starts),
        np.maximum.reduceat(curve.values, starts),
    )
