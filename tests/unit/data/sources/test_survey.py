"""A look at a corpus: its figures, and held-out pairs that share no sentence with what remains."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from dist_transformer.config.data_schema import CorpusConfig, DataConfig
from dist_transformer.data.sources import survey as survey_module
from dist_transformer.data.sources.survey import Survey, survey, write_splits
from dist_transformer.errors import DataError

Pairs = Iterable[tuple[str, str]]


def corpus_of(folder: Path, pairs: Pairs) -> tuple[CorpusConfig, DataConfig]:
    for side, name in enumerate(("a.en", "a.ru")):
        (folder / name).write_text("".join(f"{pair[side]}\n" for pair in pairs), encoding="utf-8")
    corpus = CorpusConfig(source=str(folder / "a.en"), target=str(folder / "a.ru"))
    return corpus, DataConfig(train=corpus, source_language="en", target_language="ru")


def look(folder: Path, pairs: Pairs) -> Survey:
    return survey(*corpus_of(folder, pairs), lambda pairs: None)


def test_rows_characters_scripts_and_lengths_are_counted(tmp_path: Path) -> None:
    found = look(tmp_path, [("abcd" * 3, "абвг" * 5)] * 2 + [("dcba", "гвба"), ("", "гв"), (" ", "гв")])
    assert found.pairs == 5
    assert found.characters == 9  # with the blank
    assert [side.script for side in found.sides] == ["Latin", "Cyrillic"]
    assert sorted(found.sample) == [("abcd" * 3, "абвг" * 5), ("dcba", "гвба")]
    assert found.repeated == pytest.approx(1 / 3)
    assert [side.mean for side in found.sides] == [
        pytest.approx(3),
        pytest.approx(4),
    ]  # 4 characters a token, and the end


def test_a_sample_is_bounded_and_shows_the_repetitions_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey_module, "SAMPLE_PAIRS", 200)
    pairs = [(f"sentence {number}", f"{number}") for number in range(3000)]
    found = look(tmp_path, pairs + pairs[:1500])
    assert found.pairs == 4500
    assert 50 < len(found.sample) <= 200
    assert len(dict(found.sample)) == len(found.sample)
    assert found.repeated == pytest.approx(1 / 3, abs=0.15)  # a third, within three deviations of so small a sample


def test_held_out_pairs_share_no_sentence_with_the_training_text(tmp_path: Path) -> None:
    pairs = [(f"s{number % 400}", f"t{number % 300}") for number in range(1200)]
    corpus, data = corpus_of(tmp_path, pairs)
    sample = survey(corpus, data, lambda pairs: None).sample
    (tmp_path / "out").mkdir()
    write_splits(corpus, data, {"validation": sample[:10], "test": sample[10:20]}, tmp_path / "out", lambda pairs: None)
    written = {
        name: list(zip(*((tmp_path / "out" / f"{name}.{code}").read_text().splitlines() for code in ("en", "ru")), strict=True))
        for name in ("train", "validation", "test")
    }  # fmt: skip
    assert written["validation"] == sample[:10]
    assert written["test"] == sample[10:20]
    held_out = [*written["validation"], *written["test"]]
    for side in (0, 1):
        assert not {pair[side] for pair in written["train"]} & {pair[side] for pair in held_out}
    taken = [{pair[side] for pair in held_out} for side in (0, 1)]
    assert written["train"] == [pair for pair in pairs if pair[0] not in taken[0] and pair[1] not in taken[1]]


def test_line_ends_within_a_cell_of_a_table_become_spaces(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('en,de\n"a\nb","c"\nd,"e\nf"\n')
    corpus = CorpusConfig(path=str(tmp_path / "a.csv"))
    data = DataConfig(train=corpus)
    write_splits(corpus, data, {"test": [("x\ny", "z")]}, tmp_path, lambda pairs: None)
    assert (tmp_path / "train.en").read_text() == "a b\nd\n"
    assert (tmp_path / "train.de").read_text() == "c\ne f\n"
    assert (tmp_path / "test.en").read_text() == "x y\n"


def test_sides_of_different_lengths_are_refused_with_both_numbers(tmp_path: Path) -> None:
    corpus, data = corpus_of(tmp_path, [("a", "b")] * 3)
    (tmp_path / "a.ru").write_text("b\n")
    with pytest.raises(DataError, match=r"has 3 lines, but .* has 1"):
        survey(corpus, data, lambda pairs: None)
