"""The verbs `import` and `export`."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
import torch
import transformers
from marian_folders import demo_sentences, make_marian_folder
from running import records
from safetensors.torch import load_file
from tokenised_models import make_model_folder
from typer.testing import CliRunner

from dist_transformer.cli.main import app
from dist_transformer.config.loading import load_config
from dist_transformer.config.schema import ModelConfig
from dist_transformer.data.tokenizer.tokenizer import Tokenizer
from dist_transformer.decoding.loaded_model import model_folder_of
from dist_transformer.errors import UserError
from dist_transformer.files import read_json
from dist_transformer.interop.ctranslate2_export import export_ctranslate2, load_exported, read_vocabularies
from dist_transformer.interop.marian import export_marian
from dist_transformer.interop.model_folder import LoadedModel, ModelInformation, TokenizerFiles, load_model_folder
from dist_transformer.model.transformer import Transformer
from dist_transformer.planning.vocabularies import vocabulary_sizes, with_counted_pieces


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def goes_on_from(folder: Path, said: str) -> None:
    """The sections that `import` prints are a configuration of this model, with its vocabularies."""
    _, *sections = said.splitlines()
    path = folder.parent / "fine.yaml"
    path.write_text("\n".join(["data: {train: {demo: train}}", *sections, ""]), encoding="utf-8")
    config, loaded = load_config(path), load_model_folder(folder)
    assert config.model == loaded.config
    assert config.training.init_from == str(folder)
    sizes = (loaded.information.source_vocabulary, loaded.information.target_vocabulary)
    assert vocabulary_sizes(with_counted_pieces(config)) == sizes


@pytest.mark.slow
def test_a_marian_folder_goes_in_and_out_to_both_programs(tmp_path: Path):
    make_marian_folder(tmp_path / "theirs")
    said = run("import", tmp_path / "theirs", tmp_path / "ours", "--from", "marian")
    assert said.startswith(f"{tmp_path}/ours: a model folder. To train it further")
    goes_on_from(tmp_path / "ours", said)
    with pytest.raises(
        UserError, match=r"theirs: a MarianMTModel of Hugging Face, .* import .*theirs OUT --from marian"
    ):
        load_model_folder(model_folder_of(tmp_path / "theirs"))
    assert "written for marian" in run("export", tmp_path / "ours", tmp_path / "back", "--to", "marian")
    first, second = (json.loads((tmp_path / name / "vocab.json").read_text()) for name in ("theirs", "back"))
    assert {text: second[text] for text in first} == first
    arguments = ("--to", "ctranslate2", "--quantization", "int8")
    assert "written for ctranslate2" in run("export", tmp_path / "ours", tmp_path / "fast", *arguments)
    with pytest.raises(UserError, match=r"fast: a model exported to CTranslate2, .* --engine ctranslate2"):
        model_folder_of(tmp_path / "fast")
    information, _ = load_exported(tmp_path / "fast")
    assert (information.source_language, information.target_language) == ("en", "de")


def test_a_piece_that_is_text_and_named_as_padding_stays_one_of_its_own_in_every_export(tmp_path: Path):
    path, settings = tmp_path / "shared.model", dict(vocab_size=120, hard_vocab_limit=False, minloglevel=2)
    with path.open("wb") as writer:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(demo_sentences(100)[0]),
            model_writer=writer,
            user_defined_symbols=["<pad>"],
            **settings,
        )
    files, config = TokenizerFiles(path), ModelConfig(preset="tiny", d_model=16, num_heads=2, d_ff=16)
    ours = Tokenizer.load(path)
    ids, sizes = (ours.pad_id, ours.bos_id, ours.eos_id), (ours.source_vocabulary, ours.target_vocabulary)
    model, information = Transformer(config, *sizes, ours.pad_id), ModelInformation(*sizes, *ids, "en", "de", 1)
    loaded = LoadedModel(model.eval(), files, config, information)
    export_ctranslate2(loaded, tmp_path / "fast")
    export_marian(loaded, tmp_path / "marian")
    rows, _ = read_vocabularies(tmp_path / "fast")
    numbers, names = (read_json(tmp_path / "marian" / f"{name}.json") for name in ("vocab", "tokenizer_config"))
    piece = sentencepiece.SentencePieceProcessor(model_file=str(path)).piece_to_id("<pad>")
    for number in (piece, ours.pad_id):
        assert rows.index(rows[number]) == number
        assert numbers[rows[number]] == number
    assert rows[piece] == "<pad>" != rows[ours.pad_id] == names["pad_token"]


@pytest.mark.slow
def test_an_imported_model_is_fine_tuned_and_goes_back_with_the_same_tokens(
    tmp_path: Path, train_small: Callable[..., Path]
):
    make_marian_folder(tmp_path / "theirs")
    run("import", tmp_path / "theirs", tmp_path / "ours", "--from", "marian")
    sizes = ("d_model=16", "d_ff=24", "num_heads=4", "num_encoder_layers=2", "num_decoder_layers=3")
    tokenizers = (f"tokenizer.{side}_model={tmp_path}/ours/{side}.model" for side in ("source", "target"))
    model = (f"model.{setting}" for setting in (*sizes, "activation=silu", "output_bias=true"))
    folder = train_small("fine", f"training.init_from={tmp_path}/ours", *tokenizers, *model)
    losses = [record["loss"] for record in records(folder)]
    assert losses[-1] < losses[0]
    run("export", folder, tmp_path / "back", "--to", "marian")
    before, after = (transformers.MarianTokenizer.from_pretrained(tmp_path / name) for name in ("theirs", "back"))
    sentences, _ = demo_sentences(320)
    assert before(sentences).input_ids == after(sentences).input_ids
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "back")]
    assert {name: x.shape for name, x in weights[0].items()} == {name: x.shape for name, x in weights[1].items()}
    assert all(
        not torch.equal(x, weights[1][name]) for name, x in weights[0].items() if not name.endswith("k_proj.bias")
    )


def test_what_the_options_cannot_mean_is_refused(tmp_path: Path):
    make_model_folder(tmp_path / "ours")
    with pytest.raises(UserError, match="--quantization int8: is of ctranslate2 and argos; drop it"):
        run("export", tmp_path / "ours", tmp_path / "out", "--to", "marian", "--quantization", "int8")
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(
        UserError,
        match="file: expected the folder of a model, found none; a model of the Hub is downloaded first",
    ):
        run("import", tmp_path / "file", tmp_path / "out", "--from", "marian")
    for verb, option in (("export", ("--to", "marian")), ("import", ("--from", "marian"))):
        with pytest.raises(UserError, match=f"{tmp_path}/ours: is there already .*, expected a new path"):
            run(verb, tmp_path / "ours", tmp_path / "ours", *option)
