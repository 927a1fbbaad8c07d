"""Marian's own .npz both ways, against Marian's formulas; benchmarks/marian_scores.py asks Marian itself."""

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import torch
import yaml
from marian_folders import demo_sentences
from marian_npz import make_marian_npz, marian_log_probabilities, marian_spm, read_npz, write_npz
from running import records
from stuttering_disk import FOR_GOOD, stuttering
from tokenised_models import make_model_folder
from typer.testing import CliRunner

from dist_transformer import files
from dist_transformer.cli.main import app
from dist_transformer.config.schema import ModelConfig
from dist_transformer.data.tokenizer.model_file import read_pieces_file
from dist_transformer.data.tokenizer.tokenizer import Tokenizer
from dist_transformer.decoding.scoring import score_pairs
from dist_transformer.errors import MachineError, UserError
from dist_transformer.interop.marian_npz import export_marian_npz, import_marian_npz
from dist_transformer.interop.marian_vocabulary import read_object
from dist_transformer.interop.model_folder import LoadedModel, load_model_folder
from dist_transformer.model.layers import sinusoids
from dist_transformer.model.transformer import Transformer

LIKE_MARIAN: dict[str, Any] = {"positions": "marian"}


def pairs() -> list[tuple[str, str]]:
    source, target = demo_sentences(306)
    return [*zip(source[300:], target[300:], strict=True), ("Ω, not Ωμ", "Ω, nicht Ωμ")]


def scores(loaded: LoadedModel) -> list[tuple[list[int], list[float]]]:
    tokenizer = Tokenizer.load(loaded.tokenizer_files.source, loaded.tokenizer_files.target)
    return list(score_pairs([loaded.model.double()], tokenizer, pairs(), torch.device("cpu")))


def same_as_marian(loaded: LoadedModel, folder: Path, sides: tuple[Path, Path]) -> bool:
    """Our score of each token of each pair is what Marian's formulas give for the ids that its vocabularies give."""
    spm = [sentencepiece.SentencePieceProcessor(model_file=str(side)) for side in sides]
    for (source, target), (_, found) in zip(pairs(), scores(loaded), strict=True):
        ids = [[*side.encode(text), side.eos_id()] for side, text in zip(spm, (source, target), strict=True)]
        expected = marian_log_probabilities(folder / "model.npz", *ids)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    return True


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"activation": "silu", "output_bias": True},
        {"is_shared": False},
        {"is_shared": False, "tied_output": False},
    ],
    ids=str,
)
def test_an_exported_model_computes_in_marian_what_it_does_here_and_comes_back_the_same(tmp_path: Path, given: Any):
    loaded = make_model_folder(tmp_path / "ours", **LIKE_MARIAN, **given)
    export_marian_npz(loaded, tmp_path / "theirs")
    vocabularies = tmp_path / "theirs/source.spm", tmp_path / "theirs/target.spm"
    assert same_as_marian(load_model_folder(tmp_path / "ours"), tmp_path / "theirs", vocabularies)
    arrays, settings = read_npz(tmp_path / "theirs/model.npz")
    rows = [loaded.information.source_vocabulary, loaded.information.target_vocabulary]
    assert settings["dim-vocabs"] == rows
    decoder = yaml.safe_load((tmp_path / "theirs/decoder.yml").read_text(encoding="utf-8"))
    assert (decoder["max-length"], decoder["max-length-crop"]) == (1000, True)  # else it ends at a longer line
    spm = [sentencepiece.SentencePieceProcessor(model_file=str(path)) for path in vocabularies]
    assert [side.get_piece_size() for side in spm] == rows
    assert all(array.flags.c_contiguous and array.ndim == 2 for name, array in arrays.items() if ":" not in name)

    import_marian_npz(tmp_path / "theirs", tmp_path / "back")
    back = load_model_folder(tmp_path / "back")
    assert back.config.model_dump(exclude={"output_bias", "preset"}) == loaded.config.model_dump(
        exclude={"output_bias", "preset"}
    )
    before, after = scores(load_model_folder(tmp_path / "ours")), scores(back)
    for (ids, first), (ids_again, second) in zip(before, after, strict=True):
        assert ids == ids_again
        np.testing.assert_allclose(first, second, rtol=0, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"transformer_ffn_activation": "swish", "transformer_decoder_dim_ffn": 12},
        {"tied_embeddings_all": False},
        {"tied_embeddings_all": False, "tied_embeddings": True},
    ],
    ids=str,
)
def test_an_imported_model_computes_what_it_does_in_marian(tmp_path: Path, given: Any):
    arrays = make_marian_npz(tmp_path / "theirs", **given)
    import_marian_npz(tmp_path / "theirs", tmp_path / "ours")
    loaded = load_model_folder(tmp_path / "ours")
    names = ["vocab.spm"] * 2 if given.get("tied_embeddings_all", True) else ["source.spm", "target.spm"]
    assert same_as_marian(loaded, tmp_path / "theirs", (tmp_path / "theirs" / names[0], tmp_path / "theirs" / names[1]))
    assert loaded.model.target_embedding.weight[loaded.information.bos_id].eq(0).all()

    export_marian_npz(load_model_folder(tmp_path / "ours"), tmp_path / "back")
    again, _ = read_npz(tmp_path / "back/model.npz")
    for name, array in arrays.items():
        if ":" not in name:
            rows = array.shape[-1] if name == "decoder_ff_logit_out_b" else len(array)
            part = again[name][:, :rows] if name == "decoder_ff_logit_out_b" else again[name][:rows]
            np.testing.assert_array_equal(part, array)


def test_a_vocabulary_in_yaml_numbers_the_pieces_that_the_models_beside_it_cut(tmp_path: Path):
    folder = tmp_path / "theirs"
    make_marian_npz(folder)
    spm = sentencepiece.SentencePieceProcessor(model_proto=marian_spm())
    numbers = {spm.id_to_piece(number): number for number in range(spm.get_piece_size())}
    numbers["~"] = numbers.pop(rarest := spm.id_to_piece(spm.get_piece_size() - 1))
    (folder / "vocab.yml").write_text(
        "".join(
            f"{json.dumps(piece, ensure_ascii=False) if piece != '~' else piece}: {id}\n"
            for piece, id in numbers.items()
        ),
        encoding="utf-8",
    )
    for side in ("source", "target"):
        (folder / f"{side}.spm").write_bytes(marian_spm())
    (folder / "model.npz.decoder.yml").write_text("models: [/tmp/model.npz]\nvocabs: [a/vocab.yml, a/vocab.yml]\n")
    import_marian_npz(folder, tmp_path / "ours")
    loaded = load_model_folder(tmp_path / "ours")
    tokenizer = Tokenizer.load(loaded.tokenizer_files.source, loaded.tokenizer_files.target)
    for source, _ in pairs():
        known = [numbers.get(piece, 1) for piece in spm.encode(source, out_type=str)]
        found = [number if number < len(numbers) else 1 for number in tokenizer.encode_source([source])[0]]
        assert found == [*known, 0]
    assert rarest not in numbers
    if all(rarest not in spm.encode(text, out_type=str) for pair in pairs() for text in pair):
        assert same_as_marian(loaded, folder, (folder / "source.spm", folder / "target.spm"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {},
            r"model\.positions is sinusoidal, expected marian; the embedding of its start symbol is not zero.*init_from",
        ),
        ({"norm": "pre"}, r"model\.norm is pre, expected post; model\.final_norm is True, expected False"),
        ({"activation": "gelu"}, r"model\.activation is gelu, expected silu or relu"),
        ({"norm_type": "rms"}, r"model\.norm_type is rms, expected layer"),
        ({"num_heads": 3, "key_size": 5, "value_size": 5}, r"model\.num_heads is 3, expected 1 or 2 or 4 or 8 or 16"),
        ({"key_size": 6, "value_size": 6}, r"model\.key_size is 6, expected 4; model\.value_size is 6, expected 4"),
    ],
    ids=str,
)
def test_a_model_that_marian_would_not_compute_exactly_is_refused(tmp_path: Path, given: Any, said: str):
    loaded = make_model_folder(tmp_path / "ours", **given)
    with pytest.raises(UserError, match=said):
        export_marian_npz(loaded, tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()


def test_a_start_symbol_that_is_not_zero_is_refused_whatever_the_settings(tmp_path: Path):
    loaded = make_model_folder(tmp_path / "ours", **LIKE_MARIAN)
    with torch.no_grad():
        loaded.model.target_embedding.weight[loaded.information.bos_id, 3] = 1e-3
    with pytest.raises(
        UserError, match=r"cannot be one for Marian: the embedding of its start symbol is not zero\. Export"
    ):
        export_marian_npz(loaded, tmp_path / "theirs")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"transformer_decoder_autoreg": "rnn"}, r"autoreg: expected self-attention, got rnn\n.*SSRU cells there"),
        ({"type": "s2s", "transformer_preprocess": "n"}, r"type: expected transformer, got s2s\n.*preprocess: .*got n"),
        ({"transformer_ffn_activation": "gelu"}, r"ffn-activation: expected swish or relu, got gelu"),
        ({"transformer_tied_layers": [1, 1]}, r"tied-layers: expected \[\], got \[1, 1\]"),
        ({"transformer_decoder_dim_ffn": 99}, r"decoder-dim-ffn: expected 0 or 12, got 99"),
        ({"dim_emb": None}, r"d_model: "),
        ({"dim_emb": 16}, r"lacks a tensor that its settings tell, or its shape|do not fit"),
        ({"enc_depth": 3}, r"model\.npz: lacks a tensor .*encoder_l3_self_Wq"),
        ({"enc_depth": 1}, r"holds 16 tensors without a place here: encoder_l2_"),
        ({"left_out": ("special:model.yml",)}, r"model\.npz: not a complete \.npz of Marian with special:model\.yml"),
    ],
    ids=str,
)  # fmt: skip
def test_a_model_without_a_counterpart_here_is_refused_by_name(tmp_path: Path, given: Any, said: str):
    make_marian_npz(tmp_path / "theirs", **given)
    with pytest.raises(UserError, match=said):
        import_marian_npz(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_missing_damaged_and_unfitting_files_are_refused_by_name(tmp_path: Path):
    folder = tmp_path / "theirs"
    arrays = make_marian_npz(folder)
    decoder, content = folder / "model.npz.decoder.yml", (folder / "model.npz").read_bytes()

    def refused(said: str) -> None:
        with pytest.raises(UserError, match=said):
            import_marian_npz(folder, tmp_path / "ours")

    for damaged in (b"", b"no zip", content[: len(content) // 2], content[:-200]):
        (folder / "model.npz").write_bytes(damaged)
        refused(r"model\.npz: not a complete \.npz of Marian")
    write_npz(folder / "model.npz", {**arrays, "Wemb": arrays["Wemb"][:-5]})
    refused(r"has the id \d+, expected 0 to|a matrix of \d+ rows|lacks a tensor")
    (folder / "model.npz").unlink()
    refused(r"model\.npz: not a complete \.npz of Marian")
    write_npz(folder / "model.npz", arrays)
    (folder / "vocab.spm").rename(folder / "away.spm")
    refused(r"vocab\.spm: no such file")
    decoder.write_text("models: [a.npz, b.npz]\nvocabs: [vocab.spm, vocab.spm]\n")
    refused(r"expected one file \*decoder\.yml, .* found 1 with \['a\.npz', 'b\.npz'\]")
    decoder.write_text("models: [")
    refused(r"decoder\.yml: not JSON or YAML")
    decoder.write_text("[1]")
    refused(r"decoder\.yml: expected names with values, got list")
    decoder.unlink()
    refused(r"expected one file \*decoder\.yml, .* found 0")


def test_files_that_cannot_be_read_for_a_moment_are_waited_for_and_a_disk_that_is_away_is_no_mistake_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    make_marian_npz(tmp_path / "theirs")
    left, load = [10**6], np.load

    def stutters(path: Path, **given: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.ESTALE, "Stale file handle")
        return load(path, **given)

    for read, name in ((read_object, "model.npz.decoder.yml"), (read_pieces_file, "vocab.spm")):
        with (
            stuttering(errno.ESTALE, {name}, FOR_GOOD),
            pytest.raises(MachineError, match=f"{name}: cannot be read now"),
        ):
            read(tmp_path / "theirs" / name)
    monkeypatch.setattr(np, "load", stutters)
    monkeypatch.setattr(files, "PAUSES_SECONDS", (0.0,))
    with pytest.raises(MachineError, match=r"model\.npz: cannot be read now"):
        import_marian_npz(tmp_path / "theirs", tmp_path / "ours")
    left[0] = 1
    import_marian_npz(tmp_path / "theirs", tmp_path / "ours")
    assert load_model_folder(tmp_path / "ours")


def test_marians_sinusoids_are_its_formula_and_a_start_at_zero_stays_out_of_training():
    expected = np.concatenate([f(np.arange(50)[:, None] * 10000.0 ** (-np.arange(4) / 3)) for f in (np.sin, np.cos)], 1)
    np.testing.assert_allclose(sinusoids(50, 8, are_marians=True), expected, rtol=0, atol=1e-6)
    torch.manual_seed(1)
    model = Transformer(ModelConfig(preset="tiny", d_model=8, num_heads=2, positions="marian"), 16, 16, pad_id=0)
    assert {module.eps for module in model.modules() if isinstance(module, torch.nn.LayerNorm)} == {1e-6}
    model.keep_start_at_zero(1)
    loss, _ = model.loss(torch.tensor([[4, 5, 2]]), torch.tensor([[1, 6, 7]]), torch.tensor([[6, 7, 2]]), 0.1)
    loss.backward()
    gradient = model.target_embedding.weight.grad
    assert gradient is not None
    assert gradient[1].eq(0).all()
    assert all(gradient[row].ne(0).any() for row in (0, 3, 4, 5, 6, 7, 2, 15))


@pytest.mark.slow
def test_training_keeps_the_start_at_zero_in_every_stage_and_the_verbs_take_the_model(
    tmp_path: Path, train_small: Callable[..., Path]
):
    settings = ("model.positions=marian", "optimizer.weight_decay=0.1", "schedule.warmup_steps=1")
    for stage in range(4):
        links = (f"training.zero_stage={stage}", f"training.max_steps={2 * stage + 2}", "checkpoints.every_steps=2")
        folder = train_small("zero", *settings, *links, ranks=2)
        loaded = load_model_folder(folder / "model")
        weight = loaded.model.target_embedding.weight
        assert weight[loaded.information.bos_id].eq(0).all(), f"stage {stage}"
        others = [weight[row] for row in range(len(weight)) if row != loaded.information.bos_id]
        assert all(row.ne(0).any() for row in others), f"stage {stage}"
    losses = [record["loss"] for record in records(folder)]
    assert losses[-1] < losses[0]
    said = run("export", folder, tmp_path / "theirs", "--to", "marian-npz")
    assert said == f"{tmp_path}/theirs: written for marian-npz\n"
    assert "marian-decoder -c THIS_FOLDER/decoder.yml" in (tmp_path / "theirs/README.md").read_text(encoding="utf-8")
    decoder = yaml.safe_load((tmp_path / "theirs/decoder.yml").read_text(encoding="utf-8"))
    assert (decoder["models"], decoder["vocabs"]) == (["model.npz"], ["source.spm", "target.spm"])
    sections = run("import", tmp_path / "theirs", tmp_path / "back", "--from", "marian-npz")
    assert 'positions: "marian"' in sections
    fine = train_small(
        "fine", *settings, f"training.init_from={tmp_path}/back", "model.output_bias=true",
        f"tokenizer.source_model={tmp_path}/back/source.model",
    )  # fmt: skip
    again = load_model_folder(fine / "model")
    assert again.model.target_embedding.weight[again.information.bos_id].eq(0).all()


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output
