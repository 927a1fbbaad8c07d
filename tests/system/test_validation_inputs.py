"""What is wrong with a validation corpus or a score is said before the first step, with what to do."""

import shutil

import pytest
from running import records

pytestmark = pytest.mark.slow

TRANSLATED = ("validation.every_steps=2", "validation.translate=true", "training.max_steps=4")


def test_a_run_whose_validation_text_is_gone_says_so_and_goes_on_without_translations(command, train_small, tmp_path):
    for side in ("en", "de"):
        shutil.copy(command.folder / f"valid.{side}", tmp_path)
    corpus = f"data.validation={{source: {tmp_path}/valid.en, target: {tmp_path}/valid.de}}"
    run = train_small("gone", corpus, *TRANSLATED, "checkpoints.every_steps=1")
    (tmp_path / "valid.de").unlink()
    said = command("train", run, "training.max_steps=6", "--ranks", 2, code=2)
    assert "data.validation: " in said
    assert f"{tmp_path}/valid.de: no such file" in said
    assert "put it right, or continue without translations: validation.translate=false" in said
    assert "Traceback" not in said
    command("train", run, "training.max_steps=6", "validation.translate=false")
    assert [("bleu" in record, record["step"]) for record in records(run, "validation")] == [
        (True, 2),
        (True, 4),
        (False, 6),
    ]

    said = command("evaluate", run, "--split", "newstest", code=2)
    assert "data.more_validation.newstest is not given in" in said
    assert "one of the corpora that are there with --split: validation, test" in said


def test_a_line_that_the_positions_cannot_take_is_named_before_the_first_step(command):
    lines = (command.folder / "valid.en").read_text(encoding="utf-8").splitlines()
    long_side, short_side = [*lines[:2], " ".join(lines[:20])], lines[:3]
    for name, side in (("long", long_side), ("short", short_side)):
        (command.folder / name).write_text("".join(f"{line}\n" for line in side), encoding="utf-8")
    given = ("run.name=positions", "model.positions=learned", "model.max_positions=96", "data.filters.max_tokens=96")
    for more, translate in (("{source: short, target: long}", "false"), ("{source: long, target: short}", "true")):
        corpora = f"data.more_validation={{news: {more}}}"
        said = command("train", "small.yaml", *given, corpora, f"validation.translate={translate}", code=2)
        assert "data.more_validation.news, line 3: " in said
        assert "only 96 positions, and no pair of it is left out: raise model.max_positions (of a new run)" in said


@pytest.mark.parametrize("name", ["data.validation", "data.more_validation.news"])
def test_a_line_that_cannot_be_cut_short_enough_to_be_translated_is_named_before_the_first_step(command, name):
    """A character has at least three tokens: the beginning of a word, itself and the end of the sentence; tags come on top."""
    news = "data.more_validation={news: {source: valid.en, target: valid.de, tags: [<2de>, <x>]}}"
    most, corpora = (2, []) if name == "data.validation" else (5, [news, "data.validation=null"])
    given = (f"run.name=uncut-{most}", f"decoding.max_source_tokens={most}", *corpora, *TRANSLATED)
    said = command("train", "small.yaml", *given, "--ranks", 2, code=2)
    assert said.count(f"{name}: line 1: ") == 1
    assert f"tokens, and cannot be cut into parts of at most {most}: raise --max-source-tokens" in said
    assert "or continue without" in said
    assert "loss" not in said
    command("train", "small.yaml", *given, "validation.translate=false")
