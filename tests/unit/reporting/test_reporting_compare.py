"""Runs side by side: what differs, which is best, and the same sentences."""

import pytest
from html_reader import Page, assert_sound
from run_builder import write_run
from running import records

from dist_transformer.reporting.compare import compare_page, named, result_rows, setting_rows
from dist_transformer.reporting.reading import read_story
from dist_transformer.run_dir import write_json


@pytest.fixture
def stories(tmp_path):
    first = write_run(tmp_path / "first", num_steps=400)
    second = write_run(tmp_path / "second", num_steps=80, **{"optimizer.beta1": 0.8, "run.seed": 2})
    write_json(second.evaluation / "test.json", {"bleu": 33.0, "chrf": 50.0})
    return named([read_story(first), read_story(second)])


def rows_of(rows):
    return {row.name: (row.texts, row.best) for row in rows}


def test_only_settings_that_differ_are_shown(stories):
    rows = rows_of(setting_rows(stories))
    assert rows["optimizer.beta1"][0] == ["0.9", "0.8"]
    assert rows["run.seed"][0] == ["1", "2"]
    assert set(rows) == {"optimizer.beta1", "run.seed", "training.max_steps", "validation.every_steps"}


def test_scores_stand_side_by_side_and_the_best_is_told(stories):
    rows = rows_of(result_rows(stories))
    newest = [records(story.run_dir.path, "validation")[-1] for _, story in stories]
    assert rows["validation loss, last"][0] == [f"{record['loss']:.4f}" for record in newest]
    assert rows["test BLEU"] == (["31.25", "33.00"], 1)
    assert rows["test chrF"] == (["55.50", "50.00"], 0)
    assert rows["validation BLEU, best"][0][0] == "25.50 (step 300)"
    assert rows["step"][0] == ["400 of 400", "80 of 80"]


def test_a_loss_is_best_where_it_is_lowest(stories):
    losses = [min(r["loss"] for r in records(story.run_dir.path, "validation")) for _, story in stories]
    best = rows_of(result_rows(stories))["validation loss, best"][1]
    assert best == (losses.index(min(losses)) if losses[0] != losses[1] else None)


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path):
    stories = [read_story(write_run(tmp_path / sweep / "task_0", num_steps=20)) for sweep in ("a", "b")]
    assert [name for name, _ in named(stories)] == ["a/task_0", "b/task_0"]


def test_the_page_shows_all_runs_in_each_part(stories):
    html = compare_page(stories)
    page = Page(html)
    assert_sound(page, html)
    assert [text for level, text in page.headings if level == 2] == [
        "Results",
        "Settings that differ",
        "Curves",
        "Samples",
    ]
    assert page.tables[0][0] == ["", "first", "second"]
    sentences = page.table_with("run", "step", "translation")
    assert [row[:2] for row in sentences[1:]] == [["first", "400"], ["second", "80"], ["reference", ""]]
    assert any("first: " in svg["aria-label"] and "second: " in svg["aria-label"] for svg in page.of("svg"))


def test_runs_without_a_record_can_be_compared(tmp_path):
    run_dirs = [write_run(tmp_path / name, num_steps=20) for name in ("a", "b")]
    for run_dir in run_dirs:
        run_dir.metrics.unlink()
        run_dir.samples.unlink()
    page = Page(compare_page(named([read_story(run_dir) for run_dir in run_dirs])))
    assert "No step was recorded yet" in page.text
    assert "None." in page.text
