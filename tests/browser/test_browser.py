"""What people see of a run: MLflow's pages, the report and the comparison, in a real Chromium."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pages import DESKTOP, PHONE, keep_picture, opened
from running import Command, records

pytestmark = pytest.mark.slow

HIGH = {"width": 1280, "height": 1400}
"""All rows of a table of samples."""

TALL = 1750
"""Height of the pictures of our pages."""

DRAWN = ".js-plotly-plot .scatterlayer .trace"


@pytest.fixture(scope="module")
def local_pages(runs: Path, quick_client: Path) -> dict[str, Path]:
    """The report that training wrote, and a comparison."""
    Command(runs.parent, quick_client)("compare", "runs/first", "runs/second", "--output", "compare.html")
    return {"report": runs / "first" / "report.html", "compare": runs.parent / "compare.html"}


def run_page(address: str, run: Path, tab: str = "") -> str:
    tracking = json.loads((run / "tracking.json").read_text())
    return f"{address}/#/experiments/1/runs/{tracking['run_id']}{tab}"


def samples(run: Path) -> list[dict[str, Any]]:
    return [s for record in records(run, "samples", "samples.jsonl") for s in record["sentences"]]


def on_one_line(text: str) -> str:
    return " ".join(text.split())


def row_of(page: Any, table: str, first_cell: str) -> list[str]:
    """The cells of the row of a section of our pages that begins with this cell."""
    rows = page.locator(f"{table} tr").filter(has=page.locator(f"th:text-is('{first_cell}')"))
    return [str(text) for text in rows.first.locator("th, td").all_inner_texts()]


# ------------------------------------------------------------------------------------------------ MLflow


def test_mlflow_shows_what_a_run_was(browser: Any, mlflow_address: str, runs: Path) -> None:
    with opened(browser, run_page(mlflow_address, runs / "first")) as page:
        after_reloads(page, page.get_by_text("About this run").wait_for)
        page.get_by_text("Finished", exact=True).wait_for()
        page.get_by_role("paragraph").filter(has_text=re.compile("^tiny model.*en-de.*fp32")).wait_for()
        page.get_by_text("dist-transformer train config.yaml").first.wait_for()
        page.get_by_text(re.compile(r"^train \(\w+\)$")).first.wait_for()  # the corpus, with its digest
        page.get_by_text("training", exact=True).locator("visible=true").first.wait_for()
        page.get_by_placeholder("Search parameters").fill("optimizer.learning_rate")
        shown = page.get_by_text("optimizer.learning_rate", exact=True)
        shown.wait_for()
        assert "0.01" in shown.locator("xpath=ancestor::*[@role='row']").inner_text()
        page.get_by_text("About this run").scroll_into_view_if_needed()
        keep_picture(page, "mlflow_run")


def after_reloads(page: Any, wait: Callable[[], object]) -> None:
    """Waits, at most three times. MLflow's pages ask once: what a busy server did not answer needs a reload."""
    from playwright.sync_api import TimeoutError as NothingAppeared

    for _ in range(2):
        try:
            wait()
            return
        except NothingAppeared:
            page.reload()
    wait()


def drawn_chart(page: Any, metric: str) -> Any:
    """The chart of one metric."""

    def wait() -> None:
        page.get_by_placeholder("Search metric charts").fill(f"^{metric}$")
        page.get_by_text(f"first ({metric})").wait_for()
        page.locator(f"{DRAWN} path.js-line").first.wait_for(state="attached")
        page.wait_for_function("document.querySelectorAll('.js-plotly-plot').length === 1")

    after_reloads(page, wait)
    (chart,) = page.locator(".js-plotly-plot").all()
    return chart


def test_mlflow_draws_every_point_of_the_curves_once(browser: Any, mlflow_address: str, runs: Path) -> None:
    with opened(browser, run_page(mlflow_address, runs / "first", "/model-metrics")) as page:
        search = page.get_by_placeholder("Search metric charts")
        for event, curve in (("train", "loss"), ("validation", "bleu")):
            chart = drawn_chart(page, f"{event}/{curve}")
            points = [(record["step"], record[curve]) for record in records(runs / "first", event)]
            drawn = chart.evaluate("chart => chart.data[0].x.map((step, i) => [step, chart.data[0].y[i]])")
            assert list(map(tuple, drawn)) == pytest.approx(points)
        search.fill("^(train/(loss|learning_rate|tokens_per_second)|validation/(loss|bleu|token_accuracy))$")
        page.get_by_text("first (validation/token_accuracy)").wait_for()
        page.locator(DRAWN).nth(5).wait_for()
        keep_picture(page, "mlflow_charts")


def test_mlflow_has_charts_of_each_machine(browser: Any, mlflow_address: str, runs: Path) -> None:
    with opened(browser, run_page(mlflow_address, runs / "first", "/system-metrics")) as page:
        name = page.get_by_text(re.compile(r"^first \(system/.+/cpu_percent\)$"))
        after_reloads(page, name.wait_for)
        after_reloads(page, page.locator(DRAWN).first.wait_for)


def test_mlflow_shows_sample_translations_as_a_table(browser: Any, mlflow_address: str, runs: Path) -> None:
    with opened(browser, run_page(mlflow_address, runs / "first", "/artifacts/samples.json"), HIGH) as page:
        after_reloads(page, page.get_by_role("columnheader", name="translation").wait_for)
        text = on_one_line(page.locator("body").inner_text())
        for sentence in samples(runs / "first"):
            assert on_one_line(sentence["source"]) in text
            assert on_one_line(sentence["reference"]) in text
            assert on_one_line(sentence["translation"]) in text
        page.get_by_role("button", name="Table settings").click()
        for column in ("corpus", "number", "fixed"):
            page.get_by_role("menuitemcheckbox", name=column).click()
        page.keyboard.press("Escape")
        page.get_by_role("cell").filter(has_text=sentence["translation"]).last.click()
        page.get_by_text("Preview").wait_for()
        page.set_viewport_size(DESKTOP)
        keep_picture(page, "mlflow_samples")


def test_mlflow_shows_the_report(browser: Any, mlflow_address: str, runs: Path) -> None:
    with opened(browser, run_page(mlflow_address, runs / "first", "/artifacts/report.html")) as page:
        after_reloads(page, page.frame_locator("iframe").get_by_role("heading", name="Summary").wait_for)


def test_mlflow_leads_to_the_best_checkpoint(browser: Any, mlflow_address: str, runs: Path) -> None:
    best = min(records(runs / "first", "validation"), key=lambda record: record["loss"])
    run_id = json.loads((runs / "first" / "tracking.json").read_text())["run_id"]
    with opened(browser, f"{mlflow_address}/#/experiments/1/models") as page:
        after_reloads(page, page.get_by_role("link", name=f"step_{best['step']:08d}").first.wait_for)
        question = {"experiment_ids": ["1"], "filter": f"tags.best = 'true' AND source_run_id = '{run_id}'"}
        address = f"{mlflow_address}/ajax-api/2.0/mlflow/logged-models/search"
        (found,) = page.request.post(address, data=question).json()["models"]
        page.goto(f"{mlflow_address}/#/experiments/1/models/{found['info']['model_id']}")
        after_reloads(page, page.get_by_role("heading", name=f"step_{best['step']:08d}").wait_for)
        page.get_by_text(str(runs / "first" / "checkpoints" / f"step_{best['step']:08d}")).wait_for()
        page.get_by_text(str(best["bleu"])[:8]).first.wait_for()


# ------------------------------------------------------------------------------------------------ our own pages


@pytest.mark.parametrize("name", ["report", "compare"])
@pytest.mark.parametrize("colors", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_a_page_needs_nothing_but_itself_and_fits(
    browser: Any, local_pages: dict[str, Path], name: str, size: dict[str, int], colors: str
) -> None:
    address = local_pages[name].as_uri()
    with opened(browser, address, size, color_scheme=colors, offline=True) as page:
        requests: list[str] = []
        said: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.reload()
        assert [url for url in requests if url != address and not url.startswith("data:")] == []
        assert said == []
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        assert page.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
        assert page.evaluate("[...document.querySelectorAll('svg')].every(s => s.getBoundingClientRect().width > 100)")
        assert page.locator("svg").count() > 3
        assert is_dark(page, "backgroundColor") == (colors == "dark")
        assert is_dark(page, "color") == (colors == "light")
        if colors == "light":
            page.set_viewport_size({"width": size["width"], "height": TALL})
            keep_picture(page, f"{name}_{'phone' if size == PHONE else 'desktop'}")


def is_dark(page: Any, property_: str) -> bool:
    """Whether this colour of the page's body is nearer to black than to white."""
    color = page.evaluate(f"getComputedStyle(document.body).{property_}")
    return sum(map(float, re.findall(r"[\d.]+", color)[:3])) < 3 * 128


@pytest.mark.parametrize("name", ["report", "compare"])
def test_the_table_of_contents_leads_to_every_section(browser: Any, local_pages: dict[str, Path], name: str) -> None:
    with opened(browser, local_pages[name].as_uri(), PHONE) as page:
        links = page.locator("nav a")
        assert links.count() >= 4
        for number in range(links.count()):
            link = links.nth(number)
            link.click()
            target = page.locator(str(link.get_attribute("href")))
            box = target.bounding_box()
            assert -1 <= box["y"] < PHONE["height"] * 0.5 or is_at_the_end(page)
            assert target.locator("h2").inner_text() == link.inner_text()


def is_at_the_end(page: Any) -> bool:
    return bool(page.evaluate("window.scrollY + window.innerHeight >= document.documentElement.scrollHeight - 1"))


def test_the_report_shows_the_scores_and_translations_of_the_run(
    browser: Any, local_pages: dict[str, Path], runs: Path
) -> None:
    with opened(browser, local_pages["report"].as_uri()) as page:
        validations = records(runs / "first", "validation")
        assert len(validations) > 3
        for record in validations:
            cells = row_of(page, "#scores", str(record["step"]))
            assert cells[1:4] == [f"{record['bleu']:.2f}", f"{record['chrf']:.2f}", f"{record['loss']:.4f}"]
        page.evaluate("for (const each of document.querySelectorAll('#samples details')) each.open = true")
        text = on_one_line(page.locator("#samples").inner_text())
        newest = samples(runs / "first")[-6:]
        assert len(newest) == 6
        for sentence in newest:
            assert on_one_line(sentence["source"]) in text
            assert on_one_line(sentence["translation"]) in text
        stopped, finished = records(runs / "first", "end", "history.jsonl")
        assert stopped["state"] == "stopped"
        assert "SIGUSR1" in page.locator("#history").inner_text()
        assert row_of(page, "#history", "2")[2] == str(stopped["step"])
        assert finished["state"] in page.locator("header").inner_text()


def test_the_comparison_shows_what_differs(browser: Any, local_pages: dict[str, Path], runs: Path) -> None:
    with opened(browser, local_pages["compare"].as_uri()) as page:
        assert page.locator("h1").inner_text() == "2 runs compared"
        assert row_of(page, "main", "optimizer.learning_rate")[1:] == ["0.01", "0.002"]
        last = [records(runs / name, "validation")[-1]["bleu"] for name in ("first", "second")]
        assert row_of(page, "main", "validation BLEU, last")[1:] == [f"{value:.2f}" for value in last]
        page.evaluate("for (const each of document.querySelectorAll('#samples details')) each.open = true")
        text = on_one_line(page.locator("#samples").inner_text())
        for name in ("first", "second"):
            newest = [sentence for sentence in samples(runs / name)[-4:] if sentence["fixed"]]
            assert newest
            assert all(on_one_line(sentence["translation"]) in text for sentence in newest)
