"""Selection of the curves in each panel of a run, and in the panels that compare several runs."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from dist_transformer.config.metrics import MEASURES, TOKEN_MEASURES
from dist_transformer.reporting.curves import Curve, Curves
from dist_transformer.reporting.run_history import RunStory

WARM_UP_SHARE = 0.03
"""Share of the first steps of a run, whose losses would flatten all later ones."""
MOST_LINES = 8
"""Lines for nodes or GPUs; of more of them, the lowest, the mean and the highest are drawn."""
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
"""Titles and units of the quantities measured on a node, or on a GPU of it."""
WIDE_RANGE = 20.0
"""Ratio of the largest to the smallest value above which an axis is logarithmic, if the panel allows it."""
FROM_ZERO = ("%", "GB", "MB/s", "target tokens/s")
"""Units whose axes begin at 0, as the norm's does."""
TITLES = {
    "loss": ("loss (labels smoothed)", "nats per target token"),
    "nll": ("nll (negative log-likelihood)", "nats per target token"),
    **{key: (each.name, "") for key, each in MEASURES.items() if key not in TOKEN_MEASURES},
    "token_accuracy": ("token accuracy", "%"),
}
"""Titles and units of the measures that are drawn."""
SHARES = {"padding": "padding_share", "waiting for data": "data_wait_share"}
OF_FURTHER_CORPORA = ("loss", "bleu")
"""Measures of data.more_validation that are compared between runs."""


@dataclass(frozen=True)
class Line:
    label: str
    curve: Curve
    style: int = 0
    """Color and dashes; lines of the same run or quantity share them."""


@dataclass(frozen=True)
class Panel:
    """One small chart over the steps.

    Attributes:
        name: unique on a page; letters, digits and dashes.
        cuts_start: the first steps may lie outside of the chart.
        may_be_log: the axis is logarithmic if values range widely.
        from_zero: the axis begins at 0, unless it is logarithmic; for percentages it ends at 100 at most.
        best: step and value to be marked.
    """

    name: str
    title: str
    unit: str
    lines: tuple[Line, ...]
    cuts_start: bool = False
    may_be_log: bool = False
    from_zero: bool = False
    best: tuple[int, float] | None = None

    @property
    def is_log(self) -> bool:
        values = np.concatenate([line.curve.values for line in self.lines])
        return self.may_be_log and bool(values.min() > 0) and bool(values.max() > WIDE_RANGE * values.min())


@dataclass(frozen=True)
class Marks:
    """Marks common to all panels of a page: the steps from 0 to `last_step`, and those with a vertical line."""

    last_step: int
    restarts: Sequence[int] = ()
    divergences: Sequence[int] = ()


def marks_of(story: RunStory) -> Marks:
    divergences = [int(event.get("since_step", 0)) for event in story.view.divergences]
    return Marks(story.curves.last_step, story.restart_steps, divergences)


def panels_of(story: RunStory) -> list[Panel]:
    """The panels of one run, without those for which it has no numbers."""
    curves, panels = story.curves, []
    for key, (title, unit) in TITLES.items():
        names = [key, *(name for name in curves.names("validation") if name.endswith(f"/{key}"))]  # newstest2013/bleu
        found = {name.rpartition("/")[0] or "validation": _drawn(curves, "validation", name) for name in names}
        if key in ("loss", "nll"):
            found = {"training": curves.of("train", key)} | found
        panels += _panel(key.replace("_", "-"), title, unit, found)
    panels += [*_training_panels(curves), *_system_panels(curves)]
    return [_with_best(panel, story) for panel in panels]


def compared_panels(stories: Sequence[tuple[str, RunStory]]) -> list[Panel]:
    """The panels of several named runs, with a line for each."""
    wanted = [
        ("train-loss", f"training {TITLES['loss'][0]}", TITLES["loss"][1], "train", "loss"),
        *_compared_measures(stories),
        ("learning-rate", "Learning rate", "", "train", "learning_rate"),
        ("speed", "Speed", "target tokens/s", "train", "tokens_per_second"),
        ("gradient-norm", "Gradient norm", "", "train", "gradient_norm"),
    ]
    styles = {run: number for number, (run, _) in enumerate(stories)}
    panels = []
    for name, title, unit, event, key in wanted:
        panels += _panel(name, title, unit, {run: _drawn(story.curves, event, key) for run, story in stories}, styles)
    return panels


def _compared_measures(stories: Sequence[tuple[str, RunStory]]) -> Iterator[tuple[str, str, str, str, str]]:
    """Yields (name, title, unit, event, measure) of data.validation, then of each further corpus of any run."""
    for key, (title, unit) in TITLES.items():
        yield f"validation-{key.replace('_', '-')}", f"validation {title}", unit, "validation", key
    names = dict.fromkeys(name for _, story in stories for name in story.curves.names("validation"))
    for number, corpus in enumerate(dict.fromkeys(name.rpartition("/")[0] for name in names if "/" in name)):
        for key in OF_FURTHER_CORPORA:
            title, unit = TITLES[key]
            yield f"corpus-{number}-{key}", f"{corpus} {title}", unit, "validation", f"{corpus}/{key}"


def _drawn(curves: Curves, event: str, name: str) -> Curve | None:
    """A curve as it is drawn: shares in per cent."""
    curve = curves.of(event, name)
    is_share = name.rpartition("/")[2] in ("token_accuracy", "mfu", *SHARES.values())
    return Curve(curve.steps, 100 * curve.values) if curve and is_share else curve


def _training_panels(curves: Curves) -> list[Panel]:
    drawn = partial(_drawn, curves, "train")
    shares = {name: drawn(key) for name, key in SHARES.items()}
    scale, skipped = drawn("loss_scale"), drawn("skipped_updates")
    pairs = {key.removeprefix("pairs/"): curves.of("train", key) for key in curves.names("train") if "pairs/" in key}
    return [
        *_panel("learning-rate", "Learning rate", "", {"training": drawn("learning_rate")}),
        *_panel("speed", "Speed", "target tokens/s", {"training": drawn("tokens_per_second")}),
        *_panel("waste", "Padding and data wait", "%", shares),
        *_panel("mfu", "Share of the peak arithmetic (MFU)", "%", {"training": drawn("mfu")}),
        *_panel("gradient-norm", "Gradient norm", "", {"training": drawn("gradient_norm")}),
        *(_panel("loss-scale", "Loss scale", "", {"training": scale}) if _varies(scale) else []),
        *(_panel("skipped", "Updates skipped so far", "updates", {"training": skipped}) if _varies(skipped) else []),
        *_panel("mixture", "Pairs of each corpus", "pairs a log line", pairs),
    ]


def _system_panels(curves: Curves) -> list[Panel]:
    """One panel per quantity, one line per node or GPU: `n1/cpu_percent`, `n1/gpu0/percent`."""
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
    """One panel of the existing curves with finite values; none without such curves."""
    styles = styles or {label: number for number, label in enumerate(curves)}
    lines = [
        Line(label, finite, styles[label])
        for label, curve in curves.items()
        if curve is not None and (finite := curve.finite()) is not None
    ]
    cuts_start, may_be_log = name.endswith(("loss", "nll")), name in ("gradient-norm", "loss-scale")
    from_zero = unit in FROM_ZERO or name == "gradient-norm"
    return [Panel(name, title, unit, tuple(lines), cuts_start, may_be_log, from_zero)] if lines else []


def _with_best(panel: Panel, story: RunStory) -> Panel:
    best = story.best
    if best is None or panel.name != best.measure.rpartition("/")[2].replace("_", "-"):
        return panel
    return replace(panel, best=(best.step, 100 * best.value if panel.unit == "%" else best.value))
