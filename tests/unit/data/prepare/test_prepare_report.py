"""The report of a preparation: repeated pairs, overlap with held-out sets, lengths, and what was dropped."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread
from prepare_helpers import PAIRS, SMALL, config_of, write_text
from sentencepiece import SentencePieceNormalizer

from dist_transformer.data.prepare import chunks
from dist_transformer.data.prepare.preparation import load_tokenizer, prepare, prepared_folder
from dist_transformer.data.prepare.report import warn_of_changed_text, warn_of_cut_text
from dist_transformer.data.sentences import contained
from dist_transformer.data.tokenizer.tokenizer import Tokenizer
from dist_transformer.errors import DataError

TEXT = {"source": "train.en", "target": "train.de"}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, rows in SMALL.items():
        monkeypatch.setattr(chunks, name, rows)


def report_of(folder: Path, **data: Any) -> dict[str, Any]:
    config = config_of(folder, data={**config_of(folder).data.model_dump(), **data})
    prepare(config)
    return json.loads((prepared_folder(config) / "report.json").read_text(encoding="utf-8"))


def test_keys_are_found_among_sorted_ones():
    random = np.random.default_rng(5)
    extremes = np.array([0, 2**64 - 1], dtype=np.uint64)
    drawn = random.integers(0, 2**64, size=60, dtype=np.uint64)
    kept = np.unique(np.concatenate([extremes, random.choice(drawn, 40)]))
    asked = random.permutation(np.concatenate([drawn, extremes]))
    assert contained(asked, kept).tolist() == [each in {*kept.tolist()} for each in asked.tolist()]
    assert not contained(asked, asked[:0]).any()


def test_lengths_are_those_of_the_kept_rows(tmp_path: Path):
    write_text(tmp_path, [*PAIRS[:300], ("", "dropped")])
    report = report_of(tmp_path)
    config = config_of(tmp_path)
    folder, manifest = prepared_folder(config), prepare(config)
    tokenizer = load_tokenizer(folder, manifest.tokenizer)
    lengths = [len(ids) for ids in tokenizer.encode_source([source for source, _ in PAIRS[:300]])]
    counted = report["corpora"]["train"]["source_lengths"]
    assert counted["mean"] == round(np.mean(lengths), 1)
    for percent in (50, 90, 95, 99, 100):
        assert counted[str(percent)] == np.percentile(lengths, percent, method="inverted_cdf")
    assert report["corpora"]["train"]["source_tokens"] == sum(lengths)


def test_long_lines_of_another_script_are_learned(tmp_path: Path):
    write_text(tmp_path, [(source, "кит " * 800) for source, _ in PAIRS[:60]])
    report = report_of(tmp_path, filters={"max_tokens": 8000, "max_length_ratio": 10_000})
    assert report["corpora"]["train"]["rows"] == 60
    assert report["corpora"]["train"]["target_lengths"]["unknown_percent"] == 0


def test_lines_that_are_all_too_long_are_said_to_be(tmp_path: Path):
    write_text(tmp_path, [("a " * 20_000, "b " * 20_000)] * 3)
    with pytest.raises(
        DataError, match=r"all its sentences are empty, or longer than data\.filters\.max_tokens allows"
    ):
        report_of(tmp_path)
    write_text(tmp_path, [("", "")] * 3)
    with pytest.raises(DataError, match=r"all its sentences are empty, or longer"):
        report_of(tmp_path)


@pytest.mark.parametrize("on_the_fly", [False, True])
def test_text_that_the_tokenizer_does_not_know_is_counted_and_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, on_the_fly: bool
):
    write_text(tmp_path)
    known = config_of(tmp_path)
    model = prepared_folder(known) / prepare(known).tokenizer.source
    assert not caplog.records
    russian = ("день ночь " + PAIRS[0][1] + " утро", "тут")
    write_text(tmp_path, [(source, russian[at % 2]) for at, (source, _) in enumerate(PAIRS[:100])])
    filters = {"max_length_ratio": 1000, "rules": {"held_out": False}}
    data = {**known.data.model_dump(), "on_the_fly": on_the_fly, "filters": filters}
    config = config_of(tmp_path, data=data, tokenizer={"source_model": str(model)})
    manifest = prepare(config)
    folder = prepared_folder(config)
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))["corpora"]
    tokens = sum(map(len, load_tokenizer(folder, manifest.tokenizer).encode_target(russian)))
    expected = round(100 * 4 / tokens, 2)  # each run of letters without a piece is one token
    assert report["train"]["target_lengths"]["unknown_percent"] == expected > 1
    assert report["train"]["source_lengths"]["unknown_percent"] == 0
    [record] = caplog.records
    assert f"train: {expected} % of its target tokens are unknown" in record.getMessage()
    assert "unknown, %" in (folder / "report.md").read_text(encoding="utf-8")


CUTS = {
    "subword-nmt": "a litt@@ le gir@@ l",
    "sentencepiece": "\u2581a \u2581little \u2581gir l",
    "Moses": "the girl &apos;s high @-@ speed train",
}


@pytest.mark.parametrize("program", CUTS)
def test_text_that_another_program_cut_is_warned_of_but_not_a_few_such_lines(
    program: str, caplog: pytest.LogCaptureFixture
):
    plain = [source for source, _ in PAIRS[:96]] + [None, "", "write to me @@home", "a - b"]
    warn_of_cut_text("train", [*plain, CUTS[program]] * 10)
    assert not caplog.messages
    warn_of_cut_text("train", [*plain, *[CUTS[program]] * 100])
    [said] = caplog.messages
    assert said.startswith(f"train: 100 of 200 lines look cut by {program} (")
    assert said.endswith("Its BLEU is far too high")


def test_entities_of_html_are_no_sign_of_cut_text(caplog: pytest.LogCaptureFixture):
    warn_of_cut_text(
        "train", ["say &quot;hello&quot; to it, &quot;hello&quot;", "the girl&apos;s train isn&apos;t here"]
    )
    assert not caplog.messages


@pytest.mark.parametrize("on_the_fly", [False, True])
def test_a_preparation_warns_of_cut_text_once_for_each_corpus(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, on_the_fly: bool
):
    write_text(tmp_path, [(source.replace(" ", "@@ "), target) for source, target in PAIRS[:300]])
    report_of(tmp_path, on_the_fly=on_the_fly)
    [said] = caplog.messages
    assert "train: 50 of 100 lines look cut by subword-nmt" in said  # of the first batch of 50 pairs


FULL_WIDTH = "\u4f60\u597d\uff0c\u4e16\u754c\uff01"


def test_targets_with_characters_that_the_tokenizer_replaces_are_warned_of_but_not_spaces(
    caplog: pytest.LogCaptureFixture,
):
    plain = [target for _, target in PAIRS[:95]] + [None, "no\u00a0break"]
    warn_of_changed_text("train", [*plain, FULL_WIDTH, FULL_WIDTH])
    assert not caplog.messages
    warn_of_changed_text("train", [*plain, *[FULL_WIDTH] * 10])
    [said] = caplog.messages
    assert said.startswith("train: 10 of 107 targets have characters that no translation will have")
    assert said.endswith(": '\uff01' '\uff0c'; tokenizer.normalization: identity keeps them")


def test_characters_that_are_warned_of_are_those_that_sentencepiece_replaces(caplog: pytest.LogCaptureFixture):
    """The non-joiner within words of Persian becomes a space; the full-width tilde stays."""
    normalizer = SentencePieceNormalizer(rule_name="nmt_nfkc", escape_whitespaces=False, add_dummy_prefix=False)
    for letter in "a\u00e9\u4f60\uff0c\u2026\u0e33\u00bd\u2122\uff5e\u301c\u200c\u200d":
        caplog.clear()
        warn_of_changed_text("train", [f"a{letter}b"])
        assert bool(caplog.messages) == (normalizer.normalize(f"a{letter}b") != f"a{letter}b"), ascii(letter)
        assert all(f": {letter!r};" in said for said in caplog.messages)


@pytest.mark.parametrize("normalization", ["nmt_nfkc", "identity"])
def test_translations_have_the_punctuation_of_the_targets_if_the_tokenizer_leaves_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, normalization: str
):
    write_text(tmp_path, [(source, f"{target} {FULL_WIDTH}") for source, target in PAIRS[:300]])
    config = config_of(tmp_path, tokenizer={"normalization": normalization})
    prepare(config)
    tokenizer = Tokenizer.load(prepared_folder(config) / "tokenizer" / "source.model")
    [found] = [tokenizer.decode_target(ids) for ids in tokenizer.encode_target([FULL_WIDTH])]
    expected = {"nmt_nfkc": (FULL_WIDTH.replace("\uff0c", ",").replace("\uff01", "!"), 1), "identity": (FULL_WIDTH, 0)}
    assert (found, len(caplog.messages)) == expected[normalization]


def test_the_report_is_a_page_with_aligned_tables_and_a_picture(tmp_path: Path):
    write_text(tmp_path)
    report_of(tmp_path)
    folder = prepared_folder(config_of(tmp_path))
    text = (folder / "report.md").read_text(encoding="utf-8")
    tables = [section for section in text.split("\n\n") if section.startswith("|")]
    assert [table.split("\n")[0].split()[1] for table in tables] == ["corpus"] * 3
    for table in tables:
        assert len({len(line) for line in table.split("\n")}) == 1
    assert "(lengths.png)" in text
    height, width, _ = imread(folder / "lengths.png").shape
    assert width > height > 300
