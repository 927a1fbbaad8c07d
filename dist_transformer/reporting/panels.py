"""Which curves are drawn together: the small pictures of a run, and those of several runs laid over each other."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dist_transformer.reporting.curves import Curve, Curves
from dist_transformer.reporting.reading import RunStory

WARM_UP_SHARE = 0.03
"""The first steps of a run, whose losses would press all later ones flat."""
MOST_LINES = 8
"""Of more nodes or GPUs than this, the lowest, the mean and the highest are drawn."""
QUANTITIES = {
    "cpu_percent": ("Processors in use", "%"),
    "memory_gb": ("Memory in use", "GB"),
    "sent_mb_per_second": ("Sent over the network", "MB/s"),
    "received_mb_per_second": ("Received over the network", "MB/s"),
    "GPU percent": ("GPUs in use", "%"),
    "GPU memory_gb": ("Memory of GPUs in use", "GB"),
    "GPU watts": ("Power of GPUs", "W"),
    "GPU celsius": ("Temperature of GPUs", "\N{DEGREE SIGN}C"),
}
"""Titles and units of what is measured of a node, or of a GPU of it."""
WIDE_RANGE = 20.0
"""Values whose largest is so many times the smallest are drawn on a logarithmic axis, where a panel allows it."""
SCORES = {"bleu": "BLEU", "chrf": "chrF", "comet": "COMET", "token_accuracy": "Token accuracy"}


@dataclass(frozen=True)
class Line:
    label: str
    curve: Curve
    style: int = 0
    """Its color and dashes; lines of one run, or of one thing, have the same."""


@dataclass(frozen=True)
class Panel:
    """One small picture over the steps.

    Attributes:
        name: unique on a page; letters, digits and dashes.
        cuts_start: the first steps may lie outside of the picture.
        may_be_log: a logarithmic axis where values range widely.
        best: step and value to be marked.
    """

    name: str
    title: str
    unit: str
    lines: tuple[Line, ...]
    cuts_start: bool = False
    may_be_log: bool = False
    best: tuple[int, float] | None = None

    @property
    def is_log(self) -> bool:
        values = np.concatenate([line.curve.values for line in self.lines])
        return self.may_be_log and bool(values.min() > 0) and bool(values.max() > WIDE_RANGE * values.min())


@dataclass(frozen=True)
class Marks:
    """What all pictures of a page share: the steps from 0 to `last_step`, and those with a line down the picture."""

    last_step: int
    restarts: Sequence[int] = ()
    divergences: Sequence[int] = ()


def marks_of(story: RunStory) -> Marks:
    return Marks(story.curves.last_step, story.restart_steps, story.divergence_steps)


def panels_of(story: RunStory) -> list[Panel]:
    """The pictures of one run, without those that it has no numbers for."""
    curves = story.curves
    panels = [*_loss_panels(curves), *_score_panels(curves), *_training_panels(curves), *_mixture_panels(curves)]
    return [_with_best(panel, story) for panel in [*panels, *_system_panels(curves)]]


def compared_panels(stories: Sequence[tuple[str, RunStory]]) -> list[Panel]:
    """The pictures of several runs by name, a line each."""
    curves = {name: story.curves for name, story in stories}
    wanted = [
        ("train-loss", "Training loss", "nats per target token", "train", "loss"),
        ("validation-loss", "Validation loss", "nats per target token", "validation", "loss"),
        *((f"validation-{key}", f"{title}, validation", "", "validation", key) for key, title in SCORES.items()),
        ("learning-rate", "Learning rate", "", "train", "learning_rate"),
        ("speed", "Speed", "target tokens/s", "train", "tokens_per_second"),
        ("gradient-norm", "Gradient norm", "", "train", "gradient_norm"),
    ]
    panels = []
    for name, title, unit, event, key in wanted:
        found = {run: curve for run, each in curves.items() if (curve := each.of(event, key)) is not None}
        styles = {run: number for number, run in enumerate(curves)}
        panel = _panel(name, title, unit, found, styles)
        panels += [replace(each, cuts_start=key == "loss", may_be_log=key == "gradient_norm") for each in panel]
    return panels


def _loss_panels(curves: Curves) -> list[Panel]:
    panels = []
    for key, title in (("loss", "Loss, labels smoothed"), ("nll", "Negative log-likelihood")):
        found = {"training": curves.of("train", key)} | _of_corpora(curves, key)
        panels += _panel(key, title, "nats per target token", found)
    return [replace(panel, cuts_start=True) for panel in panels]


def _score_panels(curves: Curves) -> list[Panel]:
    return [
        panel
        for key, title in SCORES.items()
        for panel in _panel(key.replace("_", "-"), title, "", _of_corpora(curves, key))
    ]


def _of_corpora(curves: Curves, key: str) -> dict[str, Curve | None]:
    """A measure of each validation corpus: `bleu`, `newstest2013/bleu`."""
    further = [name for name in curves.names("validation") if name.endswith(f"/{key}")]
    return {"validation": curves.of("validation", key)} | {
        name.rpartition("/")[0]: curves.of("validation", name) for name in further
    }


def _training_panels(curves: Curves) -> list[Panel]:
    def one(key: str) -> dict[str, Curve | None]:
        return {"training": curves.of("train", key)}

    def percent(key: str) -> Curve | None:
        curve = curves.of("train", key)
        return Curve(curve.steps, 100 * curve.values) if curve else None

    shares = {"padding": percent("padding_share"), "waiting for data": percent("data_wait_share")}
    scale, skipped = curves.of("train", "loss_scale"), curves.of("train", "skipped_updates")
    return [
        *_panel("learning-rate", "Learning rate", "", one("learning_rate")),
        *_panel("speed", "Speed", "target tokens/s", one("tokens_per_second")),
        *_panel("waste", "Padding and data wait", "%", shares),
        *_as_log(_panel("gradient-norm", "Gradient norm", "", one("gradient_norm"))),
        *_as_log(_panel("loss-scale", "Loss scale", "", {"training": scale}) if _varies(scale) else []),
        *(_panel("skipped", "Updates skipped so far", "updates", {"training": skipped}) if _varies(skipped) else []),
    ]


def _as_log(panels: list[Panel]) -> list[Panel]:
    return [replace(panel, may_be_log=True) for panel in panels]


def _mixture_panels(curves: Curves) -> list[Panel]:
    """How many pairs came from each corpus of a mixture between two log lines."""
    found = {
        name.removeprefix("pairs/"): curves.of("train", name) for name in curves.names("train") if "pairs/" in name
    }
    return _panel("mixture", "Pairs of each corpus", "pairs a log line", found)


def _system_panels(curves: Curves) -> list[Panel]:
    """One picture a quantity, a line a node or GPU: `n1/cpu_percent`, `n1/gpu0/percent`."""
    groups: dict[str, dict[str, Curve]] = defaultdict(dict)
    for name in curves.names("system"):
        machine, _, quantity = name.rpartition("/")
        curve = curves.of("system", name)
        if machine and curve is not None:
            groups[f"GPU {quantity}" if "/" in machine else quantity][machine] = curve
    panels = []
    for number, (quantity, machines) in enumerate(sorted(groups.items())):
        lines = machines if len(machines) <= MOST_LINES else _spread(machines)
        panels += _panel(f"system-{number}", *QUANTITIES.get(quantity, (quantity.replace("_", " "), "")), lines)
    return panels


def _spread(machines: Mapping[str, Curve]) -> dict[str, Curve]:
    """The lowest, the mean and the highest of many curves, at the steps that any of them has."""
    steps = np.unique(np.concatenate([curve.steps for curve in machines.values()]))
    table = np.full((len(machines), len(steps)), np.nan)
    for row, curve in zip(table, machines.values(), strict=True):
        row[np.searchsorted(steps, curve.steps)] = curve.values
    with np.errstate(all="ignore"):
        found = {"highest": np.nanmax(table, 0), "mean": np.nanmean(table, 0), "lowest": np.nanmin(table, 0)}
    return {f"{label} of {len(machines)}": Curve(steps, values) for label, values in found.items()}


def _varies(curve: Curve | None) -> bool:
    return curve is not None and bool((curve.values != curve.values[0]).any())


def _panel(
    name: str, title: str, unit: str, curves: Mapping[str, Curve | None], styles: Mapping[str, int] | None = None
) -> list[Panel]:
    """One panel of the curves that are there and have finite values; none where there are none."""
    styles = styles or {label: number for number, label in enumerate(curves)}
    lines = [
        Line(label, finite, styles[label])
        for label, curve in curves.items()
        if curve is not None and (finite := curve.finite()) is not None
    ]
    return [Panel(name, title, unit, tuple(lines))] if lines else []


def _with_best(panel: Panel, story: RunStory) -> Panel:
    best = story.best
    if best is None or panel.name != best.measure.rpartition("/")[2].replace("_", "-"):
        return panel
    return replace(panel, best=(best.step, best.value))
