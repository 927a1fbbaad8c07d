"""What the config.json of a Marian folder may say: its mistakes are told before anything else is read."""

import json
from pathlib import Path
from typing import Any

import pytest

from dist_transformer.errors import DataError, UserError
from dist_transformer.interop.marian import import_marian, read_settings
from dist_transformer.interop.marian_vocabulary import read_tokenizer_names

GIVEN: dict[str, Any] = {
    "model_type": "marian",
    "d_model": 16,
    "vocab_size": 100,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "scale_embedding": True,
    "pad_token_id": 99,
    "decoder_start_token_id": 99,
    "eos_token_id": 0,
}


def written(folder: Path, **entries: Any) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps({**GIVEN, **entries}), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"encoder_layers": "x"}, "encoder_layers: expected a whole number; got 'x'"),
        ({"decoder_layers": None}, "decoder_layers: is missing"),
        ({"encoder_layers": True}, "encoder_layers: expected a whole number; got true"),
        ({"dropout": 1.5}, "dropout: input should be less than 1; got 1.5"),
        ({"decoder_vocab_size": "600x"}, "decoder_vocab_size: expected a whole number; got '600x'"),
        ({"encoder_attention_heads": "4"}, "encoder_attention_heads: expected a whole number; got '4'"),
        (
            {"encoder_attention_heads": 3, "decoder_attention_heads": 3},
            "encoder_attention_heads: expected a divisor of d_model; got 3",
        ),
        ({"d_model": 20, "encoder_ffn_dim": 12}, "decoder_ffn_dim: expected the same as in the encoder; got 24"),
        (
            {"d_model": 17, "encoder_attention_heads": 1, "decoder_attention_heads": 1},
            "d_model: input should be a multiple of 2; got 17",
        ),
        ({"eos_token_id": [0, 3]}, "eos_token_id: expected a whole number; got [0, 3]"),
        ({"decoder_start_token_id": 0}, "eos_token_id: expected another id than decoder_start_token_id"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings: expected true or false; got 'no'"),
        ({"scale_embedding": None}, "scale_embedding: is missing"),
        ({"activation_function": ["relu"]}, "activation_function: input should be 'relu'"),
        ({"model_type": "bart"}, "model_type: input should be 'marian'; got 'bart'"),
    ],
    ids=str,
)
def test_an_entry_that_does_not_fit_is_named_with_the_file(tmp_path: Path, entries: Any, said: str):
    path = written(tmp_path / "theirs", **entries)
    with pytest.raises(UserError) as refused:
        import_marian(tmp_path / "theirs", tmp_path / "ours")
    message = str(refused.value)
    assert message.startswith(f"{path}: cannot be imported:\n")
    assert said in message
    assert len(message.splitlines()) == 3, "one problem, told once"


def test_all_problems_are_told_together(tmp_path: Path):
    path = written(tmp_path, encoder_layers="x", dropout=1.5, model_type=None, decoder_ffn_dim=12)
    with pytest.raises(UserError) as refused:
        read_settings(path)
    for name in ("encoder_layers", "dropout", "model_type", "decoder_ffn_dim"):
        assert f"  {name}: " in str(refused.value)


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path: Path):
    (tmp_path / "weights").write_text("no folder")
    with pytest.raises(DataError, match=r"weights/config\.json: cannot be read \(Not a directory\)"):
        import_marian(tmp_path / "weights", tmp_path / "ours")


def test_one_vocabulary_has_one_size_and_null_is_the_default(tmp_path: Path):
    together = read_settings(written(tmp_path, decoder_vocab_size=80))
    apart = read_settings(written(tmp_path, decoder_vocab_size=80, share_encoder_decoder_embeddings=False))
    without = read_settings(written(tmp_path, decoder_vocab_size=None, share_encoder_decoder_embeddings=False))
    assert [found.sizes for found in (together, apart, without)] == [(100, 100), (100, 80), (100, 100)]
    assert [found.config.shared_embeddings for found in (together, apart)] == [True, False]


@pytest.mark.parametrize(("of_encoder", "of_decoder", "ours"), [(0.2, 0.2, 0.2), (0.2, 0.0, 0.0)])
def test_layers_are_dropped_where_both_stacks_drop_as_many(tmp_path, of_encoder, of_decoder, ours):
    settings = read_settings(written(tmp_path, encoder_layerdrop=of_encoder, decoder_layerdrop=of_decoder))
    assert settings.config.layer_drop == ours


def test_names_of_the_tokenizer_that_are_no_text_are_refused(tmp_path: Path):
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"unk_token": {"content": "<u>"}, "source_lang": None}))
    names = read_tokenizer_names(tmp_path)
    assert (names["unk_token"], names["source_lang"]) == ("<u>", "")
    path.write_text(json.dumps({"source_lang": ["en"]}))
    with pytest.raises(DataError, match=r"tokenizer_config\.json: source_lang is \['en'\], expected text"):
        read_tokenizer_names(tmp_path)
