"""Validation text from elsewhere is there without a network after it was read once."""

import fsspec
import pytest
from web_server import web_server

from dist_transformer.config.data_schema import CorpusConfig, DataConfig
from dist_transformer.config.schema import Config
from dist_transformer.data.sources import retries
from dist_transformer.data.sources.cached_text import kept_pairs, texts_to_keep
from dist_transformer.errors import DataError
from dist_transformer.files import read_json, write_json

TEXT = {"a.en": "one\ntwo\n\nfour\n", "a.de": "eins\nzwei\ndrei\nvier\n"}
ROW = (["one", "two", "", "four"], ["eins", "zwei", "drei", "vier"])


@pytest.fixture(autouse=True)
def one_attempt(monkeypatch):
    monkeypatch.setattr(retries, "READ_ATTEMPTS", 1)


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


def test_a_corpus_at_an_address_is_read_once_and_then_from_its_copy(elsewhere, tmp_path):
    corpus, data = data_of("memory://kept")
    assert kept_pairs(corpus, data, None, tmp_path) == ROW
    assert kept_pairs(corpus, data, 2, tmp_path) == tuple(side[:2] for side in ROW)
    elsewhere.rm("/kept/a.de")
    assert kept_pairs(corpus, data, None, tmp_path) == ROW
    for other, most in ((data, 3), (data_of("memory://kept", normalization="NFKC")[1], None)):
        with pytest.raises(DataError, match=r"a\.de"):
            kept_pairs(corpus, other, most, tmp_path)


def test_text_that_changed_at_its_address_is_read_anew_and_kept_for_when_the_server_is_gone(tmp_path):
    (folder := tmp_path / "web").mkdir()
    prepared = tmp_path / "prepared"
    with web_server(folder) as server:
        for name, text in TEXT.items():
            (folder / name).write_text(text, encoding="utf-8")
        corpus, data = data_of(server.address)
        assert kept_pairs(corpus, data, None, prepared) == ROW
        [copy] = prepared.rglob("*.json")
        before = read_json(copy)
        assert kept_pairs(corpus, data, None, prepared) == ROW
        (folder / "a.en").write_text(TEXT["a.en"].replace("two", "2"), encoding="utf-8")
        changed = (["one", "2", "", "four"], ROW[1])
        assert kept_pairs(corpus, data, None, prepared) == changed
        write_json(copy, {side: before[side] for side in ("source", "target")})  # as the version before wrote it
        assert kept_pairs(corpus, data, None, prepared) == changed
    assert kept_pairs(corpus, data, None, prepared) == changed
    write_json(copy, {side: before[side] for side in ("source", "target")})
    assert kept_pairs(corpus, data, None, prepared) == ROW


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
