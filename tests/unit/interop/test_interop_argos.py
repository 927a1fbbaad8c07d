"""Packages for Argos Translate: what lies in them, read as its package reads it."""

import json
from pathlib import Path
from zipfile import ZipFile

import ctranslate2
import pytest
import sentencepiece
from marian_folders import demo_sentences
from marian_npz import make_marian_npz
from tokenised_models import make_model_folder
from typer.testing import CliRunner

from dist_transformer.cli.main import app
from dist_transformer.data.tokenizer.tokenizer import Tokenizer
from dist_transformer.errors import UserError
from dist_transformer.interop.ctranslate2_export import export_argos, export_ctranslate2


def test_a_package_has_what_argos_reads_and_translates_pieces_without_their_end_as_ours_with_it(tmp_path: Path):
    loaded = make_model_folder(tmp_path / "ours")
    export_argos(loaded, tmp_path / "en_de.argosmodel", "int8")
    with ZipFile(tmp_path / "en_de.argosmodel") as package:
        package.extractall(tmp_path / "installed")
    [folder] = (tmp_path / "installed").iterdir()
    names = {"metadata.json", "README.md", "sentencepiece.model", "model/model.bin", "model/config.json"}
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert found == {*names, "model/shared_vocabulary.json"}
    metadata = json.loads((folder / "metadata.json").read_text())
    assert (metadata["from_code"], metadata["from_name"]) == ("en", "English")
    assert (metadata["to_code"], metadata["to_name"]) == ("de", "German")
    assert "package.install_from_path" in (folder / "README.md").read_text(encoding="utf-8")

    export_ctranslate2(loaded, tmp_path / "whole", "int8")
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "sentencepiece.model"))
    tokenizer = Tokenizer.load(loaded.tokenizer_files.source)
    sentences = demo_sentences(308)[0][300:]
    without_end = [pieces.encode(sentence, out_type=str) for sentence in sentences]
    with_end = [tokenizer.source_pieces(ids) for ids in tokenizer.encode_source(sentences)]
    theirs, ours = (
        [each.hypotheses[0] for each in ctranslate2.Translator(str(path)).translate_batch(tokens, beam_size=2)]
        for path, tokens in ((folder / "model", without_end), (tmp_path / "whole", with_end))
    )
    assert theirs == ours


def test_equal_models_are_equal_packages(tmp_path: Path):
    loaded = make_model_folder(tmp_path / "ours")
    for name in ("first", "second"):
        export_argos(loaded, tmp_path / name)
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()


def test_a_package_goes_into_devices_and_through_links(tmp_path: Path):
    loaded = make_model_folder(tmp_path / "ours")
    for name, target in (("nowhere", Path("/dev/null")), ("latest", tmp_path / "package")):
        (tmp_path / name).symlink_to(target)
        export_argos(loaded, tmp_path / name)
        assert (tmp_path / name).readlink() == target
    assert ZipFile(tmp_path / "package").testzip() is None


def test_what_a_package_cannot_hold_is_refused_and_what_is_there_stays(tmp_path: Path):
    loaded = make_model_folder(tmp_path / "two", is_shared=False, tied_output=False)
    with pytest.raises(UserError, match=r"one sentencepiece model, this one two: train tokenizer\.shared: true"):
        export_argos(loaded, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    make_model_folder(tmp_path / "one")
    (tmp_path / "thesis").write_text("years of work")
    (tmp_path / "folder").mkdir()
    for name in ("thesis", "folder"):
        with pytest.raises(UserError, match=f"{tmp_path}/{name}: is there already"):
            run("export", tmp_path / "one", tmp_path / name, "--to", "argos")
    assert (tmp_path / "thesis").read_text() == "years of work"
    with pytest.raises(UserError, match="--shortlist x: is of --to ctranslate2; drop it, argos reads none"):
        run("export", tmp_path / "one", tmp_path / "out", "--to", "argos", "--shortlist", "x")
    assert "written for argos" in run("export", tmp_path / "one", tmp_path / "out", "--to", "argos")


def test_a_model_without_languages_is_refused_with_what_to_write_into_which_file(tmp_path: Path):
    make_marian_npz(tmp_path / "theirs")
    run("import", tmp_path / "theirs", tmp_path / "ours", "--from", "marian-npz")
    export = ("export", tmp_path / "ours", tmp_path / "out", "--to", "argos")
    with pytest.raises(
        UserError, match=r"--to argos: no codes of languages: set source_language and .*'s config\.json"
    ):
        run(*export)
    assert not (tmp_path / "out").exists()
    config = json.loads((tmp_path / "ours/config.json").read_text(encoding="utf-8"))
    languages = {"source_language": "en", "target_language": "de"}
    (tmp_path / "ours/config.json").write_text(json.dumps({**config, **languages}), encoding="utf-8")
    run(*export)
    assert "translate-en_de/metadata.json" in ZipFile(tmp_path / "out").namelist()


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output
