"""The page about a run: sound HTML that holds what the run recorded, whatever stands in its texts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from html_reader import Page, assert_sound
from run_builder import FIXED, append, samples_record, time_of, write_prepared, write_run
from running import NOT_INHERITED, records, without

from dist_transformer.files import write_json
from dist_transformer.format import duration
from dist_transformer.reporting.formatting import measure_name, moment
from dist_transformer.reporting.html import column_kinds
from dist_transformer.reporting.page import run_page
from dist_transformer.reporting.run_history import read_story
from dist_transformer.reporting.samples import FixedSentence
from dist_transformer.run.folder import RunDir

pytestmark = pytest.mark.slow

NASTY = "</td><script>alert('x')</script>\"&amp; \x00\udc80 <img src=http://evil/x onerror=a>"


def a_run(folder: Path) -> RunDir:
    write_prepared(folder / "prepared")
    return write_run(folder / "a <run> & more")


@pytest.fixture
def run_dir(tmp_path):
    """For tests that change it."""
    return a_run(tmp_path)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run and its page."""
    run_dir = a_run(tmp_path_factory.mktemp("plain"))
    return run_dir, page_of(run_dir)


def page_of(run_dir) -> Page:
    text = run_page(read_story(run_dir))
    page = Page(text)
    assert_sound(page, text)
    return page


def test_the_page_has_its_sections_in_order_and_links_to_each(plain):
    _, page = plain
    names = [text for level, text in page.headings if level == 2]
    assert names == [
        "Summary", "Scores", "Curves", "Samples", "Data", "History", "Checkpoints", "Configuration",
    ]  # fmt: skip
    assert [link for link in page.attributes("href") if link.startswith("#")] == [f"#{name.lower()}" for name in names]
    assert page.headings[0] == (1, "a <run> & more")


def test_every_validation_stands_in_the_scores(plain):
    run_dir, page = plain
    rows = {row[0]: row[1:] for row in page.table_with("step", "BLEU", "chrF")[1:]}
    for record in records(run_dir.path, "validation"):
        assert rows[f"{record['step']:,}"] == [
            f"{record['bleu']:.2f}",
            f"{record['chrf']:.2f}",
            f"{record['loss']:.4f}",
            f"{record['perplexity']:.2f}",
            f"{100 * record['token_accuracy']:.1f} %",
            f"{record['nll']:.4f}",
        ]


def test_the_scores_say_what_they_were_measured_on(run_dir):
    text = page_of(run_dir).text
    assert "BLEU and chrF: greedy search, of all sentences (validation.beam_size, max_sentences)." in text
    assert "loss, perplexity, token accuracy and nll: of the references of the whole corpus; the loss" in text
    settings = run_dir.config.read_text()
    run_dir.config.write_text(settings.replace("max_sentences: null", "max_sentences: 500"))
    settings = run_dir.config.read_text().replace("beam_size: 1\n", "beam_size: 5\n")
    run_dir.config.write_text(settings)
    assert text.count("BLEU and chrF: ") == 2  # of both corpora
    assert page_of(run_dir).text.count("BLEU and chrF: beam 5, of the first 500 sentences") == 2
    write_json(run_dir.path.parent / "prepared" / "report.json", {"corpora": {"validation": {"rows": 500}}})
    assert page_of(run_dir).text.count("beam 5, of all sentences") == 1


def best_rows(page: Page) -> list[str]:
    """The class of each row, of the tables of validations in order."""
    rows = [attributes.get("class", "") for attributes in page.of("tr")]
    sizes = [len(each) for each in page.tables]
    ends = [sum(sizes[: place + 1]) for place in range(len(sizes))]
    found = [place for place, each in enumerate(page.tables) if each[0][:2] == ["step", "BLEU"]]
    return ["".join(page.tables[n][row][0] for row in range(sizes[n]) if rows[ends[n] - sizes[n] + row]) for n in found]


@pytest.mark.parametrize(
    ("metric", "marked", "said"), [("bleu", ["300", ""], "Best validation BLEU (step 300)"),
                                   ("newstest/loss", ["", "400"], "Best newstest loss (step 400)")],
)  # fmt: skip
def test_the_best_row_is_marked_in_the_table_of_its_corpus_only(tmp_path, metric, marked, said):
    page = page_of(write_run(tmp_path / "run", **{"validation.metric": metric}))
    assert best_rows(page) == marked
    assert said in page.text
    assert measure_name(metric) in page.table_with("checkpoint")[0]


def test_each_signature_stands_once_with_its_name(run_dir):
    page = page_of(run_dir)
    assert "BLEU: nrefs:1|tok:13a" in page.text
    assert "chrF: nc:6" in page.text
    assert page.text.count("nrefs:1|tok:13a") == 1
    scores = {"bleu": 31.25, "bleu_signature": "nrefs:1|tok:zh", "pairs": 1000, "beam_size": 4}
    write_json(run_dir.evaluation / "test.json", scores)
    text = page_of(run_dir).text
    assert "BLEU (validation, newstest): nrefs:1|tok:13a" in text
    assert "BLEU (evaluated: test): nrefs:1|tok:zh" in text


def test_a_test_corpus_that_was_not_evaluated_is_said_with_the_command(run_dir):
    run_dir.config.write_text(run_dir.config.read_text().replace("  test: null", "  test: {demo: test}"))
    assert "not evaluated yet" not in page_of(run_dir).text
    (run_dir.evaluation / "test.json").unlink()
    assert "not evaluated yet: dist-transformer evaluate" in page_of(run_dir).text
    assert "once the run has written its model" in page_of(run_dir).text
    run_dir.model.mkdir()
    assert "once the run has written its model" not in page_of(run_dir).text


def test_why_a_run_ended_stands_in_the_summary(run_dir):
    end = {"event": "end", "step": 400, "state": "finished", "reason": "no better bleu than 25.5 of step 300"}
    append(run_dir.history, [end])
    assert ["Why it ended", "no better bleu than 25.5 of step 300"] in page_of(run_dir).tables[0]


def test_many_validations_fold_away_but_all_are_there(tmp_path):
    run_dir = write_run(tmp_path / "run", num_steps=400)
    more = [{"event": "validation", "step": step, "bleu": step / 100, "loss": 9.0} for step in range(401, 460)]
    append(run_dir.metrics, more)
    page = page_of(run_dir)
    short, whole = [each for each in page.tables if each[0][:2] == ["step", "BLEU"]][:2]
    assert len(whole) == 1 + 8 + 59
    assert len(short) == 1 + 1 + 5
    assert short[1] in whole
    assert best_rows(page)[:2] == ["300", "300"]


def test_the_summary_says_how_far_the_run_is_and_how_good(plain):
    run_dir, page = plain
    newest = records(run_dir.path)[-1]
    for words in ("400 of 400", f"{newest['loss']:.4f}", "25.50", "31.25", "1 min 40 s", "n1, n2", "en to de"):
        assert words in page.text
    about = dict(page.tables[0])
    assert about["Slurm jobs"] == "12"
    assert about["Starts"] == "2"
    assert about["Ranks"] == "2 on cpu"
    assert about["Target tokens trained on"] == f"{newest['total_target_tokens']:,}"


def test_the_history_names_each_start_and_its_end(plain):
    _, page = plain
    rows = page.table_with("start", "began")[1:]
    assert [(row[2], row[7], row[8]) for row in rows] == [
        ("0", "150", "stopped: signal USR1"),
        ("150", "400", "finished: training.max_steps"),
    ]
    assert rows[1][1] == moment(time_of(150))


def test_a_start_without_an_end_was_killed_or_goes_on(run_dir):
    begun = {"num_ranks": 1, "nodes": ["n3"], "device": "cuda"}
    append(run_dir.history, [{"event": "start", "step": 400, "time": time_of(500), **begun}] * 2)
    rows = page_of(run_dir).table_with("start", "began")[1:]
    assert [row[8] for row in rows[2:]] == ["no end was recorded: killed", "no end was recorded: running, or killed"]


def test_of_thousands_of_starts_and_attempts_the_newest_200_have_a_row(run_dir):
    append(run_dir.history, [{"event": "start", "step": step, "time": time_of(500)} for step in range(1000, 2500)])
    run_dir.slurm.mkdir()
    append(run_dir.attempts, [{"event": "began", "time": 5.0, "job": "12", "attempt": n} for n in range(1, 1302)])
    page = page_of(run_dir)
    starts, attempts = page.table_with("start", "began")[1:], page.table_with("job", "attempt")[1:]
    assert [(row[0], row[2]) for row in starts] == [(str(n + 3), f"{1000 + n:,}") for n in range(1300, 1500)]
    assert [row[1] for row in attempts] == [str(n) for n in range(1102, 1302)]
    assert "1,302 earlier ones: history.jsonl" in page.text
    assert "1,101 earlier ones: slurm/attempts.jsonl" in page.text
    assert dict(page.tables[0])["Starts"] == "1,502"


def test_attempts_divergences_and_excluded_nodes_stand_in_the_history(run_dir):
    run_dir.slurm.mkdir()
    began = {"event": "began", "time": 5.0, "job": "12", "attempt": 1, "newest": None, "nodes": "n[1-2]", "ranks": 2}
    append(
        run_dir.attempts, [began, {**began, "event": "ended", "exit_code": 75, "requeued": True, "reason": "goes on"}]
    )
    write_json(run_dir.excluded, {"n9": "preflight: slow <disk>"})
    event = {"since_step": 210, "reason": "the loss was above", "policy": "stop", "went_on_from": 150, "time": 9.0}
    write_json(run_dir.divergence, [{**event, "learning_rate_factor": 1.0}])
    page = page_of(run_dir)
    assert page.table_with("job", "attempt")[2][5:7] == ["75", "goes on"]
    assert page.table_with("since step")[1][0] == "210"
    assert page.table_with("node", "reason")[1] == ["n9", "preflight: slow <disk>"]
    assert "Dotted: divergences (1)." in page.text


def test_silent_errors_stand_in_the_history(run_dir):
    fault = {"event": "fault", "step": 120, "time": time_of(130), "rank": 1, "node": "n7", "reason": "other <weights>"}
    append(run_dir.history, [fault])
    assert page_of(run_dir).table_with("step", "found")[1] == [
        "120",
        moment(time_of(130)),
        "1",
        "n7",
        "other <weights>",
    ]


def test_fixed_sentences_are_shown_step_by_step(plain):
    _, page = plain
    headings = [text for level, text in page.headings if level == 3]
    for source, reference in FIXED:
        assert source in headings
        assert ["reference", reference] in [row for each in page.tables for row in each]
    first = next(each for each in page.tables if each and each[-1] == ["reference", FIXED[0][1]])
    assert first[1:-1] == [["250 to 400", "Das Haus ist blau."], ["50 to 200", "Das 1."]]
    drawn = page.table_with("step", "source", "translation", "reference")
    assert [row[1] for row in drawn[1:]] == ["Number 400", "Number 350", "Number 300"]


def test_all_but_the_first_two_fixed_sentences_fold_away(run_dir):
    sample = samples_record(450)
    more = [{**sample["sentences"][0], "number": 90 + n, "source": f"One more {n}"} for n in range(3)]
    append(run_dir.samples, [{**sample, "sentences": more}])
    page = page_of(run_dir)
    assert "3 more of the fixed sentences" in page.text
    headings = [text for level, text in page.headings if level == 3]
    assert [text for text in headings if text.startswith("One more")] == ["One more 0", "One more 1", "One more 2"]
    names = [name for name, _ in page.elements]
    assert names.count("details") == 2  # and that of all settings


def test_the_same_translation_in_a_row_is_one_stretch():
    sentence = FixedSentence("validation", 1, "source", "reference", [(1, "a"), (2, "a"), (3, "b"), (4, "a")])
    assert sentence.changes == [(1, 2, "a"), (3, 3, "b"), (4, 4, "a")]


def test_the_data_of_the_run_with_its_picture(plain):
    _, page = plain
    assert page.table_with("corpus", "pairs read")[1] == ["train", "1,000", "990", "24,651", "26,000"]
    assert page.table_with("corpus", "empty")[1] == ["train", "3", "7", "0"]
    assert page.table_with("corpus", "mean")[1] == ["train, source", "24.9", "25", "35", "38", "44", "56"]
    assert "feed" * 16 in page.text
    assert "11 of 990 pairs repeat another one" in page.text
    assert "Histogram" in page.of("img")[0]["alt"]


def test_the_best_checkpoint_is_marked(plain):
    _, page = plain
    assert [row[0] for row in page.table_with("checkpoint")[1:]] == ["step_00000400", "step_00000350", "step_00000300"]
    assert [attributes for attributes in page.of("tr") if attributes.get("class") == "best"]
    assert "Best by BLEU: step 300." in page.text
    assert "Best by validation BLEU: step 300." in page.text


def test_settings_that_are_not_the_default_come_first(plain):
    _, page = plain
    differing = {row[0]: row[1:] for row in page.table_with("setting", "value", "default")[1:]}
    assert differing["training.max_steps"] == ["400", "100000"]
    every = {row[0]: row[1] for each in page.tables if each[0] == ["setting", "value"] for row in each[1:]}
    assert every["optimizer.beta2"] == "0.98"
    assert "optimizer.beta2" not in differing


def test_nothing_that_a_run_says_becomes_part_of_the_page(tmp_path):
    run_dir = write_run(tmp_path / "run", num_steps=50)
    sample = samples_record(60)
    for sentence in sample["sentences"]:
        sentence |= {"source": NASTY, "translation": NASTY, "reference": NASTY}
    with run_dir.samples.open("a") as file:
        file.write(json.dumps({**sample, "corpus": NASTY}) + "\n")
    write_json(
        run_dir.state, {"state": 'x"><script>', "step": 50, "host": NASTY.replace("\udc80", ""), "version": "<i>"}
    )
    write_json(run_dir.evaluation / "<b>.json", {"bleu": 1.0, "bleu_signature": NASTY.replace("\udc80", "")})
    page = page_of(run_dir)
    assert "<script>alert('x')</script>" in page.text
    assert not page.attributes("onerror")
    run_page(read_story(run_dir)).encode("utf-8")


def test_characters_that_html_does_not_allow_are_replaced(run_dir):
    write_json(run_dir.state, {"state": "failed\x1b", "step": 1})
    assert "failed\N{REPLACEMENT CHARACTER}" in page_of(run_dir).text


def test_columns_of_numbers_are_set_to_the_right_and_rows_have_names(plain):
    assert column_kinds([["a", "1,000", "a b" * 20], ["b", "-", ""]], 3) == ["", "number", "words"]
    _, page = plain
    rows = [attributes.get("class") for attributes in page.of("td")]
    assert {"number", "words", None} == set(rows)
    assert {attributes.get("scope") for attributes in page.of("th")} == {"col", "row"}


def test_times_are_said_as_people_say_them():
    assert [duration(seconds) for seconds in (None, 12.4, 200, 7500, 273_600)] == [
        "-", "12 s", "3 min 20 s", "2 h 05 min", "3 d 4 h",
    ]  # fmt: skip
    assert moment(0) == moment(None) == "-"
    assert moment(1_767_225_600) == "2026-01-01 00:00 UTC"


def test_reports_are_made_without_torch():
    modules = "page, compare, figures"
    script = f"import sys; from dist_transformer.reporting import {modules}; print('torch' in sys.modules)"
    said = subprocess.run(
        [sys.executable, "-c", script], env=without(NOT_INHERITED), capture_output=True, text=True, check=True
    )
    assert said.stdout.strip() == "False"
