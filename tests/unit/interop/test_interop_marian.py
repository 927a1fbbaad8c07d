"""Hugging Face's MarianMTModel both ways, against the package transformers itself."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from marian_folders import CODES, demo_sentences, make_marian_folder
from safetensors.torch import load_file, save_file
from tokenised_models import make_model_folder
from torch import Tensor

from dist_transformer.config.data_schema import TokenizerConfig
from dist_transformer.config.schema import DecodingConfig
from dist_transformer.data.special_tokens import SpecialTokens
from dist_transformer.data.tokenizer.tokenizer import Tokenizer, train_tokenizer
from dist_transformer.decoding.search import TorchSearcher, pad_together
from dist_transformer.errors import CheckpointError, DataError, UserError
from dist_transformer.interop.marian import export_marian, import_marian
from dist_transformer.interop.marian_vocabulary import export_vocabulary
from dist_transformer.interop.model_folder import LoadedModel, TokenizerFiles, load_model_folder
from dist_transformer.model.search_interface import SearchInput

pytestmark = pytest.mark.slow  # importing transformers' model takes seconds
VARIANTS = [
    {},
    {"left_out": 5},
    {"is_shared": False},
    {"is_shared": False, "tie_word_embeddings": False},
    {"tie_word_embeddings": False, "activation_function": "relu"},
    {"kind": "bpe", "activation_function": "gelu"},
]


def tokenizer_of(loaded: LoadedModel) -> Tokenizer:
    return Tokenizer.load(loaded.tokenizer_files.source, loaded.tokenizer_files.target)


def test_sentences() -> tuple[list[str], list[str]]:
    """Not those that the tokenizers were trained on; two with characters that no piece has."""
    source, target = demo_sentences(400)
    return [*source[300:], "Ω, not Ωμ <<", ""], [*target[300:], "Ω, nicht Ωμ <<", ""]


test_sentences.__test__ = False  # type: ignore[attr-defined]


def known(ids: list[list[int]], size: int, unknown: int) -> list[list[int]]:
    """Pieces that vocab.json lacks are the unknown piece there, and have ids of their own, after the others, here."""
    return [[number if number < size else unknown for number in sentence] for sentence in ids]


def padded(theirs: "transformers.MarianTokenizer", ours: Tokenizer) -> tuple[Tensor, Tensor]:
    """Source and decoder input of a few sentences as MarianTokenizer cuts them."""
    source, target = test_sentences()
    target_ids = theirs(text_target=target[:8]).input_ids
    return (
        pad_together(theirs(source[:8]).input_ids, ours.pad_id),
        pad_together([[ours.bos_id, *sentence[:-1]] for sentence in target_ids], ours.pad_id),
    )


def marian_logits(model: "transformers.MarianMTModel", source_BS: Tensor, target_BT: Tensor) -> Tensor:
    is_real = (source_BS != model.config.pad_token_id).long()
    with torch.no_grad():
        return model.double()(input_ids=source_BS, attention_mask=is_real, decoder_input_ids=target_BT).logits


def our_logits(loaded: LoadedModel, source_BS: Tensor, target_BT: Tensor) -> Tensor:
    with torch.no_grad():
        return loaded.model.double()(source_BS, target_BT)


@pytest.mark.parametrize("given", VARIANTS, ids=str)
def test_an_imported_model_has_marians_logits_and_token_ids_and_goes_back_unchanged(tmp_path: Path, given: Any):
    model = make_marian_folder(tmp_path / "theirs", **given)
    import_marian(tmp_path / "theirs", tmp_path / "ours")
    loaded = load_model_folder(tmp_path / "ours")
    ours, theirs = tokenizer_of(loaded), transformers.MarianTokenizer.from_pretrained(tmp_path / "theirs")
    source, target = test_sentences()
    if given.get("is_shared", True):
        source[::3] = [f"{CODES[number % 2]} {sentence}" for number, sentence in enumerate(source[::3])]
    sizes, unknown = (model.config.vocab_size, model.config.decoder_vocab_size), theirs.unk_token_id
    assert known(ours.encode_source(source), sizes[0], unknown) == theirs(source).input_ids
    assert known(ours.encode_target(target), sizes[1], unknown) == theirs(text_target=target).input_ids
    has_others = any(number >= sizes[0] for sentence in ours.encode_source(source) for number in sentence)
    assert has_others == ("left_out" in given)

    source_BS, target_BT = padded(theirs, ours)
    expected = marian_logits(model, source_BS, target_BT)
    found = our_logits(loaded, source_BS, target_BT)[..., : expected.shape[2]]
    with_our_ids_BS = pad_together(ours.encode_source(test_sentences()[0][:8]), ours.pad_id)
    same_words = our_logits(loaded, with_our_ids_BS, target_BT)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(same_words[..., : expected.shape[2]], expected, rtol=0, atol=1e-5)

    export_marian(loaded, tmp_path / "back")
    back = transformers.MarianMTModel.from_pretrained(tmp_path / "back").eval()
    again = transformers.MarianTokenizer.from_pretrained(tmp_path / "back")
    torch.testing.assert_close(
        marian_logits(back, source_BS, target_BT)[..., : expected.shape[2]], expected, rtol=0, atol=1e-5
    )
    assert known(again(source).input_ids, sizes[0], unknown) == theirs(source).input_ids
    assert known(again(text_target=target).input_ids, sizes[1], unknown) == theirs(text_target=target).input_ids


@pytest.mark.parametrize(
    "given",
    [
        {"activation": "silu", "output_bias": True},
        {"is_shared": False},
        {"is_shared": False, "tied_output": False, "activation": "gelu"},
    ],
    ids=str,
)
def test_an_exported_model_has_our_logits_and_token_ids_and_comes_back_unchanged(tmp_path: Path, given: Any):
    loaded = make_model_folder(tmp_path / "ours", **given)
    export_marian(loaded, tmp_path / "theirs")
    model = transformers.MarianMTModel.from_pretrained(tmp_path / "theirs").eval()
    ours, theirs = tokenizer_of(loaded), transformers.MarianTokenizer.from_pretrained(tmp_path / "theirs")
    source, target = test_sentences()
    assert theirs(source).input_ids == ours.encode_source(source)
    assert theirs(text_target=target).input_ids == ours.encode_target(target)
    ours_25, theirs_25 = (
        (30 / 29) ** DecodingConfig().length_penalty,
        (25 / 24) ** model.generation_config.length_penalty,
    )
    assert theirs_25 == pytest.approx(ours_25, abs=1e-3)
    assert theirs.model_max_length == model.generation_config.max_length == model.config.max_position_embeddings
    source_BS, target_BT = padded(theirs, ours)
    expected = our_logits(loaded, source_BS, target_BT)
    found = marian_logits(model, source_BS, target_BT)
    torch.testing.assert_close(found, expected[..., : found.shape[2]], rtol=0, atol=1e-5)

    import_marian(tmp_path / "theirs", tmp_path / "back")
    back = load_model_folder(tmp_path / "back")
    again = our_logits(back, source_BS, target_BT)[..., : found.shape[2]]
    torch.testing.assert_close(again, found, rtol=0, atol=1e-5)
    assert tokenizer_of(back).encode_source(source) == ours.encode_source(source)


def test_only_the_texts_that_the_page_names_are_cut_in_another_way(tmp_path: Path):
    make_marian_folder(tmp_path / "theirs")
    import_marian(tmp_path / "theirs", tmp_path / "ours")
    theirs = transformers.MarianTokenizer.from_pretrained(tmp_path / "theirs")
    ours = tokenizer_of(load_model_folder(tmp_path / "ours"))
    differ = ["a </s> b", "a <pad> b", "a <unk> b", ">>xyz<< a b", "a >>deu<< b"]
    assert not [text for text in differ if theirs(text).input_ids == ours.encode_source([text])[0]]
    same = ["a <s> b", ">>deu<< a b", "a >>xyz<< b", "a >> b << c"]
    assert [theirs(text).input_ids for text in same] == ours.encode_source(same)


def test_heads_that_do_not_divide_the_width_are_refused(tmp_path: Path):
    """MarianMTModel and Marian compute the size of a head from both."""
    loaded = make_model_folder(tmp_path / "ours", num_heads=3, key_size=5, value_size=5)
    with pytest.raises(UserError, match=r"model\.num_heads is 3, expected 1 or 2 or 4 or 8 or 16"):
        export_marian(loaded, tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()


def test_tags_that_are_language_codes_to_marians_tokenizer_are_refused_and_others_give_our_ids(tmp_path: Path):
    """MarianTokenizer takes a code off the line first, so that the blank before it is gone."""
    source, target = demo_sentences(300)
    files = TokenizerFiles(tmp_path / "shared.model")
    settings, languages = TokenizerConfig(vocabulary_size=200), ("en", "de")
    train_tokenizer(iter([*source, *target]), settings, files.source, ["<2deu>"])
    export_vocabulary(tmp_path, files, True, languages)
    texts = [f"<2deu> {text}" for text in source[:5]]
    theirs = transformers.MarianTokenizer.from_pretrained(tmp_path)
    assert theirs(texts).input_ids == Tokenizer.load(files.source).encode_source(texts)
    train_tokenizer(iter([*source, *target]), settings, files.source, ["<1>", ">>deu<<"])
    with pytest.raises(UserError, match=r"shared.model: has the pieces >>deu<<, .* other tokens.*<2deu>"):
        export_vocabulary(tmp_path, files, True, languages)


def test_an_exported_model_generates_in_hugging_face_what_our_search_finds(tmp_path: Path):
    loaded = make_model_folder(tmp_path / "ours", output_bias=True)
    ours = tokenizer_of(loaded)
    export_marian(loaded, tmp_path / "theirs")
    theirs = transformers.MarianTokenizer.from_pretrained(tmp_path / "theirs")
    model = transformers.MarianMTModel.from_pretrained(tmp_path / "theirs").eval()
    source = test_sentences()[0][:6]
    searcher = TorchSearcher(
        [loaded.model],
        special=SpecialTokens(ours.bos_id, ours.eos_id, ours.pad_id),
        config=DecodingConfig(beam_size=1),
        device=torch.device("cpu"),
    )
    for sentence, ids in zip(source, ours.encode_source(source), strict=True):
        (best,) = searcher.search([SearchInput(ids, [], 0)])[0]
        longest = len(ids) + DecodingConfig().max_extra_tokens
        generated = model.generate(**theirs([sentence], return_tensors="pt"), num_beams=1, max_length=longest + 1)
        assert generated[0].tolist() == [ours.bos_id, *best.tokens, ours.eos_id]
        assert theirs.decode(generated[0], skip_special_tokens=True) == ours.decode_target(best.tokens)


def test_an_imported_model_translates_and_learns_though_it_begins_with_padding(tmp_path: Path):
    make_marian_folder(tmp_path / "theirs")
    import_marian(tmp_path / "theirs", tmp_path / "ours")
    loaded = load_model_folder(tmp_path / "ours")
    ours = tokenizer_of(loaded)
    assert ours.bos_id == ours.pad_id
    assert (ours.source_vocabulary, ours.target_vocabulary) == (loaded.information.source_vocabulary,) * 2
    source, target = (side[:16] for side in test_sentences())
    source_BS = pad_together(ours.encode_source(source), ours.pad_id)
    target_ids = ours.encode_target(target)
    target_in_BT = pad_together([[ours.bos_id, *ids[:-1]] for ids in target_ids], ours.pad_id)
    target_out_BT = pad_together(target_ids, ours.pad_id)
    optimizer = torch.optim.Adam(loaded.model.parameters(), lr=0.03)
    losses = []
    for _ in range(20):
        loss, _ = loaded.model.loss(source_BS, target_in_BT, target_out_BT, 0.1)
        losses.append(loss.item() / sum(map(len, target_ids)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.75 * losses[0], losses
    special = SpecialTokens(ours.bos_id, ours.eos_id, ours.pad_id)
    searcher = TorchSearcher([loaded.model], special, DecodingConfig(), torch.device("cpu"))
    for best, *_ in searcher.search([SearchInput(ids, [], 0) for ids in ours.encode_source(source)]):
        assert not {ours.pad_id, ours.eos_id} & set(best.tokens)
        assert max(best.tokens, default=0) < len(json.loads((tmp_path / "theirs/vocab.json").read_text()))


def test_pickled_weights_and_sinusoids_kept_as_weights_are_read(tmp_path: Path):
    make_marian_folder(tmp_path / "theirs")
    import_marian(tmp_path / "theirs", tmp_path / "safe")
    weights = load_file(tmp_path / "theirs/model.safetensors")
    model = transformers.MarianMTModel.from_pretrained(tmp_path / "theirs")
    weights["model.encoder.embed_positions.weight"] = model.model.encoder.embed_positions.weight.detach()
    torch.save(weights, tmp_path / "theirs/pytorch_model.bin")
    (tmp_path / "theirs/model.safetensors").unlink()
    import_marian(tmp_path / "theirs", tmp_path / "pickled")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("safe", "pickled"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def change(path: Path, **entries: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}), encoding="utf-8")


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"d_model": 8}, r"hold a tensor of \(48, 16\), where axis 1 should have d_model = 8 entries"),
        ({"d_model": 32}, r"hold a tensor of \(48, 16\), where axis 1 should have d_model = 32 entries"),
        ({"encoder_layers": 3}, "the Marian weights lack model.encoder.layers.2.self_attn.q_proj.weight"),
        ({"encoder_layers": 1}, "the Marian weights hold 16 tensors that this model has no place for"),
        ({"vocab_size": 9}, "has the id 9, expected 0 to 8"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused_by_name(tmp_path: Path, entries: Any, said: str):
    make_marian_folder(tmp_path / "theirs")
    change(tmp_path / "theirs/config.json", **entries)
    with pytest.raises(UserError, match=said):
        import_marian(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_missing_and_damaged_files_are_refused_by_name(tmp_path: Path):
    make_marian_folder(tmp_path / "theirs")
    weights = (tmp_path / "theirs/model.safetensors").read_bytes()
    (tmp_path / "theirs/model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no weights, expected model.safetensors or pytorch_model.bin"):
        import_marian(tmp_path / "theirs", tmp_path / "ours")
    (tmp_path / "theirs/pytorch_model.bin").write_bytes(b"no pickle")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: damaged, or not weights"):
        import_marian(tmp_path / "theirs", tmp_path / "ours")
    torch.save({"a": Path("runs nothing")}, tmp_path / "theirs/pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: holds a pickled model, not its weights"):
        import_marian(tmp_path / "theirs", tmp_path / "ours")
    (tmp_path / "theirs/model.safetensors").write_bytes(weights)
    (tmp_path / "theirs/source.spm").write_bytes(b"")
    with pytest.raises(DataError, match=r"source\.spm: not a complete sentencepiece model"):
        import_marian(tmp_path / "theirs", tmp_path / "ours")
    (tmp_path / "theirs/source.spm").write_bytes((tmp_path / "theirs/target.spm").read_bytes())
    (tmp_path / "theirs/vocab.json").write_text("[]")
    with pytest.raises(DataError, match=r"vocab\.json: expected names with values, got list"):
        import_marian(tmp_path / "theirs", tmp_path / "ours")


def test_positions_that_are_no_sinusoids_are_refused(tmp_path: Path):
    make_marian_folder(tmp_path / "theirs")
    path = tmp_path / "theirs/model.safetensors"
    weights = load_file(path)
    save_file({**weights, "model.decoder.embed_positions.weight": torch.ones(128, 16)}, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"hold model.decoder.embed_positions.weight that are no sinusoids"):
        import_marian(tmp_path / "theirs", tmp_path / "ours")


def test_a_model_that_marian_has_no_place_for_is_refused_with_all_reasons(tmp_path: Path):
    loaded = make_model_folder(tmp_path / "ours", norm="pre", norm_type="rms", activation="swiglu", positions="rotary")
    with pytest.raises(UserError) as refused:
        export_marian(loaded, tmp_path / "theirs")
    for reason in (
        "norm is pre",
        "norm_type is rms",
        "activation is swiglu",
        "positions is rotary",
        "final_norm is True",
    ):
        assert f"model.{reason}" in str(refused.value)
    assert not (tmp_path / "theirs").exists()
