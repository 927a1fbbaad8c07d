"""Runs side by side: what differs, which is best, and the same sentences."""

import hashlib
from unittest.mock import Mock

import pytest
from html_reader import Page, assert_sound
from run_builder import append, write_prepared, write_run
from running import records

from dist_transformer.files import read_json, write_json
from dist_transformer.reporting import run_history
from dist_transformer.reporting.compare import compare_page, named, notes, result_rows, setting_rows
from dist_transformer.reporting.run_history import read_story
from dist_transformer.run.folder import RunDir


@pytest.fixture
def stories(tmp_path):
    first = write_run(tmp_path / "first", num_steps=400)
    second = write_run(tmp_path / "second", num_steps=80, **{"optimizer.beta1": 0.8, "run.seed": 2})
    write_json(
        second.evaluation / "test.json", {**read_json(first.evaluation / "test.json"), "bleu": 33.0, "chrf": 50.0}
    )
    return named([read_story(first), read_story(second)])


def rows_of(rows):
    return {row.name: (row.texts, row.best) for row in rows}


def page_of(stories):
    return compare_page(stories, result_rows(stories))


def test_only_settings_that_differ_are_shown(stories):
    rows = rows_of(setting_rows(stories))
    assert rows["optimizer.beta1"][0] == ["0.9", "0.8"]
    assert rows["run.seed"][0] == ["1", "2"]
    assert set(rows) == {"optimizer.beta1", "run.seed", "training.max_steps", "validation.every_steps"}


def test_the_defaults_are_made_once_for_each_run(stories, monkeypatch):
    making = Mock(wraps=run_history.flatten)
    monkeypatch.setattr(run_history, "flatten", making)
    setting_rows(stories)
    calls = making.call_count
    page_of(stories)
    assert 0 < making.call_count == calls


def test_another_training_text_and_what_happened_in_training_are_told_among_the_settings(tmp_path):
    run_dirs = [write_run(tmp_path / name / "run", num_steps=20, **{"data.root": f"/{name}"}) for name in ("a", "b")]
    assert setting_rows(named([read_story(run_dir) for run_dir in run_dirs])) == []
    for run_dir, digest in zip(run_dirs, ("a1" * 32, "b2" * 32), strict=True):
        write_prepared(run_dir.path.parent / "prepared")
        manifest = run_dir.path.parent / "prepared" / "manifest.json"
        write_json(manifest, {**read_json(manifest), "digest": digest})
    settings = {
        "schedule.name": ["constant", "cosine"],
        "training.max_steps": [10, 20],
        "tracking.enabled": [True, False],
    }
    append(run_dirs[1].history, [{"event": "changed", "step": 10, "time": 0.0, "settings": settings}])
    write_json(run_dirs[0].divergence, [{"since_step": 5}, {"since_step": 1200}])
    rows = rows_of(setting_rows(named([read_story(run_dir) for run_dir in run_dirs])))
    assert {name: texts for name, (texts, _) in rows.items()} == {
        "data.root": ["/a", "/b"],
        "prepared corpus": ["a1a1a1a1a1a1 (990 pairs)", "b2b2b2b2b2b2 (990 pairs)"],
        "changed in training": ["-", "schedule.name constant until step 10"],
        "divergences": ["step 5, step 1,200", "-"],
    }


def test_scores_stand_side_by_side_and_the_best_is_told(stories):
    rows = rows_of(result_rows(stories))
    newest = [records(story.run_dir.path, "validation")[-1] for _, story in stories]
    assert rows["validation loss, last"][0] == [f"{record['loss']:.4f}" for record in newest]
    assert rows["evaluated: test BLEU (beam 4, 1,000 pairs)"] == (["31.25", "33.00"], 1)
    assert rows["evaluated: test chrF (beam 4, 1,000 pairs)"] == (["55.50", "50.00"], 0)
    assert rows["validation BLEU, best"][0][0] == "25.50 (step 300)"
    assert rows["step"][0] == ["400 of 400", "80 of 80"]


def test_a_loss_is_best_where_it_is_lowest(stories):
    losses = [min(r["loss"] for r in records(story.run_dir.path, "validation")) for _, story in stories]
    best = rows_of(result_rows(stories))["validation loss, best"][1]
    assert best == (losses.index(min(losses)) if losses[0] != losses[1] else None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "texts"),
    [({"beam_size": 1}, ["31.25 (beam 4, 1,000 pairs)", "33.00 (greedy search, 1,000 pairs)"]),
     ({"pairs": 20}, ["31.25 (beam 4, 1,000 pairs)", "33.00 (beam 4, 20 pairs)"]),
     ({"sampling": True}, ["31.25 (beam 4, 1,000 pairs)", "33.00 (sampled (seed 1), 1,000 pairs)"]),
     ({"too_long": "split"}, ["31.25 (beam 4, 1,000 pairs)", "33.00 (beam 4, too_long split, 1,000 pairs)"]),
     ({"no_repeat_ngram_size": 3}, ["31.25 (beam 4, 1,000 pairs)", "33.00 (beam 4, no_repeat_ngram_size 3, 1,000 pairs)"])],
)  # fmt: skip
def test_results_of_other_searches_or_pairs_have_no_best_one(stories, changed, texts):
    path = stories[1][1].run_dir.evaluation / "test.json"
    write_json(path, {**read_json(path), **changed})
    stories = [(name, read_story(story.run_dir)) for name, story in stories]
    rows = result_rows(stories)
    assert rows_of(rows)["evaluated: test BLEU"] == (texts, None)
    (key,) = changed
    why = f"No best one is marked of evaluated: test BLEU; evaluated: test chrF: the runs differ in {key}."
    assert why in notes(rows)
    assert why in Page(page_of(stories)).text


def test_settings_that_had_no_effect_on_a_search_and_defaults_of_later_versions_are_no_difference(stories):
    path = stories[1][1].run_dir.evaluation / "test.json"
    write_json(path, {**read_json(path), "seed": 7, "top_k": 3, "too_long": "refuse", "sampling": False, "step": 80})
    rows = rows_of(result_rows([(name, read_story(story.run_dir)) for name, story in stories]))
    assert rows["evaluated: test BLEU"] == (
        ["31.25 (beam 4, 1,000 pairs)", "33.00 (beam 4, 1,000 pairs, step 80)"],
        1,
    )


def test_p_values_are_of_runs_that_were_scored_alike_and_of_words_of_the_language_of_the_corpus(tmp_path):
    references = [f"这是第{number}座蓝色的房子。" for number in range(100)]
    searches = {"first": {}, "worse": {}, "greedy": {"beam_size": 1}, "others": {"bleu_signature": "tok:13a"}}
    for name, search in searches.items():
        folder = write_run(tmp_path / name, num_steps=20).evaluation
        lines = [line.replace("这是", "那里") for line in references] if name != "first" else references
        (folder / "test.translations").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        (folder / "test.reference1").write_text("".join(f"{line}\n" for line in references), encoding="utf-8")
        how = {"target_language": "zh", "bleu_signature": "tok:zh", **search}
        write_json(folder / "test.json", {**read_json(folder / "test.json"), **how})
    rows = rows_of(result_rows(named([read_story(RunDir(tmp_path / name)) for name in searches])))
    texts = rows["evaluated: test BLEU, p against first (paired bootstrap)"][0]
    assert texts == ["-", "0.001", "-", "-"]


@pytest.mark.slow
def test_differences_in_bleu_of_the_same_text_have_a_p_value_against_the_first_that_kept_it(tmp_path):
    references = [f"the {number} houses of this street are blue ." for number in range(200)]
    texts = {
        "without": None,
        "first": [line.replace("street", "road") for line in references],
        "same": [line.replace("street", "road") for line in references],
        "worse": [line.replace("street are", "road is") for line in references],
        "a little worse": [line.replace("street", "road") for line in references[:-1]] + ["none"],
        "of another text": ["other"] * 200,
        "scored since": [line.replace("street are", "road is") for line in references],
        "damaged": ["too short"],
    }
    for name, lines in texts.items():
        folder = write_run(tmp_path / name, num_steps=20).evaluation
        if lines is not None:
            against = lines if name == "of another text" else references
            (folder / "test.translations").write_text("".join(f"{line}\n" for line in lines))
            (folder / "test.reference1").write_text("".join(f"{line}\n" for line in against))
            both = "".join(f"{line}\n" for line in [*lines, *against])
            digest = hashlib.sha256(b"" if name == "scored since" else both.encode()).hexdigest()
            if name != "same":  # as of a version that recorded no digest
                write_json(folder / "test.json", {**read_json(folder / "test.json"), "texts_sha256": digest})
    stories = named([read_story(RunDir(tmp_path / name)) for name in texts])
    (row,) = (row for row in result_rows(stories) if row.name.startswith("evaluated: test BLEU, p"))
    assert row.name == "evaluated: test BLEU, p against first (paired bootstrap)"
    assert row.texts[:4] == ["-", "-", "1.000", "0.001"]
    assert 0.01 < float(row.texts[4]) < 0.9
    assert row.texts[5:] == ["-", "-", "-"]
    assert row.name in Page(page_of(stories)).text


def test_results_of_other_sentences_under_one_name_have_no_best_one(stories):
    for (_, story), digest in zip(stories, ("a", "b"), strict=True):
        path = story.run_dir.evaluation / "test.json"
        write_json(path, {**read_json(path), "source_sha256": digest * 64, "reference_sha256": [digest * 64]})
    rows = result_rows([(name, read_story(story.run_dir)) for name, story in stories])
    found = {(row.best, row.note) for row in rows if row.name.startswith("evaluated")}
    assert found == {(None, "the runs differ in source_sha256, reference_sha256")}


@pytest.mark.parametrize(
    ("setting", "value"), [("data.test.source", "other.en"), ("data.root", "/other"), ("data.normalization", "NFC")]
)
def test_results_that_do_not_say_what_was_scored_are_compared_by_the_settings(tmp_path, setting, value):
    places = {"data.test.source": "test.en", "data.test.target": "test.de"}
    first = write_run(tmp_path / "first", num_steps=40, **places)
    second = write_run(tmp_path / "second", num_steps=40, **{**places, setting: value})
    write_json(second.evaluation / "test.json", {**read_json(first.evaluation / "test.json"), "bleu": 33.0})
    rows = result_rows(named([read_story(first), read_story(second)]))
    (row,) = (row for row in rows if row.name.startswith("evaluated: test BLEU"))
    assert row.best is None
    assert setting in row.note


def test_losses_are_compared_only_where_the_prepared_corpora_have_the_same_pieces_and_the_same_text(tmp_path):
    asked = []

    def unmarked(**changed):
        asked.append(changed)
        run_dirs = []
        for name, manifest in (("first", {}), ("second", changed)):
            run_dir = write_run(tmp_path / f"{len(asked)}-{name}", num_steps=40)
            prepared = tmp_path / f"prepared-{name}"
            models = {"source_sha256": "a", "target_sha256": "a", **manifest.get("tokenizer", {})}
            write_json(prepared / "manifest.json", {
                "digest": "d", "tokenizer": models, "recipe": {"validation": manifest.get("validation", {"files": [1]})},
            })  # fmt: skip
            text = run_dir.config.read_text().replace(str(tmp_path / "prepared"), str(prepared))
            run_dir.config.write_text(text)
            run_dirs.append(run_dir)
        run_dirs[1].metrics.write_text(run_dirs[1].metrics.read_text().replace('"loss": ', '"loss": 1').replace(
            '"bleu": ', '"bleu": 1'))  # fmt: skip
        rows = result_rows(named([read_story(run_dir) for run_dir in run_dirs]))
        return {row.name.split(",")[0]: row.note for row in rows if row.name.startswith("validation") and row.note}

    assert unmarked() == {}
    pieces = "the runs differ in the pieces of the tokenizer"
    assert unmarked(tokenizer={"target_sha256": "b"}) == {"validation loss": pieces}
    text = "the runs differ in data.validation (its text)"
    assert unmarked(validation={"files": [2]}) == {"validation loss": text, "validation BLEU": text}


@pytest.mark.parametrize(
    ("setting", "value", "unmarked"),
    [
        ("validation.beam_size", 4, {"BLEU, last", "BLEU, best", "chrF, last", "chrF, best"}),
        ("validation.max_sentences", 50, {"BLEU, last", "BLEU, best", "chrF, last", "chrF, best"}),
        ("data.target_language", "zh", {"BLEU, last", "BLEU, best", "chrF, last", "chrF, best"}),
        ("decoding.max_source_tokens", 90, {"BLEU, last", "BLEU, best", "chrF, last", "chrF, best"}),
        ("training.label_smoothing", 0.0, {"loss, last", "loss, best"}),
    ],
)
def test_scores_of_training_that_were_measured_otherwise_have_no_best_one(tmp_path, setting, value, unmarked):
    run_dirs = [
        write_run(tmp_path / "first", num_steps=400),
        write_run(tmp_path / "second", num_steps=397, **{setting: value}),
    ]
    for run_dir in run_dirs[1:]:  # other values than the first one's
        run_dir.metrics.write_text(run_dir.metrics.read_text().replace('"bleu": ', '"bleu": 1').replace(
            '"chrf": ', '"chrf": 1').replace('"loss": ', '"loss": 1').replace('"nll": ', '"nll": 1'))  # fmt: skip
    rows = result_rows(named([read_story(run_dir) for run_dir in run_dirs]))
    validation = [row for row in rows if row.name.startswith("validation ")]
    assert {row.name.removeprefix("validation ") for row in validation if row.note} == unmarked
    assert all(row.best is None and setting in row.note for row in rows if row.note)
    assert {row.best for row in validation if row.name.startswith("validation nll")} == {0}
    assert {row.name for row in rows if row.note and row.name.startswith("newstest")} == {
        f"newstest {name}" for name in unmarked if name.endswith("best")
    }


def test_the_best_of_a_run_that_measures_otherwise_since_a_resume_is_a_later_one(tmp_path):
    run_dirs = [write_run(tmp_path / name) for name in ("first", "second")]
    changed = {"event": "changed", "step": 350, "time": 0.0, "settings": {"validation.beam_size": [4, 1]}}
    append(run_dirs[1].history, [changed])
    rows = rows_of(result_rows(named([read_story(run_dir) for run_dir in run_dirs])))
    assert rows["validation BLEU, best"] == (["25.50 (step 300)", "24.00 (step 400)"], 0)


def test_bleu_of_other_tokens_in_training_has_no_best_one(tmp_path):
    run_dirs = [write_run(tmp_path / name, num_steps=steps) for name, steps in (("first", 400), ("second", 397))]
    run_dirs[1].metrics.write_text(run_dirs[1].metrics.read_text().replace("tok:13a", "tok:char"))
    rows = result_rows(named([read_story(run_dir) for run_dir in run_dirs]))
    unmarked = {row.name.split(",")[0]: row.note for row in rows if row.note}
    why = "the runs differ in"
    assert unmarked == {"validation BLEU": f"{why} bleu_signature", "newstest BLEU": f"{why} newstest/bleu_signature"}


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path):
    stories = [read_story(write_run(tmp_path / sweep / "task_0", num_steps=20)) for sweep in ("a", "b")]
    assert [name for name, _ in named(stories)] == ["a/task_0", "b/task_0"]


def test_the_page_shows_all_runs_in_each_part(stories):
    html = page_of(stories)
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


def test_sentences_of_one_run_alone_are_left_out(tmp_path):
    run_dirs = [write_run(tmp_path / name, num_steps=20) for name in ("a", "b")]
    only = run_dirs[0].samples.read_text().replace("The house is blue.", "Only of a.")
    run_dirs[0].samples.write_text(only)
    page = Page(page_of(named([read_story(run_dir) for run_dir in run_dirs])))
    assert "Only of a." not in page.text
    assert [text for level, text in page.headings if level == 3 and "key" in text]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sources", "settings", "said"),
    [
        (
            "Another.",
            {"validation.max_sentences": 2},
            "by two of the runs: the runs differ in validation.max_sentences.",
        ),
        ("Another.", {}, "No fixed sentence was translated by two of the runs."),
        (None, {}, "Only one run has written translations of fixed sentences; these have none: b."),
    ],
)
def test_why_no_sentences_stand_side_by_side_is_said(tmp_path, sources, settings, said):
    first, second = write_run(tmp_path / "a", num_steps=20), write_run(tmp_path / "b", num_steps=20, **settings)
    if sources is None:
        second.samples.unlink()
    else:
        for source in ("The house is blue.", "Where is <b>my</b> & your key?"):
            second.samples.write_text(second.samples.read_text().replace(source, f"{sources} {len(source)}"))
    assert said in Page(page_of(named([read_story(first), read_story(second)]))).text


def test_runs_without_a_record_can_be_compared(tmp_path):
    run_dirs = [write_run(tmp_path / name, num_steps=20) for name in ("a", "b")]
    for run_dir in run_dirs:
        run_dir.metrics.unlink()
        run_dir.samples.unlink()
    page = Page(page_of(named([read_story(run_dir) for run_dir in run_dirs])))
    assert "No step was recorded yet" in page.text
    assert "None." in page.text
