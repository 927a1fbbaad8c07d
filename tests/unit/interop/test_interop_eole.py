"""Eole's checkpoints in, against Eole's formulas; benchmarks/eole_scores.py asks Eole itself."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from eole_folder import eole_log_probabilities, make_eole_folder
from marian_folders import demo_sentences
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from dist_transformer.cli.main import app
from dist_transformer.config.schema import DecodingConfig
from dist_transformer.data.tokenizer.tokenizer import Tokenizer
from dist_transformer.decoding.engines import open_search
from dist_transformer.decoding.loaded_model import LoadedTranslator
from dist_transformer.decoding.scoring import score_pairs
from dist_transformer.decoding.translate import translate_lines
from dist_transformer.errors import CheckpointError, DataError, UserError
from dist_transformer.interop.eole import import_eole
from dist_transformer.interop.model_folder import load_model_folder

EVERYTHING_SHARED = {"share_embeddings": True, "share_decoder_embeddings": True, "add_ffnbias": True}


def pairs() -> list[tuple[str, str]]:
    source, target = demo_sentences(306)
    return [*zip(source[300:], target[300:], strict=True), ("Ω, not Ωμ", "Ω, nicht Ωμ")]


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"share_decoder_embeddings": True, "add_qkvbias": True, "mlp_activation_fn": "silu"},
        EVERYTHING_SHARED,
    ],
    ids=str,
)
def test_an_imported_model_computes_what_eole_does(tmp_path: Path, model: dict[str, Any]):
    make_eole_folder(tmp_path / "theirs", **model)
    import_eole(tmp_path / "theirs", tmp_path / "ours")
    loaded = load_model_folder(tmp_path / "ours")
    tokenizer = Tokenizer.load(loaded.tokenizer_files.source, loaded.tokenizer_files.target)
    # Together: a shorter source ends among others' padding.
    found = list(score_pairs([loaded.model.double()], tokenizer, pairs(), torch.device("cpu")))
    for pair, (_, ours) in zip(pairs(), found, strict=True):
        assert ours == pytest.approx(eole_log_probabilities(tmp_path / "theirs", *pair), abs=1e-5)
    assert "imported from Eole" in (tmp_path / "ours" / "README.md").read_text(encoding="utf-8")


def test_an_imported_model_translates_alike_in_both_engines_whatever_is_beside_a_line(tmp_path: Path):
    make_eole_folder(tmp_path / "theirs", **EVERYTHING_SHARED)
    import_eole(tmp_path / "theirs", tmp_path / "ours")
    lines = [source for source, _ in pairs()][:4]
    config = DecodingConfig(beam_size=2)
    together = list(LoadedTranslator(tmp_path / "ours", config).translate([lines[0], "", *lines[1:]]))
    alone = [next(LoadedTranslator(tmp_path / "ours", config).translate([line])) for line in lines]
    assert together == [alone[0], "", *alone[1:]]
    search = open_search("ctranslate2", [tmp_path / "ours"], config)
    found = translate_lines(search.searcher, search.tokenizer, [lines[0], "", *lines[1:]], config)
    assert [best.text for best, *_ in found] == together


def test_a_source_without_text_has_a_finite_score(tmp_path: Path):
    make_eole_folder(tmp_path / "theirs")
    import_eole(tmp_path / "theirs", tmp_path / "ours")
    loaded = load_model_folder(tmp_path / "ours")
    tokenizer = Tokenizer.load(loaded.tokenizer_files.source, loaded.tokenizer_files.target)
    assert tokenizer.source_end == tokenizer.pad_id != tokenizer.eos_id
    (scored,) = score_pairs([loaded.model], tokenizer, [("", "ja")], torch.device("cpu"))
    assert all(score < 0.0 for score in scored[1])


def test_all_settings_without_a_counterpart_are_told_together(tmp_path: Path):
    given = {"position_encoding_type": "Rotary", "parallel_residual": True, "mlp_activation_fn": "gated-silu"}
    make_eole_folder(tmp_path / "theirs", **given, norm_eps=1e-6)
    result = CliRunner().invoke(app, ["import", str(tmp_path / "theirs"), str(tmp_path / "ours"), "--from", "eole"])
    assert isinstance(result.exception, UserError)
    assert not (tmp_path / "ours").exists()
    for said in (
        "config.json: cannot be imported",
        "model.encoder.position_encoding_type: expected SinusoidalInterleaved, got Rotary",
        "model.decoder.parallel_residual: expected False, got True",
        "model.encoder.mlp_activation_fn: expected relu or gelu or silu, got gated-silu",
        "model.decoder.norm_eps: expected 1e-05, got 1e-06",
    ):
        assert said in str(result.exception)


def _edit(name: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
        change(content)
        (folder / name).write_text(json.dumps(content), encoding="utf-8")

    return edit


def _edit_weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        weights = load_file(folder / "model.00.safetensors")
        change(weights)
        save_file(weights, folder / "model.00.safetensors")

    return edit


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "error", "said"),
    [
        (
            lambda folder: (folder / "config.json").unlink(),
            DataError,
            r"config.json: cannot be read \(No such file or directory\), expected one of the model",
        ),
        (lambda folder: (folder / "de.model").unlink(), DataError, "de.model: no such file"),
        (_edit("config.json", lambda c: c.update(model=[])), DataError, r"model is \[\], expected names"),
        (_edit("config.json", lambda c: c.update(model="transformer")), DataError, "model is 'transformer'"),
        (_edit("config.json", lambda c: c["model"]["decoder"].update(heads=4)), UserError, "heads: expected one value"),
        (_edit("config.json", lambda c: c.update(transforms=["bpe"])), UserError, "cut by .*bpe.*sentencepiece"),
        (_edit("vocab.json", lambda c: c.pop("tgt")), DataError, "vocab.json: expected src and tgt"),
        (_edit("vocab.json", lambda c: c["tgt"].append("ja")), CheckpointError, "a matrix of .* for a vocabulary"),
        (_edit("vocab.json", lambda c: c.update(decoder_start_token="Ω")), DataError, "no piece 'Ω' .bos_token."),
        (_edit_weights(lambda w: w.pop("decoder.layer_norm.bias")), CheckpointError, "decoder.layer_norm.bias"),
        (
            _edit_weights(lambda w: w.pop("encoder.transformer_layers.1.self_attn.linear_keys.weight")),
            CheckpointError,
            "lacks a tensor .*linear_keys",
        ),
        (_edit_weights(lambda w: w.update(estimator=torch.ones(1))), CheckpointError, "no place here: estimator"),
    ],
)
def test_a_damaged_folder_ends_in_one_message(
    tmp_path: Path, damage: Callable[[Path], None], error: type[Exception], said: str
):
    make_eole_folder(tmp_path / "theirs")
    damage(tmp_path / "theirs")
    with pytest.raises(error, match=said):
        import_eole(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
