"""Curves as pictures: what is drawn is what was recorded, with restarts and the best checkpoint marked."""

import re
import warnings

import numpy as np
import pytest
from html_reader import Page
from matplotlib.figure import Figure
from run_builder import append, write_run

from dist_transformer.reporting.charts import Line, Marks, Panel, compared_panels, panels_of
from dist_transformer.reporting.curves import Curve
from dist_transformer.reporting.figures import LINE_COLORS, POINTS, draw, panel_svg, short_number
from dist_transformer.reporting.run_history import read_story


def panel_of(values: list[float], **settings) -> Panel:
    steps = np.arange(1.0, len(values) + 1)
    return Panel("one", "One", "units", (Line("it", Curve(steps, np.asarray(values))),), **settings)


def drawn(panel: Panel, marks: Marks):
    axes = Figure().add_subplot()
    draw(panel, marks, axes)
    return axes


def test_a_run_has_a_picture_of_each_thing_that_it_recorded(tmp_path):
    panels = {panel.name: panel for panel in panels_of(read_story(write_run(tmp_path / "run")))}
    assert set(panels) == {
        "loss", "nll", "bleu", "chrf", "token-accuracy", "learning-rate", "speed", "waste", "mfu", "gradient-norm", "loss-scale",
        "skipped",
    }  # fmt: skip
    assert [line.label for line in panels["loss"].lines] == ["training", "validation", "newstest"]
    assert panels["bleu"].best == (300, pytest.approx(34 * 0.75))
    assert panels["loss"].best is None
    assert panels["token-accuracy"].lines[0].curve.last == pytest.approx(70)  # percent
    assert {name for name, panel in panels.items() if panel.from_zero} == {
        "token-accuracy", "speed", "waste", "mfu", "gradient-norm",
    }  # fmt: skip
    assert (panels["loss"].title, panels["nll"].title) == ("loss (labels smoothed)", "nll (negative log-likelihood)")
    padding = panels["waste"].lines[0].curve.values
    assert 5 < padding.mean() < 7  # percent


def test_numbers_beyond_any_chart_are_left_out_of_it(tmp_path):
    run_dir = write_run(tmp_path / "run")
    values = (1e308, -1e308, 1.0, float("nan"), float("inf"))
    system = {"event": "system", "time": 1.0}
    append(run_dir.metrics, [{**system, "step": step, "n1/strange": value} for step, value in enumerate(values)])
    [panel] = (panel for panel in panels_of(read_story(run_dir)) if panel.title == "strange")
    assert panel.lines[0].curve.values.tolist() == [1.0]
    assert "strange" in panel_svg(panel, Marks(5))


def test_what_never_changes_has_no_picture_of_its_scale(tmp_path):
    run_dir = write_run(tmp_path / "run")
    run_dir.metrics.unlink()
    record = {"event": "train", "time": 1.0, "loss": 3.0, "loss_scale": 1.0}
    append(run_dir.metrics, [{**record, "step": step} for step in (1, 2)])
    assert [panel.name for panel in panels_of(read_story(run_dir))] == ["loss"]


def test_nodes_and_gpus_have_a_line_each_and_many_are_summed_up(tmp_path):
    run_dir = write_run(tmp_path / "run", num_steps=20)
    few = {f"n{node}/cpu_percent": 10.0 * node for node in range(1, 4)}
    many = {f"n{node}/gpu{gpu}/percent": 90.0 + node - gpu for node in range(3) for gpu in range(8)}
    append(run_dir.metrics, [{"event": "system", "step": step, **few, **many} for step in (5, 10)])
    panels = {panel.title: panel for panel in panels_of(read_story(run_dir)) if panel.name.startswith("system")}
    assert {line.label: line.curve.last for line in panels["Processors in use"].lines} == {"n1": 10, "n2": 20, "n3": 30}
    gpus = {line.label: line.curve.last for line in panels["GPUs in use"].lines}
    assert gpus == {
        "highest of 24": max(many.values()),
        "mean of 24": pytest.approx(np.mean([*many.values()])),
        "lowest of 24": min(many.values()),
    }
    assert panels["GPUs in use"].unit == "%"
    assert all(panel.from_zero for panel in panels.values())


def test_the_line_that_is_drawn_goes_through_the_recorded_points():
    axes = drawn(panel_of([3.0, 1.0, 2.0]), Marks(3))
    line = axes.get_lines()[0]
    assert line.get_xydata().tolist() == [[1, 3], [2, 1], [3, 2]]
    assert line.get_color() == LINE_COLORS[0]


def test_lines_beyond_the_colors_are_told_apart_by_their_dashes():
    curve = panel_of([1.0, 2.0]).lines[0].curve
    axes = drawn(Panel("many", "Many", "", tuple(Line(f"run {n}", curve, n) for n in range(16))), Marks(2))
    looks = {
        (line.get_color(), str(line.get_linestyle()), str(line._unscaled_dash_pattern)) for line in axes.get_lines()
    }
    assert len(looks) == 16


def test_a_legend_of_many_long_names_stays_within_its_picture(tmp_path):
    curve = panel_of([1.0, 2.0]).lines[0].curve
    lines = tuple(Line(f"a-run-with-quite-a-long-name-{n}", curve, n) for n in range(9))
    panel = Panel("many", "Many", "", lines)
    svg = panel_svg(panel, Marks(2, [1]))
    _, _, width, height = map(float, re.search(r'viewBox="([^"]*)"', svg).group(1).split())
    places = [(float(x), float(y)) for x, y in re.findall(r'<text [^>]*x="([\d.]+)" y="([\d.]+)"', svg)]
    assert len(places) > 10
    assert all(0 < x < width and 8 < y < height for x, y in places)
    few = panel_svg(Panel("few", "Few", "", lines[:2]), Marks(2))
    assert height > float(re.search(r'viewBox="([^"]*)"', few).group(1).split()[3])


def test_restarts_and_divergences_are_lines_down_the_picture():
    axes = drawn(panel_of([3.0, 1.0, 2.0, 1.5]), Marks(4, [2, 2, 9], [3]))
    down = {
        line.get_label(): line.get_xdata()[0]
        for line in axes.get_lines()
        if line.get_transform() == axes.get_xaxis_transform()
    }
    assert down == {"restart": 2, "divergence": 3}
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["it", "restart", "divergence"]


def test_thousands_of_restarts_are_one_line_that_is_not_larger_than_their_picture():
    """A line each took a minute for 14 panels, and a page of 16 MB."""
    axes = drawn(panel_of([3.0, 2.0]), Marks(100 * POINTS, range(0, 100 * POINTS, 10)))
    (down,) = (line for line in axes.get_lines() if line.get_label() == "restart")
    steps = np.asarray(down.get_xdata()).reshape(-1, 3)
    assert len(steps) == POINTS
    assert (np.diff(steps[:, 0]) == 100).all()
    assert np.isnan(np.asarray(down.get_ydata()).reshape(-1, 3)[:, 2]).all()  # none is joined to the next


def test_the_best_is_marked_where_it_was():
    axes = drawn(panel_of([3.0, 1.0, 2.0], best=(2, 1.0)), Marks(3))
    (mark,) = (line for line in axes.get_lines() if line.get_label() == "best")
    assert mark.get_xydata().tolist() == [[2, 1]]


def test_a_spike_stays_within_the_picture_and_the_first_steps_may_not():
    values = [3.0] * 2000
    values[:10] = [50.0] * 10
    values[1000] = 9.0
    low, high = drawn(panel_of(values, cuts_start=True), Marks(2000)).get_ylim()
    assert low < 3
    assert 9 < high < 50


def test_wide_ranges_are_drawn_logarithmically_where_a_panel_allows_it():
    assert drawn(panel_of([1.0, 100.0], may_be_log=True), Marks(2)).get_yscale() == "log"
    assert drawn(panel_of([1.0, 100.0]), Marks(2)).get_yscale() == "linear"
    assert drawn(panel_of([0.0, 100.0], may_be_log=True), Marks(2)).get_yscale() == "linear"


@pytest.mark.parametrize(
    ("values", "unit", "low", "high"),
    [
        ([97.0, 99.9], "%", 0, 100),
        ([4.0, 6.0], "%", 0, 6.1),
        ([0.0, 0.0], "%", 0, 0.06),
        ([900.0, 950.0], "GB", 0, 953),
    ],
)
def test_an_axis_from_zero_ends_at_a_hundred_percent(values, unit, low, high):
    curve = panel_of(values).lines[0].curve
    bottom, top = drawn(Panel("one", "One", unit, (Line("it", curve),), from_zero=True), Marks(2)).get_ylim()
    assert bottom == low
    assert max(values) <= top <= high


def test_a_logarithmic_axis_cannot_begin_at_zero():
    axes = drawn(panel_of([1.0, 100.0], may_be_log=True, from_zero=True), Marks(2))
    assert axes.get_yscale() == "log"
    assert 0 < axes.get_ylim()[0] < 1


def test_the_best_token_accuracy_is_marked_in_percent(tmp_path):
    run_dir = write_run(tmp_path / "run", **{"validation.metric": "newstest/token_accuracy"})
    text = run_dir.config.read_text()
    assert "newstest/token_accuracy" in text
    panels = {panel.name: panel for panel in panels_of(read_story(run_dir))}
    assert panels["token-accuracy"].best == (400, pytest.approx(70))


def test_a_picture_for_a_page_has_no_size_and_no_colors_of_its_own():
    svg = panel_svg(panel_of([3.0, 1.0, 2.0]), Marks(3, [2]))
    Page(svg)  # balanced
    head = svg[: svg.index(">")]
    assert "viewBox" in head
    assert "width" not in head
    assert re.findall(r"#[0-9a-f]{6}\b", svg) == []
    assert {"var(--line-0)", "var(--ink)", "var(--grid)", "var(--faint)"} <= set(re.findall(r"var\([^)]*\)", svg))
    assert "http" not in svg
    assert 'aria-label="One in units by step. it: 2 at step 3, between 1 and 3"' in head


def test_two_pictures_of_a_page_share_no_ids():
    one, two = (panel_svg(Panel(name, name, "", panel_of([1.0, 2.0]).lines), Marks(2)) for name in ("a", "b"))
    ids = [set(re.findall(r' id="([^"]*)"', svg)) for svg in (one, two)]
    assert ids[0]
    assert not ids[0] & ids[1]


@pytest.mark.parametrize(
    ("label", "shown"),
    [
        ("$x_1$", "$x_1$"),
        ("_hidden", "_hidden"),
        ("100 %", "100 %"),
        ("<b>&", "<b>&"),
        ("漢字", "□□"),
        ("n" * 90, "n" * 51 + "…"),
    ],
)
def test_a_label_is_shown_as_it_is_written(label, shown):
    curve = Curve(np.asarray([1.0, 2.0]), np.asarray([1.0, 2.0]))
    panel = Panel("one", "One", "", (Line(label, curve), Line("other", curve, 1)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        page = Page(panel_svg(panel, Marks(2)))
    assert shown in [text.strip() for text in page.text.splitlines()]
    assert f"{label}: 2 at step 2" in page.of("svg")[0]["aria-label"]


def test_runs_compared_have_a_line_each_in_every_picture_that_any_has(tmp_path):
    stories = [(name, read_story(write_run(tmp_path / name))) for name in ("a", "b")]
    panels = {panel.name: panel for panel in compared_panels(stories)}
    assert [line.label for line in panels["train-loss"].lines] == ["a", "b"]
    assert [line.style for line in panels["validation-bleu"].lines] == [0, 1]
    assert panels["validation-nll"].title == "validation nll (negative log-likelihood)"
    assert {panel.title for panel in panels.values()} >= {"newstest loss (labels smoothed)", "newstest BLEU"}
    newstest = panels["corpus-0-bleu"].lines[1].curve
    assert newstest.values.tolist() == stories[1][1].curves.of("validation", "newstest/bleu").values.tolist()


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (950, "950"), (12_000, "12k"), (1_500_000, "1.5M"), (7e-4, "0.0007"), (-2e3, "-2k")]
)
def test_numbers_on_axes_are_short(value, text):
    assert short_number(value) == text
