"""Pieces added to a sentencepiece model: one id wherever they stand, everything else as before."""

from itertools import islice
from pathlib import Path

import pytest

from dist_transformer.config.data_schema import TokenizerConfig
from dist_transformer.data.sources.demo_corpus import demo_pairs
from dist_transformer.data.tokenizer.tokenizer import UNKNOWN_ID, Tokenizer, train_tokenizer
from dist_transformer.errors import DataError
from dist_transformer.interop.vocabulary_extension import add_pieces, growth_of, missing_pieces

SENTENCES = [side for pair in islice(demo_pairs("test"), 600) for side in pair]
NEW = ["<bt>", "Kubernetes", "▁Wetter", "New▁York"]


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pieces") / "old.model"
    train_tokenizer(iter(SENTENCES), TokenizerConfig(type=request.param, vocabulary_size=304), path)
    return path


@pytest.fixture
def extended(model: Path, tmp_path: Path) -> Tokenizer:
    add_pieces(model, NEW, tmp_path / "new.model")
    return Tokenizer.load(tmp_path / "new.model")


def test_each_new_piece_is_one_id_after_the_old_ones(model: Path, extended: Tokenizer):
    size = growth_of(model, [], 0, 0).num_pieces
    assert extended.source_pieces(range(size, size + len(NEW))) == NEW
    for index, piece in enumerate(NEW, start=size):
        ids = extended.encode_source([f"acht Uhr {piece.replace('▁', ' ')} neun Uhr"])[0]
        assert ids.count(index) == 1, piece


def test_old_text_is_cut_as_before_and_new_text_comes_back(model: Path, extended: Tokenizer):
    old = Tokenizer.load(model)
    untouched = [sentence for sentence in SENTENCES if "Wetter" not in sentence]
    assert len(untouched) > 1000
    assert extended.encode_source(untouched) == old.encode_source(untouched)
    for text in ("<bt> Kubernetes in New York", "im Kubernetes. Wetter Unwetter"):
        assert extended.decode_source(extended.encode_source([text])[0]) == text


def test_a_piece_that_begins_with_a_blank_is_one_only_where_a_word_begins(extended: Tokenizer):
    of_word, inside = extended.encode_source(["Wetters", "Unwetter".replace("w", "W")])
    assert "▁Wetter" in extended.source_pieces(of_word)
    assert "▁Wetter" not in extended.source_pieces(inside)


def test_cuts_are_what_the_old_model_makes_of_a_piece_without_the_blank_that_stays_before_it(model: Path):
    old = Tokenizer.load(model)
    for piece, cut in zip(NEW, growth_of(model, NEW, 0, 0).cuts, strict=True):
        whole = old.encode_source([piece.replace("▁", " ").strip()])[0][:-1]
        is_apart = old.source_pieces(whole)[0] == "▁" and not piece.startswith("▁")
        assert cut == [index for index in whole[is_apart:] if index != UNKNOWN_ID], piece


def test_unknown_characters_count_for_nothing_unless_there_is_nothing_else(model: Path):
    assert growth_of(model, ["雪"], 0, 0).cuts == [[UNKNOWN_ID]]
    (mixed,) = growth_of(model, ["雪acht"], 0, 0).cuts
    assert mixed
    assert UNKNOWN_ID not in mixed


def test_pieces_that_are_there_and_repeated_ones_are_not_missing(model: Path):
    there = Tokenizer.load(model).source_pieces([10, 11])
    assert missing_pieces(model, ["<bt>", *there, "<bt>"]) == ["<bt>"]


@pytest.mark.parametrize("piece", ["", "▁", "New York", "a\tb"])
def test_what_cannot_be_a_piece_is_refused(model: Path, piece: str, tmp_path: Path):
    with pytest.raises(DataError, match="cannot be a piece: expected text without spaces"):
        add_pieces(model, [piece], tmp_path / "new.model")


def test_a_piece_that_another_one_would_take_apart_is_refused(model: Path, tmp_path: Path):
    add_pieces(model, ["<2d"], tmp_path / "first.model")
    with pytest.raises(DataError, match=r"'x<2d' cannot be a piece of this model: it would still be cut into"):
        add_pieces(tmp_path / "first.model", ["▁x", "x<2d"], tmp_path / "new.model")
    assert [path.name for path in tmp_path.iterdir()] == ["first.model"]


def test_a_shorter_and_a_longer_piece_live_together(model: Path, tmp_path: Path):
    add_pieces(model, ["<2d", "<2de>"], tmp_path / "new.model")
    tokenizer = Tokenizer.load(tmp_path / "new.model")
    assert "<2de>" in tokenizer.source_pieces(tokenizer.encode_source(["<2de> acht"])[0])


def test_a_file_that_is_no_model_is_named(tmp_path: Path):
    (tmp_path / "text.model").write_text("this is text\n" * 100)
    with pytest.raises(DataError, match=r"text\.model: not a complete sentencepiece model"):
        add_pieces(tmp_path / "text.model", ["<bt>"], tmp_path / "new.model")
