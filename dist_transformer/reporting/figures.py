"""Drawing of panels, each as an SVG for a page.

Colors are distinguishable with color blindness, and lines in print by their dashes.
"""

import io
import re
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from dist_transformer.reporting.charts import WARM_UP_SHARE, Line, Marks, Panel
from dist_transformer.reporting.curves import Curve, Floats, Thinned, thinned

if TYPE_CHECKING:  # imported at run time only for drawing: it takes half a second
    from matplotlib.axes import Axes

LINE_COLORS = ("#0072b2", "#d55e00", "#00875f", "#b0508c", "#7a6a00", "#3a9bd0", "#a03030", "#606060")
"""Colors of Okabe and Ito, darkened if too pale for a line on white."""
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))
INK, GRID, RESTART, DIVERGENCE = "#222222", "#dddddd", "#888888", "#c00000"
POINTS = 400
WIDTH_INCHES, PLOT_INCHES, LEFT_INCHES, BELOW_INCHES = 4.6, 1.8, 0.74, 0.46
LEGEND_CHARACTERS = 62
"""Characters that fit on a line of a legend."""
STEPS = (1, 2, 2.5, 5, 10)
"""Intervals between the numbers on an axis."""
FEW_POINTS = 40
"""Lines with at most so many points show each one."""
FAMILY, LONGEST_LABEL = "DejaVu Sans", 52


def panel_svg(panel: Panel, marks: Marks) -> str:
    """An <svg> element for a page: no fixed size, colors from the page's variables (templates/style.css)."""
    import matplotlib
    from matplotlib.figure import Figure

    settings = {"svg.fonttype": "none", "svg.hashsalt": panel.name}
    with matplotlib.rc_context(settings), io.StringIO() as out:
        height = _legend_inches(panel, marks) + PLOT_INCHES + BELOW_INCHES
        figure = Figure(figsize=(WIDTH_INCHES, height))
        place = LEFT_INCHES / WIDTH_INCHES, BELOW_INCHES / height
        size = (WIDTH_INCHES - LEFT_INCHES - 0.1) / WIDTH_INCHES, PLOT_INCHES / height
        draw(panel, marks, figure.add_axes((*place, *size)))
        nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
        figure.savefig(out, format="svg", transparent=True, metadata=nothing)
        return _for_page(out.getvalue(), description(panel))


def _legend_columns(labels: list[str]) -> int:
    if sum(len(label) + 7 for label in labels) <= LEGEND_CHARACTERS:
        return len(labels)
    return int(np.clip(LEGEND_CHARACTERS // (max(map(len, labels)) + 6), 1, 4))


def _legend_inches(panel: Panel, marks: Marks) -> float:
    others = {"restart": marks.restarts, "divergence": marks.divergences, "best": panel.best is not None}
    labels = [line.label for line in panel.lines] + [label for label, is_there in others.items() if is_there]
    return 0.08 + 0.19 * -(-len(labels) // _legend_columns(labels))


def draw(panel: Panel, marks: Marks, axes: "Axes") -> None:
    """Draws a panel on matplotlib axes, the legend above them."""
    for line in panel.lines:
        _draw_line(line, axes)
    if panel.best is not None:
        axes.plot(*panel.best, marker="*", markersize=12, color=INK, linestyle="none", label="best", zorder=4)
    _set_axes(panel, axes)
    _draw_marks(marks, axes)
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        axes.legend(
            handles, labels, loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=_legend_columns(labels),
            frameon=False, fontsize=8.5, labelcolor=INK, handlelength=2.2, columnspacing=1.2, borderaxespad=0.1,
        )  # fmt: skip


def description(panel: Panel) -> str:
    """Text alternative of the chart, for screen readers."""
    said = []
    for line in panel.lines:
        values, steps = line.curve.values, line.curve.steps
        at = f"at step {steps[-1]:,.0f}"
        said.append(f"{line.label}: {values[-1]:.5g} {at}, between {values.min():.5g} and {values.max():.5g}")
    unit = f" in {panel.unit}" if panel.unit else ""
    return f"{panel.title}{unit} by step. " + "; ".join(said)


def _draw_line(line: Line, axes: "Axes") -> None:
    color = LINE_COLORS[line.style % len(LINE_COLORS)]
    dashes = DASHES[(line.style + line.style // len(LINE_COLORS)) % len(DASHES)]
    points: Thinned = thinned(line.curve, POINTS)
    if points.low is not None and points.high is not None:
        axes.fill_between(points.steps, points.low, points.high, color=color, alpha=0.22, linewidth=0)
    marker = "." if len(points.steps) <= FEW_POINTS else None
    label = legend_text(line.label)
    axes.plot(points.steps, points.middle, color=color, linestyle=dashes, linewidth=1.4, marker=marker, label=label)


def _set_axes(panel: Panel, axes: "Axes") -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=STEPS))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: short_number(step)))
    if panel.is_log:
        axes.set_yscale("log")
        values = np.concatenate([line.curve.values for line in panel.lines])
        has_few_decades = values.max() < 1000 * values.min()
        axes.yaxis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0) if has_few_decades else (1.0,)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=STEPS))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
    _set_limits(panel, axes)
    axes.set_xlabel("step", fontsize=9, color=INK, labelpad=1)
    axes.set_ylabel(panel.unit, fontsize=9, color=INK)
    axes.tick_params(labelsize=9, colors=INK, length=3)
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(RESTART)


def _set_limits(panel: Panel, axes: "Axes") -> None:
    """Without the first steps of each line, of which those of few points are shown in full; or from 0."""
    if panel.cuts_start:
        shown = np.concatenate([_behind_start(line.curve) for line in panel.lines])
        low, high = float(shown.min()), float(shown.max())
        room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
        axes.set_ylim(low - room, high + room)
    elif panel.from_zero and not panel.is_log:
        top, highest = axes.get_ylim()[1], max(float(line.curve.values.max()) for line in panel.lines)
        axes.set_ylim(0.0, min(top, max(100.0, highest)) if panel.unit == "%" else top)


def _behind_start(curve: Curve) -> Floats:
    is_shown = curve.steps >= curve.steps[0] + WARM_UP_SHARE * (curve.steps[-1] - curve.steps[0])
    return curve.values if len(curve.steps) < FEW_POINTS else curve.values[is_shown]


def _draw_marks(marks: Marks, axes: "Axes") -> None:
    for steps, name, color, style in (
        (marks.restarts, "restart", RESTART, (0, (2, 2))),
        (marks.divergences, "divergence", DIVERGENCE, (0, (1, 1))),
    ):
        shown = {step * POINTS // max(1, marks.last_step): step for step in sorted(steps) if step <= marks.last_step}
        if shown:  # one line with gaps: thousands of lines take minutes
            xy = np.repeat([*shown.values()], 3), np.tile([0.0, 1.0, np.nan], len(shown))
            look: dict[str, Any] = {"color": color, "linewidth": 1.0, "linestyle": style, "zorder": 1, "label": name}
            axes.plot(*xy, transform=axes.get_xaxis_transform(), **look)
    axes.set_xlim(-0.01 * marks.last_step, max(1, 1.02 * marks.last_step))


def short_number(value: float) -> str:
    """Formats 12000 as 12k, 1500000 as 1.5M, 0.0007 as 0.0007."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"


def legend_text(text: str) -> str:
    """Escapes `text` for matplotlib's legends and titles: not parsed as mathematics, nor hidden for a leading "_".

    A character that the font lacks becomes a square, so that no text of a run makes drawing fail or warn.
    """
    cut = text if len(text) <= LONGEST_LABEL else text[: LONGEST_LABEL - 1] + "\N{HORIZONTAL ELLIPSIS}"
    escaped = "".join(each if ord(each) in _characters() else "\N{WHITE SQUARE}" for each in cut).replace("$", r"\$")
    return f" {escaped}" if escaped.startswith("_") else escaped


@cache
def _characters() -> frozenset[int]:
    from matplotlib.font_manager import FontProperties, findfont, get_font

    return frozenset(get_font(findfont(FontProperties(family=FAMILY))).get_charmap())


def _for_page(svg: str, words: str) -> str:
    from html import escape

    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"|(?<=<g) id="[^"]*"', "", svg)
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)
    svg = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path.group()), svg)
    svg = re.sub(r"font-family: [^;\"]*(?=[;\"])", "font-family: inherit", svg)
    for number, color in enumerate(LINE_COLORS):
        svg = svg.replace(color, f"var(--line-{number})")
    for name, color in (("ink", INK), ("grid", GRID), ("faint", RESTART), ("alarm", DIVERGENCE)):
        svg = svg.replace(color, f"var(--{name})")
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(words)}"', 1).strip()
