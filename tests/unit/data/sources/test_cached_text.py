"""Validation text from elsewhere is there without a network after it was read once."""

import fsspec
import pytest

from dist_transformer.config.data_schema import CorpusConfig, DataConfig
from dist_transformer.config.schema import Config
from dist_transformer.data.sources import retries
from dist_transformer.data.sources.cached_text import kept_pairs, texts_to_keep
from dist_transformer.errors import DataError

TEXT = {"a.en": "one\ntwo\n\nfour\n", "a.de": "eins\nzwei\ndrei\nvier\n"}
ROW = (["one", "two", "", "four"], ["eins", "zwei", "drei", "vier"])


@pytest.fixture
def elsewhere():
    files = fsspec.filesystem("memory")
    for name, text in TEXT.items():
        files.pipe(f"/kept/{name}", text.encode())
    yield files
    files.rm("/kept", recursive=True)


def data_of(root, **settings):
    corpus = CorpusConfig(source="a.en", target="a.de")
    return corpus, DataConfig(root=str(root), train=corpus, **settings)


def test_a_corpus_at_an_address_is_read_once_and_then_from_its_copy(elsewhere, tmp_path, monkeypatch):
    monkeypatch.setattr(retries, "READ_ATTEMPTS", 1)
    corpus, data = data_of("memory://kept")
    assert kept_pairs(corpus, data, None, tmp_path) == ROW
    assert kept_pairs(corpus, data, 2, tmp_path) == tuple(side[:2] for side in ROW)
    elsewhere.rm("/kept/a.de")
    assert kept_pairs(corpus, data, None, tmp_path) == ROW
    for other, most in ((data, 3), (data_of("memory://kept", normalization="NFKC")[1], None)):
        with pytest.raises(DataError, match=r"a\.de"):
            kept_pairs(corpus, other, most, tmp_path)


def test_a_damaged_copy_is_read_anew(elsewhere, tmp_path):
    corpus, data = data_of("memory://kept")
    kept_pairs(corpus, data, None, tmp_path)
    [copy] = tmp_path.rglob("*.json")
    copy.write_text("{", encoding="utf-8")
    assert kept_pairs(corpus, data, None, tmp_path) == ROW
    assert copy.read_text(encoding="utf-8") != "{"


def test_local_text_is_read_where_it_is_as_it_is_now(tmp_path):
    for name, text in TEXT.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    corpus, data = data_of(tmp_path)
    assert kept_pairs(corpus, data, None, tmp_path / "prepared") == ROW
    (tmp_path / "a.en").write_text("ONE\n" * 4, encoding="utf-8")
    assert kept_pairs(corpus, data, 1, tmp_path / "prepared") == (["ONE"], ["eins"])
    assert not (tmp_path / "prepared").exists()


def test_of_the_prepared_corpus_text_is_read_only_for_translations():
    corpora = {
        "train": {"demo": "train"},
        "validation": {"demo": "validation"},
        "more_validation": {"n": {"demo": "test"}},
    }
    config = Config.model_validate({"data": corpora, "validation": {"max_sentences": 7}})
    assert {key: most for key, (_, most) in texts_to_keep(config).items()} == {
        "validation": 7,
        "more_validation.n": None,
    }
    config = Config.model_validate({"data": corpora, "validation": {"translate": False}})
    assert list(texts_to_keep(config)) == ["more_validation.n"]
