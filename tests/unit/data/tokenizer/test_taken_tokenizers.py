"""Tokenizers that are taken from files: two models of one vocabulary, and the tags that they must know."""

from pathlib import Path
from typing import Any

import pytest
from prepare_helpers import PAIRS, config_of, mixture_of, read_split, write_text

from dist_transformer.config.data_schema import TokenizerConfig
from dist_transformer.config.loading import load_config
from dist_transformer.data.manifest import Manifest
from dist_transformer.data.prepare.preparation import prepare, prepared_folder
from dist_transformer.data.tokenizer.model_file import Kind, read_pieces_file, texts
from dist_transformer.data.tokenizer.tokenizer import Tokenizer, train_tokenizer
from dist_transformer.errors import ConfigError, DataError
from dist_transformer.interop.vocabulary_extension import add_pieces


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("taken") / "source.model"
    train_tokenizer((side for pair in PAIRS for side in pair), TokenizerConfig(vocabulary_size=240), path)
    return path


def of_the_same_ids(model: Path, out: Path) -> Path:
    """A model with the pieces of `model` by the same ids that never uses the last eighty: it cuts text otherwise."""
    proto = read_pieces_file(model)
    for piece in list(proto.pieces)[160:]:
        if len(piece.piece) > 1:
            piece.type = Kind.CONTROL
    out.write_bytes(proto.SerializeToString())
    return out


def prepared(folder: Path, source: Path, target: Path, **data: Any) -> tuple[Path, Manifest]:
    write_text(folder)
    config = config_of(folder, tokenizer={"source_model": str(source), "target_model": str(target)}, data=data)
    manifest = prepare(config)
    return prepared_folder(config), manifest


def test_two_models_of_one_vocabulary_are_shared_and_each_cuts_its_side(tmp_path: Path, model: Path):
    other = of_the_same_ids(model, tmp_path / "target.model")
    folder, manifest = prepared(tmp_path, model, other)
    assert (folder / manifest.tokenizer.source).read_bytes() == model.read_bytes()
    assert (folder / manifest.tokenizer.target).read_bytes() == other.read_bytes()
    assert manifest.source_vocabulary == manifest.target_vocabulary == 240
    assert Tokenizer.load(model).encode_target([PAIRS[0][1]]) != Tokenizer.load(other).encode_target([PAIRS[0][1]])
    assert {(source, target) for _, source, target in read_split(folder, manifest, "train")} == set(PAIRS[:500])


def test_two_vocabularies_are_not_shared_and_the_first_piece_that_differs_is_named(tmp_path: Path, model: Path):
    other = tmp_path / "target.model"
    add_pieces(model, ["<bt>"], other)
    with pytest.raises(DataError, match=r"two vocabularies: piece 240 is '' in the one, '<bt>' in the other\. Set tok"):
        prepared(tmp_path, model, other)
    proto = read_pieces_file(model)
    first, second = texts(proto)[100:102]
    proto.pieces[100].piece, proto.pieces[101].piece = second, first
    other.write_bytes(proto.SerializeToString())
    with pytest.raises(DataError, match=f"piece 100 is '{first}' in the one, '{second}' in the other"):
        prepared(tmp_path, model, other)


def test_a_tag_that_a_taken_tokenizer_cannot_spell_is_refused_until_it_is_added(tmp_path: Path, model: Path):
    write_text(tmp_path)
    corpus = {"source": "train.en", "target": "train.de", "tags": ["<bt>"]}
    tagged = mixture_of(tagged=corpus)
    with pytest.raises(DataError, match=r"no pieces for the tags <bt> .* extend-vocabulary MODEL OUT --pieces '<bt>'"):
        prepare(config_of(tmp_path, tokenizer={"source_model": str(model)}, data=tagged))
    add_pieces(model, ["<bt>"], tmp_path / "new.model")
    config = config_of(tmp_path, tokenizer={"source_model": str(tmp_path / "new.model")}, data=tagged)
    rows = read_split(prepared_folder(config), prepare(config), "tagged")
    assert {source for _, source, _ in rows} == {f"<bt> {source}" for source, _ in PAIRS[:500]}


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["tokenizer.target_model=a.model"], "tokenizer.target_model: is given without tokenizer.source_model"),
        (
            ["tokenizer.source_model=a.model", "tokenizer.shared=false", "model.shared_embeddings=false"],
            "separate vocabularies need both source_model and target_model",
        ),
    ],
)
def test_a_model_that_is_missing_beside_the_other_is_asked_for(tmp_path: Path, overrides: list[str], problem: str):
    path = tmp_path / "run.yaml"
    path.write_text("data: {train: {demo: train}}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=problem):
        load_config(path, overrides, check_files=False)
    given = ["tokenizer.source_model=a.model", "tokenizer.target_model=b.model"]
    assert load_config(path, given, check_files=False).tokenizer.shared
