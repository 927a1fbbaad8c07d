"""report and compare, as people use them, on runs that were really trained."""

import json
import os
import shutil
import signal

import numpy as np
import pytest
import torch
from html_reader import Page, assert_sound
from running import records, wait_for_step

from dist_transformer.data.tokenizer.tokenizer import Tokenizer
from dist_transformer.errors import UserError
from dist_transformer.files import write_json
from dist_transformer.interop.model_folder import load_model_folder
from dist_transformer.reporting.attention_maps import attention_of
from dist_transformer.reporting.run_report import report_after_training
from dist_transformer.run.folder import RunDir

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


def test_the_pictures_of_the_run_are_files_too(command, trained):
    command("report", trained)
    names = {path.name for path in (trained / "figures").iterdir()}
    drawn = min(3, len(fixed_sources(trained)))
    assert drawn
    assert names == {"curves.png", "lengths.png", *(f"attention_{number}.png" for number in range(1, drawn + 1))}
    assert all((trained / "figures" / name).read_bytes().startswith(b"\x89PNG") for name in names)


def test_sentences_of_ones_own_are_translated_as_translate_does(command, trained, tmp_path):
    text = "twenty-one <3\nIt is nine\u2028o'clock.\n"  # of which no line of a text file ends
    (tmp_path / "mine.txt").write_text(text + "\n", encoding="utf-8")
    command("report", trained, "--sentences", tmp_path / "mine.txt", "--output", tmp_path / "mine.html")
    page = page_of(tmp_path / "mine.html")
    for source, translation in zip(
        text.split("\n")[:-1], command("translate", trained, text=text).split("\n")[:-1], strict=True
    ):
        assert (3, source) in page.headings
        assert f"Translation: {translation}" in page.text


def test_a_page_elsewhere_leaves_the_run_folder_alone(command, trained, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in trained.rglob("*")}
    command("report", trained, "--no-attention", "--output", tmp_path / "page.html")
    assert {path: path.stat().st_mtime_ns for path in trained.rglob("*")} == before
    assert "Left out with --no-attention" in page_of(tmp_path / "page.html").text


def test_the_maps_are_those_of_the_model(trained):
    (found,) = attention_of(trained / "model", ["It is nine o'clock."])
    loaded = load_model_folder(trained / "model")
    tokenizer = Tokenizer.load(loaded.tokenizer_files.source, loaded.tokenizer_files.target)
    number_of = {piece: number for number, piece in enumerate(tokenizer.target_pieces(range(150)))}
    (source,) = tokenizer.encode_source(["It is nine o'clock."])
    read = [number_of[piece] for piece in found.read_pieces]
    with torch.no_grad():
        expected = loaded.model.attention_maps(torch.tensor([source]), torch.tensor([read]))
    for kind in ("encoder", "decoder", "cross"):
        layers = getattr(found, kind)
        for layer, reference in zip(layers, getattr(expected, kind), strict=True):
            np.testing.assert_array_equal(layer, reference[0].numpy())
            np.testing.assert_allclose(layer.sum(-1), 1.0, atol=1e-5)
    assert [*found.read_pieces[1:], "</s>"] == found.target_pieces
    assert found.source_pieces == tokenizer.source_pieces(source)
    assert not np.triu(found.decoder[0], 1).any()


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
    for words in ("Nothing was validated", "No sample translations", "No fixed sample sentences", "no history"):
        assert words in page.text


def test_a_model_that_cannot_be_loaded_is_no_reason_to_write_no_page(command, copied):
    (copied / "model" / "model.safetensors").write_bytes(b"torn")
    command("report", copied)
    assert "Not drawn" in page_of(copied / "report.html").text


def test_runs_are_compared_on_the_screen_and_on_a_page(command, trained, copied, tmp_path):
    said = command("compare", trained, copied, "--output", tmp_path / "both.html")
    newest = records(trained, "validation")[-1]
    lines = [line.split("\t") for line in said.splitlines()]
    assert ["", "reported", "copied"] in lines
    assert ["validation loss, last", *2 * [f"{newest['loss']:.4f}"]] in lines
    assert f"written to {tmp_path / 'both.html'}" in said
    assert page_of(tmp_path / "both.html").tables[0][0] == ["", "reported", "copied"]


def test_the_folder_of_a_sweep_stands_for_its_runs(command, trained, tmp_path):
    for task in (0, 1, 10):
        shutil.copytree(trained, tmp_path / "sweep" / f"task_{task}")
    write_json(tmp_path / "sweep" / "sweep.json", {"name": "sweep", "id": "1", "points": [{}, {}, {}]})
    said = command("compare", tmp_path / "sweep", "--output", tmp_path / "sweep.html")
    assert "\ttask_0\ttask_1\ttask_10" in said


def test_what_cannot_be_reported_on_is_said_in_one_message(command, trained, copied, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "is not a run folder" in command("report", tmp_path / "empty", code=2)
    assert "no such folder" in command("report", tmp_path / "nowhere", code=2)
    assert "expected a text file in UTF-8" in command("report", trained, "--sentences", tmp_path / "none.txt", code=2)
    (tmp_path / "blank.txt").write_text(" \n\n", encoding="utf-8")
    assert "holds no sentence" in command("report", trained, "--sentences", tmp_path / "blank.txt", code=2)
    assert "give one of them" in command(
        "report", trained, "--no-attention", "--sentences", tmp_path / "blank.txt", code=2
    )
    assert "expected at least two" in command("compare", trained, code=2)
    assert "expected at least two" in command("compare", trained, trained, code=2)
    (tmp_path / "in_the_way").write_text("", encoding="utf-8")
    elsewhere = tmp_path / "in_the_way" / "page.html"
    assert "expected a path to write to; give another" in command(
        "report", trained, "--no-attention", "--output", elsewhere, code=2
    )
    assert "expected a path to write to; give another" in command(
        "compare", trained, copied, "--output", elsewhere, code=2
    )
    shutil.rmtree(copied / "model")
    (tmp_path / "one.txt").write_text("One.\n", encoding="utf-8")
    assert "dist-transformer average" in command("report", copied, "--sentences", tmp_path / "one.txt", code=2)


def test_a_sentence_without_tokens_or_with_too_many_is_refused(trained):
    with pytest.raises(UserError, match=r"1 tokens; expected 2 to 200"):
        attention_of(trained / "model", [""])
    with pytest.raises(UserError, match=r"tokens; expected 2 to 200"):
        attention_of(trained / "model", ["twenty-one " * 100])


def test_after_training_a_failure_is_a_warning_and_the_page_is_written_as_far_as_it_can_be(copied, caplog, monkeypatch):
    def out_of_memory(*_arguments):
        raise MemoryError("no memory for a second model")

    monkeypatch.setattr("dist_transformer.reporting.attention_maps.attention_of", out_of_memory)
    report_after_training(RunDir(copied))
    assert "no memory for a second model" in caplog.text
    assert "</html>" in (copied / "report.html").read_text(encoding="utf-8")
    (copied / "report.html").unlink()
    shutil.rmtree(copied / "figures")
    (copied / "figures").write_text("", encoding="utf-8")
    report_after_training(RunDir(copied))
    assert not (copied / "report.html").exists()
    assert "cannot be written" in caplog.text
