"""The README.md of model folders and exported folders: what it says, what survives, what is the user's."""

import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import sentencepiece
import yaml
from eole_folder import make_eole_folder
from marian_folders import demo_sentences
from marian_npz import make_marian_npz
from tokenised_models import make_model_folder

from dist_transformer.config.schema import DecodingConfig, ModelConfig
from dist_transformer.decoding.engines import open_search
from dist_transformer.decoding.translate import translate_lines
from dist_transformer.interop.ctranslate2_export import export_ctranslate2
from dist_transformer.interop.eole import import_eole
from dist_transformer.interop.marian_npz import import_marian_npz
from dist_transformer.interop.model_card import CARD, MARK, Origin, add_scores, exported_card
from dist_transformer.interop.model_folder import (
    LoadedModel,
    ModelInformation,
    TokenizerFiles,
    card_of,
    load_model_folder,
    save_model_folder,
)
from dist_transformer.model.transformer import Transformer

CONFIG = ModelConfig(d_model=8, d_ff=16, num_heads=2, num_encoder_layers=1, num_decoder_layers=1)
INFORMATION = ModelInformation(20, 20, 3, 1, 2, "en", "de", 1200)
ORIGIN = Origin("average of step_00001200", ["trained on `train`: 1,000 pairs"])
SCORES = {
    "bleu": 28.4,
    "bleu_signature": "nrefs:1|v",
    "chrf": 58.25,
    "chrf_signature": "nc:6",
    "pairs": 1000,
    "beam_size": 4,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tmp_path / "model")
    return tmp_path / "model"


def save(folder: Path) -> None:
    (folder.parent / "source.model").write_bytes(b"pieces")
    model = Transformer(CONFIG, 20, 20, 3)
    files = TokenizerFiles(folder.parent / "source.model")
    save_model_folder(folder, dict(model.named_parameters()), CONFIG, files, INFORMATION, ORIGIN)


def text_of(folder: Path) -> str:
    return (folder / CARD).read_text()


def header_of(card: str) -> dict[str, object]:
    _, header, _ = card.split("---\n", 2)
    return dict(yaml.safe_load(header))


def test_a_model_folder_says_where_it_is_from_how_large_it_is_and_how_it_is_loaded(folder: Path) -> None:
    card, loaded = text_of(folder), load_model_folder(folder)
    assert header_of(card) == {
        "license": "unknown", "language": ["en", "de"], "pipeline_tag": "translation",
        "tags": ["translation", "dist-transformer"],
    }  # fmt: skip
    parameters = sum(parameter.numel() for parameter in loaded.model.parameters())
    for part in (
        "from en to de", "average of step_00001200, of optimizer step 1,200", "trained on `train`: 1,000 pairs",
        f"parameters: {parameters:,}", "Not evaluated yet", "--to marian", "--to ctranslate2", "from dist_transformer import",
    ):  # fmt: skip
        assert part in card
    assert card_of(loaded) == card


def test_scores_of_a_corpus_are_added_once_and_the_newest_stays(folder: Path) -> None:
    add_scores(folder, "test", SCORES)
    add_scores(folder, "news", SCORES)
    add_scores(folder, "test", {**SCORES, "bleu": 30.0, "plugin": 0.5, "plugin_signature": "score of a file"})
    card = text_of(folder)
    assert (
        "- test: BLEU 30.00 (`nrefs:1|v`), chrF 58.25 (`nc:6`), plug-in 0.5000 (`score of a file`); 1,000 pairs, beam 4\n"
        in card
    )
    assert [card.count(each) for each in ("- test:", "- news: BLEU 28.40", "Not evaluated")] == [1, 1, 0]
    assert "## How to load it" in card


@pytest.mark.parametrize(
    ("search", "said"),
    [
        ({"beam_size": 1}, "greedy search"),
        ({"sampling": True, "seed": 5, "temperature": 1.0}, "sampled (seed 5)"),
        ({"sampling": True, "seed": 5, "top_k": 10}, "sampled (seed 5), top_k 10"),
        ({"too_long": "split", "max_source_tokens": 90}, "beam 4, max_source_tokens 90, too_long split"),
        ({"seed": 5}, "beam 4"),
    ],
)
def test_a_card_tells_the_search_of_its_scores(folder: Path, search: dict[str, object], said: str) -> None:
    add_scores(folder, "test", {**SCORES, **search})
    assert f"; 1,000 pairs, {said}\n" in text_of(folder)


def test_a_new_model_gets_a_new_card_with_the_licence_of_the_old_one(folder: Path) -> None:
    add_scores(folder, "test", SCORES)
    (folder / CARD).write_text(text_of(folder).replace("license: unknown", "license: cc-by-4.0"))
    save(folder)
    assert "license: cc-by-4.0\n" in text_of(folder)
    assert "Not evaluated yet" in text_of(folder)


def test_a_model_that_a_killed_process_left_aside_comes_back_before_the_new_one_takes_its_licence(folder: Path) -> None:
    (folder / CARD).write_text(text_of(folder).replace("license: unknown", "license: cc-by-4.0"))
    folder.rename(folder.with_name(".model.4711.old"))
    save(folder)
    assert "license: cc-by-4.0\n" in text_of(folder)
    assert not folder.with_name(".model.4711.old").exists()


def test_a_folder_that_was_left_aside_is_not_taken_for_one_of_another_name(folder: Path) -> None:
    others = folder.with_name(".model.10.4711.old")
    folder.rename(others)
    save(folder)
    assert others.exists()
    assert "license: unknown\n" in text_of(folder)


def test_a_card_without_the_mark_is_the_users(folder: Path) -> None:
    own = text_of(folder).replace(MARK + "\n", "").replace("## Data", "## My data")
    (folder / CARD).write_text(own)
    add_scores(folder, "test", SCORES)
    save(folder)
    assert text_of(folder) == own


@pytest.mark.parametrize(("kind", "library", "loader"), [
    ("marian", "transformers", "MarianMTModel.from_pretrained"), ("ctranslate2", "ctranslate2", "ctranslate2.Translator("),
])  # fmt: skip
def test_an_exported_card_keeps_what_the_models_says(folder: Path, kind, library: str, loader: str) -> None:
    add_scores(folder, "test", SCORES)
    of_code = {"target_model": "source.model", "end": ["</s>"], "never": [["<s>"], ["<pad>"]]}
    of_model = text_of(folder).replace("license: unknown", "license: mit")
    card = exported_card(kind, of_model, asdict(INFORMATION), limit=1024, **of_code)
    assert header_of(card)["library_name"] == library
    assert header_of(card)["license"] == "mit"
    assert "- test: BLEU 28.40" in card
    assert loader in card
    assert "from dist_transformer import" not in card
    assert card.count("license:") == 1


def imported(convert: Callable[[Path, Path], None], make: Callable[..., object]) -> Callable[[Path], LoadedModel]:
    def load(folder: Path) -> LoadedModel:
        make(folder.parent / "theirs")
        convert(folder.parent / "theirs", folder)
        return load_model_folder(folder)

    return load


def ending_at_once(folder: Path) -> LoadedModel:
    loaded = make_model_folder(folder, is_shared=False, output_bias=True)
    loaded.model.output_bias.data[loaded.information.eos_id] = 1000.0
    return loaded


@pytest.mark.slow
@pytest.mark.parametrize(
    ("load", "said", "count"),
    [
        (make_model_folder, "+ ['</s>']", 1),
        (make_model_folder, "max_decoding_length=min(1024, len(tokens) + 50)", 1000),
        (ending_at_once, "+ ['</s>']", 1),
        (imported(import_marian_npz, make_marian_npz), "suppress_sequences=[['<start>']]", 1),
        (imported(import_eole, make_eole_folder), "out_type=str)\n", 1),
    ],
    ids=["ours", "ours to the last position", "ending at once", "Marian's", "Eole's"],
)
def test_the_code_for_ctranslate2_translates_as_we_do_whatever_the_special_pieces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], load: Callable[[Path], LoadedModel], said: str, count: int
) -> None:
    exported, text = tmp_path / "exported", " ".join(demo_sentences(12)[0])
    export_ctranslate2(load(tmp_path / "ours"), exported)
    if count > 1:
        pieces = sentencepiece.SentencePieceProcessor(model_file=str(exported / "source.model"))
        text = pieces.decode((pieces.encode(text) * count)[:count])
        assert len(pieces.encode(text)) > 1024 - 50
    [code] = re.findall(r"(?s)```python\n(.*?)```", text_of(exported))
    assert said in code
    for part, other in (("THIS_FOLDER", str(exported)), ("A sentence.", text), ("**lengths", "**lengths, beam_size=1")):
        assert part in code
        code = code.replace(part, other)
    exec(code, {})
    # Tokens besides the source's: ours counts the ends of both sides, an end that is padding too.
    config = DecodingConfig(beam_size=1, max_extra_tokens=50 if said.startswith("out_type") else 51)
    search = open_search("ctranslate2", [exported], config)
    [[best, *_]] = translate_lines(search.searcher, search.tokenizer, [text], config)
    printed = capsys.readouterr().out
    assert printed.startswith(best.text) if count > 1 else printed == best.text + "\n"  # ours ends a position earlier
    assert (len(best.tokens) > 256) == (load is not ending_at_once)


def test_a_folder_of_an_older_version_has_no_card_and_its_export_has_one(folder: Path) -> None:
    (folder / CARD).unlink()
    add_scores(folder, "test", SCORES)
    assert not (folder / CARD).exists()
    card = exported_card("marian", card_of(load_model_folder(folder)), asdict(INFORMATION))
    assert "Not known to the program" in card
    of_users = exported_card("marian", "---\nlicense: mit\n---\nMine.\n", asdict(INFORMATION))
    assert "Mine." in of_users
    assert of_users.count("license: mit") == 1
