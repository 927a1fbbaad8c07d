"""A vocabulary that grows: what the model made of old text it still makes, and a new piece is the mean of its parts."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dist_transformer.cli.model_verbs import extend_vocabulary_command
from dist_transformer.config.data_schema import TokenizerConfig
from dist_transformer.config.schema import ModelConfig
from dist_transformer.data.sources.demo_corpus import demo_pairs
from dist_transformer.data.tokenizer.model_file import Kind, read_pieces_file
from dist_transformer.data.tokenizer.tokenizer import Tokenizer, train_tokenizer
from dist_transformer.errors import DistTransformerError, UserError
from dist_transformer.interop.model_folder import (
    LoadedModel,
    ModelInformation,
    TokenizerFiles,
    load_model_folder,
    save_model_folder,
)
from dist_transformer.interop.vocabulary_extension import Growth, extended
from dist_transformer.model.transformer import Transformer

PAIRS = list(islice(demo_pairs("test"), 500))
SIZES: dict[str, Any] = dict(d_model=8, d_ff=12, num_heads=2, num_encoder_layers=1, num_decoder_layers=1)
NEW = ["nineteens", "oclock", "▁Meeting"]


@pytest.fixture(scope="module")
def sentencepiece_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    for name, side, size in (("source", 0, 200), ("target", 1, 208)):
        train_tokenizer(iter([pair[side] for pair in PAIRS]), TokenizerConfig(vocabulary_size=size), folder / name)
    return folder / "source", folder / "target"


def model_folder(folder: Path, source: Path, target: Path | None = None, **settings: Any) -> Path:
    """A model of random weights for these tokenizers."""
    torch.manual_seed(5)
    tokenizer = Tokenizer.load(source, target)
    sizes = (tokenizer.source_vocabulary, tokenizer.target_vocabulary)
    config = ModelConfig(**SIZES, **settings)
    model = Transformer(config, *sizes, tokenizer.pad_id)
    information = ModelInformation(*sizes, tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, "en", "de", 7)
    save_model_folder(folder, dict(model.named_parameters()), config, TokenizerFiles(source, target), information)
    return folder


def tokenizer_of(loaded: LoadedModel) -> Tokenizer:
    return Tokenizer.load(loaded.tokenizer_files.source, loaded.tokenizer_files.target)


def logits(loaded: LoadedModel, source: list[int], target: list[int]) -> torch.Tensor:
    begin = loaded.information.bos_id
    with torch.no_grad():
        return loaded.model(torch.tensor([source]), torch.tensor([[begin, *target]]))[0]


def extend(folder: Path, output: Path, *pieces: str, side: str = "both") -> tuple[LoadedModel, LoadedModel]:
    """The model before and after."""
    extend_vocabulary_command(folder, output, list(pieces), None, side)  # type: ignore[arg-type]
    return load_model_folder(folder), load_model_folder(output)


SHAPES = {
    "shared": {},
    "tied": {"shared_embeddings": False},
    "untied": {"shared_embeddings": False, "tied_output": False},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_old_text_has_the_same_logits_and_a_new_piece_the_mean_of_those_of_its_parts(
    shape: str, sentencepiece_models: tuple[Path, Path], tmp_path: Path
) -> None:
    before, after = extend(
        model_folder(tmp_path / "old", sentencepiece_models[0], **SHAPES[shape]), tmp_path / "new", *NEW
    )
    old, new = tokenizer_of(before), tokenizer_of(after)
    (source,), (target,) = old.encode_source([PAIRS[0][0]]), old.encode_target([PAIRS[1][0]])
    expected, found = logits(before, source, target), logits(after, source, target)
    torch.testing.assert_close(found[:, :200], expected)
    for index, piece in enumerate(NEW, start=200):
        parts = old.encode_target([piece.replace("▁", "")])[0][:-1]
        if not piece.startswith("▁") and old.target_pieces(parts)[0] == "▁":
            parts = parts[1:]
        assert len(parts) > 1
        torch.testing.assert_close(found[:, index], expected[:, parts].mean(dim=1))
    assert (new.source_vocabulary, after.information.source_vocabulary) == (208, 208)


def test_a_new_piece_of_the_source_is_embedded_as_the_mean_of_its_parts(
    sentencepiece_models: tuple[Path, Path], tmp_path: Path
) -> None:
    before, after = extend(model_folder(tmp_path / "old", sentencepiece_models[0]), tmp_path / "new", "▁Meeting")
    parts = tokenizer_of(before).encode_source(["Meeting"])[0][:-1]
    new, _ = tokenizer_of(after).encode_source(["Meeting"])[0]
    expected = before.model.source_embedding.weight[parts].mean(dim=0)
    torch.testing.assert_close(after.model.source_embedding.weight[new], expected)


@pytest.mark.parametrize(("side", "sizes"), [("source", (208, 208)), ("target", (200, 216)), ("both", (208, 216))])
def test_of_two_vocabularies_the_one_that_is_named_grows(
    side: str, sizes: tuple[int, int], sentencepiece_models: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = model_folder(tmp_path / "old", *sentencepiece_models, shared_embeddings=False)
    before, after = extend(folder, tmp_path / "new", "<bt>", side=side)
    assert (after.information.source_vocabulary, after.information.target_vocabulary) == sizes
    (source,), (target,) = tokenizer_of(before).encode_source(["acht"]), tokenizer_of(before).encode_target(["acht"])
    torch.testing.assert_close(logits(after, source, target)[:, :208], logits(before, source, target))
    files = after.tokenizer_files
    assert files.target is not None
    for grown, old, new in zip(
        (side != "target", side != "source"), sentencepiece_models, (files.source, files.target), strict=True
    ):
        assert (old.read_bytes() != new.read_bytes()) == grown


def test_two_models_of_one_vocabulary_keep_equal_ids_and_the_shared_row_is_the_mean_of_both_cuts(
    sentencepiece_models: tuple[Path, Path], tmp_path: Path
) -> None:
    source, target = sentencepiece_models[0], tmp_path / "target"
    proto = read_pieces_file(source)
    for piece in list(proto.pieces)[10:]:  # the same pieces by the same ids, but cut otherwise
        piece.type = Kind.CONTROL if len(piece.piece) > 1 else piece.type
    target.write_bytes(proto.SerializeToString())
    before, after = extend(model_folder(tmp_path / "old", source, target), tmp_path / "new", "▁Meeting")
    old, new = tokenizer_of(before), tokenizer_of(after)
    assert new.first_difference() is None
    of_source, of_target = old.encode_source(["Meeting"])[0][:-1], old.encode_target(["Meeting"])[0][:-1]
    assert of_source != of_target
    expected = before.model.source_embedding.weight[[*of_source, *of_target]].mean(dim=0)
    torch.testing.assert_close(after.model.source_embedding.weight[200], expected)
    assert [new.encode_source(["Meeting"])[0][0], new.encode_target(["Meeting"])[0][0]] == [200, 200]


def test_padding_behind_the_last_piece_moves_up_with_its_row() -> None:
    rows = torch.randn(16, 4)
    grown = extended(rows, Growth(num_pieces=13, cuts=((3, 5), (7,)), vocabulary=16, pad_id=13))
    assert torch.equal(grown[:13], rows[:13])
    torch.testing.assert_close(grown[13], (rows[3] + rows[5]) / 2)
    assert torch.equal(grown[14], rows[7])
    assert torch.equal(grown[15], rows[13])


def test_a_bias_of_the_output_grows_as_the_rows_do() -> None:
    bias = torch.randn(8)
    grown = extended(bias, Growth(num_pieces=8, cuts=((3, 5),), vocabulary=16, pad_id=0))
    assert torch.equal(grown[:8], bias)
    torch.testing.assert_close(grown[8], (bias[3] + bias[5]) / 2)
    assert torch.equal(grown[9:], bias[:1].repeat(7))


def test_pieces_come_from_a_file_too_and_the_settings_to_go_on_with_are_printed(
    sentencepiece_models: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model_folder(tmp_path / "old", sentencepiece_models[0])
    words = ["<a>", "", *(f"Wort{number}x" for number in range(30))]
    (tmp_path / "words").write_text("\n".join(words) + "\n", encoding="utf-8-sig")
    extend_vocabulary_command(folder, tmp_path / "new", None, tmp_path / "words", "both")
    said = capsys.readouterr().out
    assert "31 new pieces: <a> Wort0x " in said
    assert "and 11 more" in said
    assert f"tokenizer.source_model={tmp_path}/new/source.model training.init_from={tmp_path}/new" in said
    assert load_file(tmp_path / "new" / "model.safetensors")["source_embedding.weight"].shape == (232, 8)


@pytest.mark.parametrize(
    ("pieces", "side", "message"),
    [
        ([], "both", "there is no piece to add: give --pieces"),
        (["a b"], "both", "cannot be a piece: expected text without spaces"),
        (["a\u2028b"], "both", "cannot be a piece: expected .* without characters that cannot be seen"),
        (["\ufeff<bt>"], "both", "cannot be a piece: expected .* without characters that cannot be seen"),
        (["<s>"], "both", "the vocabulary has all of <s> already"),
        (["<bt>"], "source", "has one vocabulary for both sides; leave --side out"),
    ],
)
def test_what_cannot_be_added_is_refused_and_nothing_is_written(
    pieces: list[str], side: str, message: str, sentencepiece_models: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = model_folder(tmp_path / "old", sentencepiece_models[0])
    with pytest.raises(DistTransformerError, match=message):
        extend(folder, tmp_path / "new", *pieces, side=side)
    assert not (tmp_path / "new").exists()


def test_a_place_that_cannot_be_written_to_is_told(sentencepiece_models: tuple[Path, Path], tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "old", sentencepiece_models[0])
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/new: cannot be written \(.*Not a directory"):
        extend(folder, tmp_path / "file" / "new", "<bt>")


def test_a_folder_that_is_there_is_not_written_over(sentencepiece_models: tuple[Path, Path], tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "old", sentencepiece_models[0])
    with pytest.raises(UserError, match=r"old: is there already .*, expected a new path"):
        extend(folder, folder, "<bt>")


def test_a_file_of_pieces_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tmp_path}/none: cannot be read: No such file"):
        extend_vocabulary_command(tmp_path, tmp_path / "new", None, tmp_path / "none", "both")
