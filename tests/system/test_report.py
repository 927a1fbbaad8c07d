"""report and compare, as people use them, on runs that were really trained."""

import json
import os
import shutil
import signal

import pytest
from html_reader import Page, assert_sound
from running import records, wait_for_step

from dist_transformer import Run
from dist_transformer.files import read_json, write_json
from dist_transformer.interop.model_folder import load_model_folder
from dist_transformer.run.evaluations import OF_MODEL
from dist_transformer.run.folder import RunDir
from dist_transformer.training.finish import report_after_training

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(train_small):
    """Stopped by its step limit and gone on with once."""
    settings = ("validation.every_steps=3", "validation.translate=true")
    train_small("reported", *settings)
    return train_small("reported", *settings, "training.max_steps=9")


@pytest.fixture
def copied(trained, tmp_path):
    """For tests that change it."""
    return shutil.copytree(trained, tmp_path / "copied")


def page_of(path) -> Page:
    html = path.read_text(encoding="utf-8")
    page = Page(html)
    assert_sound(page, html)
    return page


def fixed_sources(run) -> list[str]:
    newest = records(run, "samples", "samples.jsonl")[-1]
    return [sentence["source"] for sentence in newest["sentences"] if sentence["fixed"]]


def test_the_report_holds_what_the_run_recorded(command, trained):
    assert f"written to {trained / 'report.html'}" in command("report", trained)
    page = page_of(trained / "report.html")
    rows = {row[0]: row for row in page.table_with("step", "BLEU")[1:]}
    for record in records(trained, "validation"):
        row = rows[str(record["step"])]
        assert {f"{record['bleu']:.2f}", f"{record['loss']:.4f}", f"{record['perplexity']:.2f}"} <= set(row)
    assert f"{records(trained)[-1]['loss']:.4f}" in page.text
    history = page.table_with("start", "began")[1:]
    assert [(row[2], row[7]) for row in history] == [("0", "6"), ("6", "9")]
    assert page.table_with("corpus", "pairs read")[1][:2] == ["train", "600"]
    headings = [text for level, text in page.headings if level == 3]
    assert all(source in headings for source in fixed_sources(trained))
    model = load_model_folder(trained / "model").model
    about = dict(page.tables[0])
    assert about["Parameters"] == f"{sum(parameter.numel() for parameter in model.parameters()):,}"
    assert f"BLEU: {records(trained, 'validation')[-1]['bleu_signature']}" in page.text
    curves = next(svg["aria-label"] for svg in page.of("svg") if svg["aria-label"].startswith("loss ("))
    assert f"training: {records(trained)[-1]['loss']:.5g} at step 9" in curves


def test_a_page_elsewhere_leaves_the_run_folder_alone(command, trained, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in trained.rglob("*")}
    command("report", trained, "--output", tmp_path / "page.html")
    assert {path: path.stat().st_mtime_ns for path in trained.rglob("*")} == before
    page_of(tmp_path / "page.html")


def test_a_run_has_a_page_while_it_goes_on_and_after_it_was_killed(command):
    settings = ("run.name=killed", "training.max_steps=100000", "checkpoints.every_steps=100000")
    process = command.start("train", "small.yaml", *settings)
    run = command.folder / "runs" / "killed"
    try:
        wait_for_step(run, 5)
        command("report", run)
        going = page_of(run / "report.html")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert going.of("span")[0]["class"] == "state running"
    assert "running, or killed" in going.text
    assert "There is no checkpoint" in going.text
    os.utime(run / "owner.json", (0, 0))  # its heartbeat was long ago
    command("report", run)
    assert "running, but no rank gives a sign of life" in page_of(run / "report.html").text


def test_a_run_without_validation_and_of_an_older_version_has_a_page(command, copied):
    kept = records(copied)
    (copied / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    for name in ("samples.jsonl", "history.jsonl"):
        (copied / name).unlink()
    command("report", copied)
    page = page_of(copied / "report.html")
    for words in ("Nothing was validated", "No sample translations", "no history"):
        assert words in page.text


def test_runs_are_compared_on_the_screen_and_on_a_page(command, trained, copied, tmp_path):
    command("evaluate", trained, "--split", "validation")
    shutil.copytree(trained / "evaluation", copied / "evaluation")
    said = command("compare", trained, copied, "--output", tmp_path / "both.html")
    newest = records(trained, "validation")[-1]
    lines = [line.split("\t") for line in said.splitlines()]
    assert ["", "reported", "copied"] in lines
    assert ["validation loss, last", *2 * [f"{newest['loss']:.4f}"]] in lines
    assert ["evaluated: validation BLEU, p against reported (paired bootstrap)", "-", "1.000"] in lines
    assert f"written to {tmp_path / 'both.html'}" in said
    assert page_of(tmp_path / "both.html").tables[0][0] == ["", "reported", "copied"]


def test_scores_of_a_model_that_was_replaced_since_are_shown_nowhere(command, copied, tmp_path):
    shutil.rmtree(copied / "evaluation", ignore_errors=True)
    command("evaluate", copied)
    command("report", copied)
    assert "The final model, evaluated" in page_of(copied / "report.html").text
    old = shutil.copytree(copied, tmp_path / "old")
    scores = read_json(old / "evaluation" / "test.json")
    assert Run(old).scores() == {"test": scores}
    os.utime(old / "model" / "model.safetensors")
    assert Run(old).scores() == {"test": scores}
    command("average", copied, "--last", 1)
    command("report", copied)
    page = page_of(copied / "report.html").text
    assert "The final model, evaluated" not in page
    assert "Scores of an earlier model, left out: test. Evaluate again." in page
    assert f"not evaluated yet: dist-transformer evaluate {copied}" in page
    assert Run(copied).scores() == {}
    lines = [line.split("\t") for line in command("compare", old, copied).splitlines()]
    assert [line[1:] for line in lines if line[0].startswith("evaluated: test BLEU")] == [
        [f"{scores['bleu']:.2f}", "of an earlier model"]
    ]
    write_json(copied / "evaluation" / "test.json", {key: scores[key] for key in scores if key != OF_MODEL})
    assert Run(copied).scores()["test"]["bleu"] == scores["bleu"]  # of a version that did not record the model
    command("evaluate", copied)
    assert Run(copied).scores().keys() == {"test"}


def test_a_folder_of_runs_stands_for_its_runs(command, trained, tmp_path):
    for name in ("fast", "slow"):
        shutil.copytree(trained, tmp_path / "rates" / name)
    (tmp_path / "rates" / "notes").mkdir()
    said = command("compare", tmp_path / "rates", "--output", tmp_path / "rates.html")
    assert "\tfast\tslow" in said


def test_what_cannot_be_reported_on_is_said_in_one_message(command, trained, copied, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "is not a run folder" in command("report", tmp_path / "empty", code=2)
    assert "no such folder" in command("report", tmp_path / "nowhere", code=2)
    assert "expected at least two" in command("compare", trained, code=2)
    assert "expected at least two" in command("compare", trained, trained, code=2)
    (tmp_path / "in_the_way").write_text("", encoding="utf-8")
    elsewhere = tmp_path / "in_the_way" / "page.html"
    assert "expected a path to write to; give another" in command("report", trained, "--output", elsewhere, code=2)
    assert "expected a path to write to; give another" in command(
        "compare", trained, copied, "--output", elsewhere, code=2
    )


def test_after_training_a_failure_is_a_warning(copied, caplog, monkeypatch):
    def out_of_memory(*_arguments):
        raise MemoryError("no memory for the page")

    (copied / "report.html").unlink(missing_ok=True)
    with monkeypatch.context() as patched:
        patched.setattr("dist_transformer.reporting.page.run_page", out_of_memory)
        assert not report_after_training(RunDir(copied))
    assert "no memory for the page" in caplog.text
    (copied / "report.html").mkdir()
    assert not report_after_training(RunDir(copied))
    assert "cannot be written" in caplog.text
